"""Adapters: what a rank holds and sends by method and strategy, beside the plan, and how fast a step is beside PEFT's.

    python benchmarks/lora.py [--ranks 2] [--pairs 30]

Bytes are counted on real ranks. Steps of the two libraries take turns in one process, with the same base model, rows
and first adapters; the ratio is the median over the pairs, and both end with the same logits.
"""

import argparse
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from course_lib.launching.launch import launch
from course_lib.lessons.adapters import lab
from course_lib.system import machine
from course_lib.writing import write_text


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
    optimizers = {
        name: torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
        for name, model in models.items()
    }
    ratios = []
    for number in range(pairs + 3):  # three to warm up
        ids = torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(number))
        seconds = {}
        for name in models if number % 2 else reversed(models):
            start = time.perf_counter()
            models[name](input_ids=ids, labels=ids).loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name] = time.perf_counter() - start
        ratios.append(seconds["PEFT"] / seconds["ours"])
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in models.values()]
    return statistics.median(ratios[3:]), (logits[0] - logits[1]).abs().max().item()


def main() -> None:
    """Measure, and write benchmarks/lora.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    held = launch(lab.all_held, num_processes=options.ranks, device="cpu", stream=False)[0]
    heads = "strategy | method | trained | parameters, kB | gradients, kB | states, kB | activations, kB | sent, kB"
    lines = [f"| {heads} |", "|---|---|---:|---:|---:|---:|---:|---:|"]
    for way, methods in held.items():
        for method, counted in methods.items():
            plan = lab.planned(way, method, options.ranks)
            cells = [f"{counted.bytes[kind] / 1e3:.0f} ({plan[kind] / 1e3:.0f})" for kind in lab.KINDS]
            cells += [f"{sum(counted.sent.values()) / 1e3:.0f}"]
            lines.append(f"| {way} | {method} | {counted.trained:,} | {' | '.join(cells)} |")
    ratio, apart = in_pairs(options.pairs)
    table = "\n".join(lines)
    text = (
        f"# Adapters\n\n{machine.measured_on('torch', 'transformers')}\n\nA Llama of 4 blocks of width 128 in "
        f"fp32, {lab.ROWS} rows of {lab.TOKENS} tokens per rank, rank {lab.RANK} beside all linear layers of the "
        f"blocks, {options.ranks} ranks over gloo. Counted on rank 0, in brackets what the planner foresees; "
        f"activations at their most, all else as it rests.\n\n{table}\n\nA step of LoRA with PEFT "
        f"{version('peft')} takes {ratio:.2f} times as long as with ours, the median of {options.pairs} pairs in "
        f"one process; afterwards the logits of both are {apart:.0e} apart at most.\n"
    )
    write_text(Path(__file__).parent / "lora.md", text)
    print(text)


if __name__ == "__main__":
    main()
