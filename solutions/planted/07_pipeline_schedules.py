"""Planted wrong answers of lesson 07: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted(
        "pipeline.bubble",
        "wait over work",
        "1F1B",
        "(stages_per_rank * microbatches + ranks - 1)",
        "(stages_per_rank * microbatches)",
    ),
    Planted("pipeline.bubble", "ranks for ranks - 1", "1F1B", "return (ranks - 1)", "return ranks"),
    Planted(
        "pipeline.bubble", "no gain from interleaving", "interleaved", "stages_per_rank * microbatches", "microbatches"
    ),
    Planted(
        "pipeline.1f1b", "GPipe: all forwards first", "in flight", "min(ranks - 1 - rank, microbatches)", "microbatches"
    ),
    Planted("pipeline.1f1b", "no warm-up", "bubble", "min(ranks - 1 - rank, microbatches)", "0"),
    Planted(
        "pipeline.1f1b",
        "drops the last backward",
        "runs",
        "for backward in range(microbatches):",
        "for backward in range(microbatches - 1):",
    ),
    Planted(
        "pipeline.1f1b",
        "one forward too many held",
        "in flight",
        "min(ranks - 1 - rank, microbatches)",
        "min(ranks - rank, microbatches)",
    ),
    Planted(
        "pipeline.interleaved",
        "1F1B's warm-up",
        "runs",
        "(stages_per_rank - 1) * ranks + 2 * (ranks - 1 - rank)",
        "ranks - 1 - rank",
    ),
    Planted(
        "pipeline.interleaved",
        "all forwards first",
        "in flight",
        "row = forwards[:warmup]",
        "warmup = len(forwards)\n    row = forwards[:warmup]",
    ),
    Planted(
        "pipeline.interleaved",
        "backwards in the order of the forwards",
        "runs",
        "back = stages_per_rank - 1 - lap",
        "back = lap",
    ),
    Planted(
        "pipeline.interleaved",
        "neighbouring stages on a rank",
        "runs",
        "{lap * ranks + rank}F",
        "{rank * stages_per_rank + lap}F",
    ),
    Planted(
        "pipeline.zero_bubble",
        "W right after I",
        "bubble",
        'if backward >= rank:\n            row.append(f"{rank}W{backward - rank}")\n'
        '    row += [f"{rank}W{m}" for m in range(max(0, microbatches - rank), microbatches)]',
        'row.append(f"{rank}W{backward}")',
    ),
    Planted(
        "pipeline.zero_bubble",
        "all W at the end",
        "in flight",
        'if backward >= rank:\n            row.append(f"{rank}W{backward - rank}")\n'
        '    row += [f"{rank}W{m}" for m in range(max(0, microbatches - rank), microbatches)]',
        'pass\n    row += [f"{rank}W{m}" for m in range(microbatches)]',
    ),
    Planted(
        "pipeline.zero_bubble",
        "forgets the last W's",
        "runs",
        '    row += [f"{rank}W{m}" for m in range(max(0, microbatches - rank), microbatches)]\n',
        "",
    ),
    Planted(
        "pipeline.balance",
        "the same number of blocks per stage",
        "dearest stage",
        "    return list(best[len(costs)][1])",
        "    return [len(costs) * stage // stages for stage in range(1, stages)]",
    ),
    Planted(
        "pipeline.balance",
        "fills up to the mean, from the left",
        "dearest stage",
        "    return list(best[len(costs)][1])",
        "    cuts, filled = [], 0\n    for place, cost in enumerate(costs):\n"
        "        if place and filled >= sum(costs) / stages and len(cuts) < stages - 1:\n"
        "            cuts.append(place)\n            filled = 0\n        filled += cost\n"
        "    while len(cuts) < stages - 1:\n        cuts.append(len(costs) - 1)\n    return sorted(cuts)",
    ),
    Planted(
        "pipeline.balance",
        "one stage too few",
        "contiguous stages",
        "    return list(best[len(costs)][1])",
        "    return list(best[len(costs)][1])[1:]",
    ),
    Planted("pipeline.bubble", "twice as many idle slots", "1F1B", "return (ranks - 1)", "return 2 * (ranks - 1)"),
    Planted(
        "pipeline.bubble",
        "divides the wait, not the work",
        "interleaved",
        "return (ranks - 1)",
        "return (ranks - 1) / stages_per_rank",
    ),
    Planted(
        "pipeline.1f1b",
        "the last rank warms up longest",
        "runs",
        "min(ranks - 1 - rank, microbatches)",
        "min(rank, microbatches)",
    ),
    Planted(
        "pipeline.balance",
        "cuts behind the largest block",
        "dearest stage",
        "    return list(best[len(costs)][1])",
        "    order = sorted(range(1, len(costs)), key=lambda place: -costs[place - 1])\n"
        "    return sorted(order[: stages - 1])",
    ),
    Planted(
        "pipeline.run", "the sum over micro-batches", "gradients", ".square().mean() / len(inputs)", ".square().mean()"
    ),
    Planted(
        "pipeline.run",
        "all forwards first, whatever the row says",
        "follows its row",
        "for action in row:",
        'for action in sorted(row, key=lambda action: "B" in action):',
    ),
    Planted(
        "pipeline.run",
        "sends no gradient back",
        "gradients",
        '                give(stage - 1, "B", m, x.grad)',
        "                pass",
    ),
    Planted("pipeline.run", "keeps what a backward has used", "lets go", "kept.pop((stage, m))", "kept[stage, m]"),
    Planted(
        "pipeline.run",
        "ones for the gradient that came",
        "gradients",
        'take(stage, "B", m, stage + 1))',
        'torch.ones_like(take(stage, "B", m, stage + 1)))',
    ),
    Planted(
        "pipeline.run",
        "one loss, their sum",
        "losses",
        "return [losses[m] for m in sorted(losses)]",
        "return [sum(losses.values())]",
    ),
    Planted("pipeline.run", "an input without a gradient", "gradients", ".requires_grad_()", ""),
    Planted(
        "pipeline.run",
        "the input of the first micro-batch for all",
        "gradients",
        "x = inputs[m] if stage == 0",
        "x = inputs[0] if stage == 0",
    ),
    Planted(
        "pipeline.run",
        "a loss in each stage of the last rank",
        "gradients",
        "            if stage == count - 1:\n",
        "            if rank == ranks - 1:\n",
    ),
    Planted(
        "pipeline.run",
        "forwards alone",
        "follows its row",
        "        else:\n            x, output = kept",
        "        elif m < 0:\n            x, output = kept",
    ),
)
