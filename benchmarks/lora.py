"""Adapters: what a rank holds and sends by method and strategy, beside the plan, and how fast a step is beside PEFT's.

    python benchmarks/lora.py [--ranks 2] [--pairs 30]

Bytes are counted on real ranks. Steps of the two libraries take turns in one process, with the same base model, rows
and first adapters; the ratio is the median over the pairs, and both end with the same logits.
"""

import statistics
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from benchmarks.harness import options, publish, ratios, seconds, table
from course_lib.launching.launch import launch
from course_lib.lessons.adapters import lab
from course_lib.lessons.turns import in_turns


def with_pefts_adapters(ours: nn.Module) -> nn.Module:
    """PEFT's model with the first adapters of ours."""
    adapters = LoraConfig(r=lab.RANK, lora_alpha=2 * lab.RANK, target_modules="all-linear")
    model = get_peft_model(lab.small_llama(), adapters)
    drawn = {f"base_model.model.{name}": weight for name, weight in ours.named_parameters() if "lora_A" in name}
    for name, weight in model.named_parameters():
        if "lora_A" in name:
            weight.data.copy_(drawn[name.replace(".default", "")])
    return model


def in_pairs(pairs: int) -> tuple[float, float]:
    """Median of PEFT's seconds over ours per step, and how far the logits of both are apart at the end."""
    ours = lab.prepared("LoRA")
    models = {"ours": ours, "PEFT": with_pefts_adapters(ours)}

    def steps_of(model: nn.Module) -> Callable[[], None]:
        """A step on the next of this model's batches, which are the same for both."""
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
        drawn = torch.Generator().manual_seed(0)

        def step() -> None:
            ids = torch.randint(512, (8, 64), generator=drawn)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = in_turns({name: partial(seconds, steps_of(model)) for name, model in models.items()}, pairs, warm_up=3)
    ids = torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in models.values()]
    return statistics.median(ratios(found["PEFT"], found["ours"])), (logits[0] - logits[1]).abs().max().item()


def main() -> None:
    """Measure, and write benchmarks/lora.md."""
    args = options(__doc__, ranks=2, pairs=30)
    held, rows = launch(lab.all_held, num_processes=args.ranks, device="cpu", stream=False)[0], []
    for way, methods in held.items():
        for method, counted in methods.items():
            plan = lab.planned(way, method, args.ranks)
            kinds = (f"{counted.bytes[kind] / 1e3:.0f} ({plan[kind] / 1e3:.0f})" for kind in lab.KINDS)
            rows.append((way, method, f"{counted.trained:,}", *kinds, f"{sum(counted.sent.values()) / 1e3:.0f}"))
    ratio, apart = in_pairs(args.pairs)
    publish(
        "lora",
        "Adapters",
        ("torch", "transformers"),
        f"A Llama of 4 blocks of width 128 in fp32, {lab.ROWS} rows of {lab.TOKENS} tokens per rank, rank {lab.RANK} "
        f"beside all linear layers of the blocks, {args.ranks} ranks over gloo. Counted on rank 0, in brackets what "
        "the planner foresees; activations at their most, all else as it rests.",
        table(
            "strategy | method | trained | parameters, kB | gradients, kB | states, kB | activations, kB | sent, kB",
            rows,
            right=range(2, 8),
        ),
        f"A step of LoRA with PEFT {version('peft')} takes {ratio:.2f} times as long as with ours, the median of "
        f"{args.pairs} pairs in one process; afterwards the logits of both are {apart:.0e} apart at most.",
    )


if __name__ == "__main__":
    main()
