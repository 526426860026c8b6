"""The planner's predictions beside published measurements: tokens/s per GPU, error by kind, worst rows.

    python -m benchmarks.planner                # from the repository's root: compare, and write benchmarks/planner.md
    python -m benchmarks.planner --calibrate    # print the matmul shares of catalogue/hardware.yaml

The shares of peak come from the steps in catalogue/calibration.yaml,
which were published elsewhere. How each row is read: planner_rows.py.
"""

import hashlib
import itertools
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from benchmarks.harness import HERE, options, publish, table
from benchmarks.planner_rows import READERS, mosaic
from course_lib.planning import cost, hardware, intervals, memory, models
from course_lib.planning.intervals import REGIMES, regime_of
from course_lib.planning.plan import Plan
from course_lib.writing import write_text

PUBLISHED = HERE.parent / "tests/planning/published.json"
CALIBRATION = HERE.parent / "course_lib/planning/catalogue/calibration.yaml"
ERRORS = HERE.parent / "course_lib/planning/catalogue/errors.json"


QUANTITIES = ("tokens/s/GPU", "GiB")


@dataclass(frozen=True)
class Compared:
    """A published row and what the planner says."""

    row: str
    kind: str
    quantity: str
    measured: float
    predicted: float
    source: str = ""
    """Where it was published; empty for what was measured here."""
    regime: str = ""
    """Of REGIMES."""

    @property
    def held_out(self) -> bool:
        """Whether nothing may be chosen by this row; a rule that was stated before its error was looked at."""
        return held_out(self.source)

    @property
    def error(self) -> float:
        """Signed, relative to what was measured."""
        return self.predicted / self.measured - 1


def held_out(source: str) -> bool:
    """Every source whose SHA-256, as a number, is even: its rows are reported, and no constant or formula is chosen by
    them. The others may be used for that."""
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % 2 == 0


def compare(flash2: bool = False) -> tuple[list[Compared], list[str]]:
    """Every row of these kinds, and the names of those that no plan can express; ``flash2``: see :func:`mosaic`."""
    found, left = [], []
    for row in json.loads(PUBLISHED.read_text(encoding="utf-8")):
        if row["kind"] not in READERS:
            continue
        kind, read = READERS[row["kind"]]
        setting = mosaic(row, flash2) if read is mosaic else read(row)
        if setting is None:
            left.append(row["id"])
            continue
        model, plan, cluster, measured = setting
        predicted = cost.estimate(model, plan, cluster).tokens_per_second / plan.gpus
        about = row["source"], regime_of(model, plan)
        found.append(Compared(row["id"], kind, "tokens/s/GPU", measured, predicted, *about))
        held = _measured_memory(row)
        if held:
            found.append(
                Compared(row["id"], kind + ", memory", "GiB", held, memory.estimate(model, plan).total / 2**30, *about)
            )
    return found, left


def _measured_memory(row: dict[str, Any]) -> float | None:
    """Peak GiB per GPU, where the row has it."""
    value = row["value"]
    if "peak_allocated_MiB" in value:
        return value["peak_allocated_MiB"] / 1024
    return value.get("memory_GiB") or value.get("memory_GB")  # nanotron's is GiB too


def _rank() -> dict[int, dict[str, float]]:
    """Bytes by kind of one rank after a warm step: states after the backward pass, the peak of activations."""
    from accelerate import PartialState

    from course_lib.lessons.zero import lab as zero_lab
    from course_lib.metering.meter import Meter

    rank, held = PartialState(cpu=True).process_index, {}
    for stage in zero_lab.STAGES:
        engine, optimizer = zero_lab.engine_of(stage, zero_lab.small_gpt2())
        ids = zero_lab.token_ids(rank, rows=16)
        zero_lab.one_step(engine, optimizer, ids)
        module = engine.module
        with Meter(module, optimizer, getattr(engine, "resident", None)) as meter:
            engine(input_ids=ids, labels=ids).loss.backward()
        held[stage] = {
            **{kind: meter.resident[kind] for kind in zero_lab.STATE},
            "activations": meter.peak["activations"],
        }
    return held


def on_real_ranks() -> list[Compared]:
    """A small GPT-2 in fp32 on two ranks of this machine, each stage of ZeRO: the meter beside the memory model."""
    from course_lib.launching.launch import launch

    sizes = {"n_layer": 4, "n_embd": 96, "n_head": 4, "n_positions": 32, "vocab_size": 512}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model, found = models.from_config({"model_type": "gpt2"} | sizes | drops), []
    for stage, held in launch(_rank, num_processes=2, timeout=90)[0].items():
        plan = Plan(32, "deepspeed" if stage else "ddp", stage, data=2, micro_batch=16, precision="fp32")
        formula = memory.estimate(model, plan)
        for kind, counted, bytes_ in (
            ("parameters", "model states", formula.parameters),
            ("gradients", "model states", formula.gradients),
            ("optimizer states", "model states", formula.optimizer),
            ("activations", "activations", formula.activations + formula.logits),
        ):
            about = f"stage {stage}, {kind}", f"two ranks, {counted}"
            found.append(Compared(*about, "MiB", held[kind] / 2**20, bytes_ / 2**20))
    return found


def summary(found: Iterable[Compared]) -> tuple[int, float, float]:
    """Rows, median and 90th percentile of the absolute error."""
    errors = sorted(abs(each.error) for each in found)
    return len(errors), statistics.median(errors), errors[math.ceil(0.9 * len(errors)) - 1]


def by_kind(found: list[Compared]) -> dict[str, tuple[int, float, float]]:
    """The summary of each kind."""
    kinds = dict.fromkeys(each.kind for each in found)
    return {kind: summary(each for each in found if each.kind == kind) for kind in kinds}


def groups() -> Iterator[tuple[str, Callable[[Compared], bool]]]:
    """Every quantity's regimes, and all of it: what a table calls it, and which rows belong to it."""
    for name, part in itertools.product(QUANTITIES, (*REGIMES, "all")):
        yield f"{name}, {part}", lambda row, name=name, part=part: row.quantity == name and part in (row.regime, "all")


def by_half(found: list[Compared]) -> Iterator[tuple[str, ...]]:
    """The same errors by regime, in those sources that may be used and in those that are held out."""
    for title, belongs in groups():
        cells = []
        for out in (False, True):
            half = [each for each in found if each.source and each.held_out is out and belongs(each)]
            if half:
                count, middle, high = summary(half)
                cells += [f"{count} rows", f"{middle:.1%}, {high:.1%}"]
            else:
                cells += ["none", ""]
        yield title, *cells


def known_errors(found: list[Compared], without: str = "") -> dict[str, dict[str, list[float]]]:
    """The signed errors of all published rows but those of one source, by quantity and regime: what intervals are
    made of."""
    return {
        quantity: {
            regime: sorted(
                round(each.error, 4)
                for each in found
                if each.source not in ("", without) and (each.quantity, each.regime) == (quantity, regime)
            )
            for regime in REGIMES
        }
        for quantity in QUANTITIES
    }


def held(found: list[Compared], group: Callable[[str], str] = str) -> list[tuple[Compared, bool]]:
    """Every published row, and whether its true value lies in the interval that is made without its source.

    Args:
        found: all rows.
        group: gives what is left out together, from a row's source.
    """
    grouped = [replace(each, source=group(each.source)) for each in found if each.source]
    without = {source: known_errors(grouped, source) for source in {each.source for each in grouped}}
    spans = [
        intervals.around(
            each.predicted, intervals.chosen(without[each.source][each.quantity], each.quantity, each.regime)
        )
        for each in grouped
    ]
    return [(each, span.low <= each.measured <= span.high) for each, span in zip(grouped, spans, strict=True)]


WANTED = (0.75, 0.90)
"""Between what the share that intervals hold has to lie where their source was left out."""


def publication(source: str) -> str:
    """The paper or repository that a table is of."""
    paper = re.search(r"arXiv \d+\.\d+", source)
    return paper[0] if paper else "/".join(source.split(" ")[0].split("/")[:2])


def coverage(found: list[Compared]) -> Iterator[tuple[str, ...]]:
    """Rows: how often the intervals hold without a row's source, and without its publication."""
    left_out = held(found), held(found, publication)
    for title, belongs in groups():
        inside = ([holds for each, holds in rows if belongs(each)] for rows in left_out)
        yield title, *(f"{sum(each)} of {len(each)}, {sum(each) / len(each):.0%}" if each else "" for each in inside)


def shares() -> dict[tuple[str, str], float]:
    """Share of peak by accelerator and data type with which the cost model gives the calibration's steps: medians."""
    found = defaultdict(list)
    for row in yaml.safe_load(CALIBRATION.read_text(encoding="utf-8")):
        plan = Plan(**{"data": row["gpus"], **row["plan"]})
        chip = hardware.accelerator(row["accelerator"])
        cluster = hardware.cluster(row["accelerator"], plan.gpus, network=row.get("network"))
        model = models.load(row["model"])
        goal = row.get("value") or row["tflops"] / model.flops(plan.sequence_length)
        low, high = 0.05, 1.0
        for _ in range(40):
            share = (low + high) / 2
            tried = replace(cluster, accelerator=replace(chip, matmul={**chip.matmul, plan.precision: share}))
            slow = cost.estimate(model, plan, tried).tokens_per_second / plan.gpus < goal
            low, high = (share, high) if slow else (low, share)
        found[row["accelerator"], plan.precision].append((low, row["id"]))
    for key, each in found.items():
        print(key, [(name, round(share, 3)) for share, name in each])
    return {key: statistics.median(share for share, _ in each) for key, each in found.items()}


def report(found: list[Compared], left: list[str]) -> Iterator[str]:
    """The page's parts."""
    yield (
        "Written by `python -m benchmarks.planner`. Error: predicted "
        "over measured, less one. No constant was chosen by a row of this page: shares of peak come from the steps "
        "in `course_lib/planning/catalogue/calibration.yaml`, which were written down from the publications by "
        "memory, the rest from datasheets and link benchmarks."
    )
    of_all = {f"**all, {name}**": summary(each for each in found if each.quantity == name) for name in QUANTITIES}
    yield table(
        "kind | rows | median \\|error\\| | 90th percentile",
        [
            (name, count, f"{middle:.1%}", f"{high:.1%}")
            for name, (count, middle, high) in (by_kind(found) | of_all).items()
        ],
        right=range(1, 4),
    )
    yield (
        "Sources whose SHA-256 is even are held out: no constant and no formula is chosen by their rows from now "
        "on. Regimes, of which a run is of the first that fits: at least 32,768 tokens, 128 GPUs, 30 B parameters, "
        "at most 3 B, and the rest. Median and 90th percentile of |error|:"
    )
    yield table(" | used |  | held out | ", by_half(found), right=range(1, 5))
    yield (
        f"Intervals are to hold {intervals.SHARE:.0%} of true values. They are made of the errors on this page, "
        "those of speed by regime, those of memory all together (`course_lib/planning/intervals.py`), and measured "
        "on what they are not made of: each source (a "
        "table of a paper, a page of a repository) is left out in its turn, and its rows are held against the "
        "intervals of all others; then each whole publication, with all of its tables."
    )
    yield table(" | a source left out | a publication left out", coverage(found), right=(1, 2))
    zero_bubble = sum(each.quantity == "GiB" and "2401.10241" in each.source for each in found)
    yield (
        f"Of memory one publication has {zero_bubble} rows, and its errors are smaller than all others': without "
        "it intervals are too far off for it. Sources do not mean the same by memory: torchtitan prints what the "
        "allocator reserved, others what was allocated, or do not say. What `course plan` tells of memory is the "
        "chance that a plan fits; how often it was right is in planner-sweep.md."
    )
    other = [each for each in compare(flash2=True)[0] if each.quantity == "tokens/s/GPU"]
    mosaics = [each for each in other if each.kind == "MosaicML FSDP"]
    yield (
        "How a row is read follows its source, also in what the row itself leaves out (`planner_rows.py` cites "
        "each). It was looked up after the first errors had been seen, which weighs most where MosaicML's A100 "
        "rows are concerned: their script names the Triton kernel of the first FlashAttention, at 37 and 25 % of "
        "peak by Triton's own regression test. Read with FlashAttention-2 instead, the median of MosaicML's rows "
        f"would be {summary(mosaics)[1]:.1%}, and of all tokens/s/GPU {summary(other)[1]:.1%}."
    )
    yield (
        "nanotron compiles nothing, so its rows are read as plain PyTorch; its own kernels for RMS norms and rotary "
        "positions are not counted, and it is faster than predicted for that."
    )
    yield (
        "Not explained: nanotron's slowest rows; torchtitan's contexts split over eight ranks, which reach half of "
        "the predicted speed; float8 with a scale for each row, which its source calls slow itself; ZeRO-3 of 2021 "
        "across 48 and 96 nodes."
    )
    yield "## Worst rows"
    yield each_row(sorted(found, key=lambda each: -abs(each.error))[:15])
    yield "## Not compared"
    yield (
        f"{len(left)} rows that the planner has no words for (experts spread over ranks, "
        f"NVFP4, accelerators that the catalogue lacks, sizes that the row does not give): {', '.join(left)}."
    )
    yield "## All rows"
    yield each_row(found)


def each_row(found: list[Compared]) -> str:
    """A table of them."""
    rows = [
        (each.row, each.quantity, f"{each.measured:,.4g}", f"{each.predicted:,.4g}", f"{each.error:+.0%}")
        for each in found
    ]
    return table("row | quantity | measured | predicted | error", rows, right=(2, 3, 4))


def main() -> None:
    """Compare and write the page, or calibrate."""
    if options(__doc__, calibrate=False).calibrate:
        for (name, dtype), share in shares().items():
            print(f"{name} {dtype}: {share:.3f}")
        return
    found, left = compare()
    write_text(ERRORS, json.dumps(known_errors(found), indent=1) + "\n")
    intervals.errors_changed()
    found += on_real_ranks()
    publish("planner", "The planner beside published measurements", (), *report(found, left))


if __name__ == "__main__":
    main()
