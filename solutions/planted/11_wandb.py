"""Planted wrong answers of lesson 11: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("tracking.groups", "every rank keeps the mean", "runs", "    elif rank == 0:\n", "    else:\n"),
    Planted("tracking.groups", "all ranks under one name", "runs", 'f"{name}-rank{rank}"', "name"),
    Planted("tracking.groups", "runs without a group", "runs", ", group=name)", ")"),
    Planted(
        "tracking.groups", "rank 0's own loss", "rows", "            loss = total.item() / dist.get_world_size()\n", ""
    ),
    Planted("tracking.groups", "the sum", "rows", "total.item() / dist.get_world_size()", "total.item()"),
    Planted("tracking.groups", "counts rows, not steps", "rows", "step=step)", "step=step // every)"),
    Planted("tracking.groups", "left open", "finished", "        run.finish()", "        pass"),
    Planted(
        "tracking.groups",
        "a mean that nobody keeps",
        "collectives",
        "        if not every_rank:\n",
        "        if every_rank:\n            dist.all_reduce(torch.tensor(loss))\n        if not every_rank:\n",
    ),
    Planted(
        "tracking.groups",
        "a mean in every step",
        "collectives",
        "    for step in range(0, len(losses), every):\n",
        "    for loss in losses:\n        dist.all_reduce(torch.tensor(loss))\n"
        "    for step in range(0, len(losses), every):\n",
    ),
    Planted(
        "tracking.redact",
        "any name with token in it",
        "the rest",
        "name.lower().endswith(ENDINGS)",
        "any(ending in name.lower() for ending in ENDINGS)",
    ),
    Planted("tracking.redact", "names in lower case alone", "by name", "name.lower().endswith", "name.endswith"),
    Planted("tracking.redact", "the first level alone", "by name", "else mask(item)", "else item"),
    Planted("tracking.redact", "not in lists", "within texts", "return [mask(item) for item in value]", "return value"),
    Planted(
        "tracking.redact",
        "whole texts alone",
        "within texts",
        "value = value.replace(secret, MASK)",
        "value = MASK if value == secret else value",
    ),
    Planted(
        "tracking.redact",
        "the first of the secrets",
        "within texts",
        "for secret in secrets:",
        "for secret in secrets[:1]:",
    ),
    Planted(
        "tracking.redact",
        "an empty text is masked too",
        "the rest",
        "isinstance(item, str) and item and",
        "isinstance(item, str) and",
    ),
    Planted(
        "tracking.redact",
        "in place",
        "a copy",
        "    return mask(config)",
        "    made = mask(config)\n    config.clear()\n    config.update(made)\n    return config",
    ),
    Planted(
        "tracking.redact",
        "everything becomes text",
        "the rest",
        "            return [mask(item)",
        "            return [str(mask(item))",
    ),
    Planted(
        "tracking.resumed",
        "one after the other",
        "steps",
        "    return [rows[step] for step in sorted(rows)]",
        '    return [json.loads(line) for attempt in attempts for line in attempt["text"].splitlines()\n'
        '            if line.endswith("}")]',
    ),
    Planted(
        "tracking.resumed",
        "keeps what was lost",
        "steps",
        '        rows = {step: row for step, row in rows.items() if step <= attempt["resumed_at"]}\n',
        "",
    ),
    Planted("tracking.resumed", "loses the checkpoint's own step", "steps", "if step <= attempt", "if step < attempt"),
    Planted(
        "tracking.resumed",
        "stumbles over a line cut short",
        "steps",
        'attempt["text"].rpartition("\\n")[0].splitlines()',
        'attempt["text"].splitlines()',
    ),
    Planted(
        "tracking.resumed",
        "drops each last line",
        "scores",
        'attempt["text"].rpartition("\\n")[0].splitlines()',
        'attempt["text"].splitlines()[:-1]',
    ),
    Planted(
        "tracking.resumed",
        "a later line replaces a row",
        "losses",
        'rows.setdefault(row["step"], {}).update(row)',
        'rows[row["step"]] = row',
    ),
    Planted("tracking.resumed", "the last attempt alone", "steps", 'if step <= attempt["resumed_at"]', "if False"),
    Planted("tracking.resumed", "sorted as text", "steps", "sorted(rows)]", "sorted(rows, key=str)]"),
    Planted(
        "tracking.groups",
        "all losses in one collective",
        "collectives",
        "",
        """import torch
import torch.distributed as dist


def track(start, name, losses, every, every_rank):
    rank, run = dist.get_rank(), None
    if every_rank:
        run = start(f"{name}-rank{rank}", group=name)
    else:
        total = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(total)
        losses = (total / dist.get_world_size()).tolist()
        run = start(name) if rank == 0 else None
    if run is not None:
        for step in range(0, len(losses), every):
            run.log({"train/loss": losses[step]}, step=step)
        run.finish()
""",
    ),
    Planted(
        "tracking.groups",
        "rank 0 alone asks for the mean",
        "rows",
        "        if not every_rank:\n",
        "        if not every_rank and rank == 0:\n",
    ),
    Planted(
        "tracking.groups",
        "begins with a later step",
        "rows",
        "range(0, len(losses), every)",
        "range(every, len(losses), every)",
    ),
    Planted(
        "tracking.groups",
        "rank 0's run alone is finished",
        "finished",
        "    if run is not None:\n        run.finish()",
        "    if rank == 0:\n        run.finish()",
    ),
    Planted("tracking.tracker", "an outage stops the training", "rows", "except ConnectionError:", "except KeyError:"),
    Planted(
        "tracking.tracker",
        "forgets what could not be sent",
        "rows",
        "            pass\n",
        '            self.store["waiting"] = "[]"\n',
    ),
    Planted("tracking.tracker", "each process a run of its own", "one run", 'and "id" not in store', ""),
    Planted("tracking.tracker", "a resumed step twice", "rows", 'and step > int(self.store["last"])', ""),
    Planted(
        "tracking.tracker",
        "sent rows wait again",
        "rows",
        '                self.store["waiting"] = json.dumps(waiting)\n',
        "",
    ),
    Planted("tracking.tracker", "names in each rank's order", "rows", "names = sorted(values)", "names = list(values)"),
    Planted("tracking.tracker", "a sum for a mean", "rows", "        means /= dist.get_world_size()\n", ""),
    Planted(
        "tracking.tracker",
        "rank 0's own values",
        "rows",
        "        dist.all_reduce(means)\n        means /= dist.get_world_size()\n",
        "",
    ),
    Planted("tracking.tracker", "each rank a run", "one run", "dist.get_rank() == 0", "True"),
    Planted(
        "tracking.tracker",
        "opens the run for each row",
        "one run",
        "            if self.run is None:\n",
        "            if True:\n",
    ),
    Planted(
        "tracking.tracker",
        "a collective for each name",
        "one collective",
        "        dist.all_reduce(means)\n",
        "        for one in means:\n            dist.all_reduce(one)\n",
    ),
    Planted("tracking.tracker", "never finishes", "finished", "            self.run.finish()\n", ""),
    Planted(
        "tracking.tracker",
        "the other ranks keep an id",
        "store",
        'if self.is_main and "id" not in store',
        'if "id" not in store',
    ),
)
