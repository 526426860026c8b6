"""The table "where the step went, and its bound": seconds by phase and group of operators, beside what the roof allows.

Seconds are a profiler's, FLOPs and bytes a counter's: see :mod:`course_lib.metering.step_spans` and
:mod:`course_lib.metering.operators`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from course_lib.metering.operators import Operator
from course_lib.metering.roofline import Peaks, bound
from course_lib.metering.step_spans import BETWEEN, EXPOSED, HOST, Parts

GROUPS = {
    "matmul": "matrix products",
    "convolution": "matrix products",
    "attention": "attention",
    "pointwise": "pointwise and norms",
    "reduction": "pointwise and norms",
    "move": "copies and views",
    "view": "copies and views",
    "collective": EXPOSED,
}
ENDS = ("embedding", "nll_loss", "_log_softmax", "log_softmax")
"""Operators of the model's two ends, whatever their kind."""
SCALED = ("forward", "backward", "pipeline")
"""Phases whose work grows with the tokens of a batch."""
SMALL = 5e-4
"""Share of a step under which a row is not printed alone."""


@dataclass(frozen=True)
class Row:
    """One phase and group of operators on one rank, per step."""

    phase: str
    group: str
    seconds: float
    share: float
    """Of the step."""
    calls: float
    flops: float
    bytes: float
    """Read and written; of communication what this rank sends."""
    bound: str
    """The roof that most of ``floor`` is under; empty where nothing was counted."""
    floor: float
    """Seconds that the roofs allow."""


def at_tokens(counted: Sequence[tuple[float, Sequence[Operator]]], tokens: float) -> list[Operator]:
    """Cost of a step of so many tokens, by two counted ones: a part that is fixed, as weights, and one that grows.

    A straight line through both, which is exact except for attention, whose work grows with the square of the length.

    Args:
        counted: tokens and operators of two steps; the rows are the second's.
        tokens: of the step that is asked for.
    """
    (few, first), (many, second) = counted
    before = {(o.phase, o.module, o.name, o.kind, o.dtype): o for o in first}
    rows = []
    for o in second:
        other = before.get((o.phase, o.module, o.name, o.kind, o.dtype))
        if o.phase in SCALED and o.kind != "collective" and other is not None and few != many:
            slope = (tokens - many) / (many - few)
            o = replace(
                o,
                flops=max(0, round(o.flops + slope * (o.flops - other.flops))),
                bytes=max(0, round(o.bytes + slope * (o.bytes - other.bytes))),
            )
        rows.append(o)
    return rows


def rows_of(rank: Parts, steps: int, operators: Sequence[Operator], peaks: Peaks) -> list[Row]:
    """A rank's rows, which add up to its step, in the order of phases, the longest group first.

    Args:
        rank: its window in parts.
        steps: that the window holds.
        operators: what the rank calls in one step.
        peaks: its roofs.
    """
    kinds = {operator.name: operator.kind for operator in operators}
    seconds, counts = defaultdict[tuple[str, str], float](float), dict[tuple[str, str], list[Operator]]()
    for (phase, name), value in rank.seconds.items():
        seconds[phase, _group(phase, name, kinds)] += value / steps
    for operator in operators:
        counts.setdefault((operator.phase, _group(operator.phase, operator.name, kinds)), []).append(operator)
    whole = sum(rank.seconds.values()) / steps
    order = sorted(dict.fromkeys(phase for phase, _ in rank.seconds), key=lambda phase: phase == BETWEEN)
    rows = []
    listed = set(seconds) | {key for key in counts if key[0] in order}  # a hidden collective has no seconds
    for key in sorted(listed, key=lambda key: (order.index(key[0]), -seconds[key], key)):
        members = counts.get(key, [])
        roofs = defaultdict[str, float](float)
        for operator in members:
            by, least = bound(operator, peaks)
            roofs[by] += least
        rows.append(
            Row(
                *key,
                seconds[key],
                seconds[key] / whole,
                sum(o.calls for o in members),
                sum(o.flops for o in members),
                sum(o.bytes for o in members),
                max(roofs, key=roofs.__getitem__, default=""),
                sum(roofs.values()),
            )
        )
    return rows


def _group(phase: str, name: str, kinds: Mapping[str, str]) -> str:
    if name in (EXPOSED, HOST):
        return name
    if kinds.get(name) == "collective":
        return EXPOSED
    if phase in ("data", "optimizer"):
        return "loading" if phase == "data" else "update"
    return "embedding and loss" if name.startswith(ENDS) else GROUPS.get(kinds.get(name, ""), "other operators")


@dataclass(frozen=True)
class RankTable:
    """Table of one rank."""

    rank: int
    host: str
    seconds: float
    """Of a step, wall clock."""
    rows: Sequence[Row]
    hidden: float
    """Seconds per step of collectives behind which operators ran; in other rows already."""
    under_way: float
    """Seconds per step with a collective under way, exposed or hidden."""
    peaks: Peaks
    offset: float
    """Seconds that its clock was taken back by, to be on rank 0's."""
    offset_error: float
    """By which that may be wrong at most."""


@dataclass(frozen=True)
class StepTable:
    """All ranks' tables, and what belongs to them together."""

    steps: Sequence[int]
    """The recorded steps' numbers."""
    tokens: tuple[float, float, float]
    """Rank 0's tokens, padding too, of the two counted steps, and of a recorded one."""
    model_flops: float | None
    """Of a recorded step, all ranks', by the planner's formula; None for a model that it does not know."""
    peak: float | None
    """FLOP/s of one accelerator by its datasheet; None: the measured one counts."""
    ranks: Sequence[RankTable]

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the model's FLOPs per second by the ranks' peaks (PaLM, arXiv 2204.02311, B)."""
        if self.model_flops is None:
            return None
        peaks = sum(self.peak or max(rank.peaks.flops.values()) for rank in self.ranks)
        return self.model_flops / max(rank.seconds for rank in self.ranks) / peaks

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"mfu": self.mfu}

    def markdown(self) -> str:
        """The mean of all ranks, and the rank on which a row took longest."""
        keys = list(dict.fromkeys((row.phase, row.group) for rank in self.ranks for row in rank.rows))
        order = sorted(dict.fromkeys(phase for phase, _ in keys), key=lambda phase: phase == BETWEEN)
        by_rank = [{(row.phase, row.group): row for row in rank.rows} for rank in self.ranks]
        several, ranks = len(self.ranks) > 1, len(self.ranks)
        step = sum(rank.seconds for rank in self.ranks) / ranks
        heads = ["phase", "operators", "ms", "share", *["most, on rank"] * several]
        heads += ["calls", "GFLOP", "MB", "bound by", "roof, ms", "of roof"]
        lines, small = [heads], 0.0
        whole = {key: sum(rows[key].seconds for rows in by_rank if key in rows) for key in keys}
        for key in sorted(keys, key=lambda key: (order.index(key[0]), -whole[key])):
            own = [rows[key] for rows in by_rank if key in rows]
            means = ("seconds", "calls", "flops", "bytes", "floor")
            mean = replace(own[0], **{name: sum(getattr(row, name) for row in own) / ranks for name in means})
            most = max(range(ranks), key=lambda rank: by_rank[rank][key].seconds if key in by_rank[rank] else 0.0)
            if mean.seconds < SMALL * step and mean.floor < SMALL * step:
                small += mean.seconds
            else:
                longest = [f"{by_rank[most][key].seconds * 1e3:.2f}, {most}"] * several
                lines.append(self._line(mean, step, longest))
        if small:
            lines.append(["smaller rows", "", f"{small * 1e3:.2f}", f"{small / step:.1%}", *[""] * (len(heads) - 4)])
        lines.append(["whole step", "", f"{step * 1e3:.2f}", "100 %", *[""] * (len(heads) - 4)])
        return "\n".join([*_aligned(lines), "", *self._notes(step)])

    @staticmethod
    def _line(mean: Row, step: float, longest: list[str]) -> list[str]:
        # a collective's roof is not of its exposed part alone
        has_share = mean.calls and mean.seconds and mean.group != EXPOSED
        return [
            mean.phase,
            mean.group,
            f"{mean.seconds * 1e3:.2f}",
            f"{mean.seconds / step:.1%}",
            *longest,
            f"{mean.calls:.0f}" if mean.calls else "",
            f"{mean.flops / 1e9:.3f}" if mean.flops else "",
            f"{mean.bytes / 1e6:.2f}" if mean.bytes else "",
            mean.bound if mean.calls else "",
            f"{mean.floor * 1e3:.2f}" if mean.calls else "",
            f"{mean.floor / mean.seconds:.0%}" if has_share else "",
        ]

    def _notes(self, step: float) -> list[str]:
        ranks, first = len(self.ranks), self.ranks[0].peaks
        hidden = sum(rank.hidden for rank in self.ranks) / ranks
        under_way = sum(rank.under_way for rank in self.ranks) / ranks
        dtypes = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {dtype}" for dtype, rate in first.flops.items())
        link = f", link {first.link / 1e9:.2f} GB/s" if first.link else ""
        first_tokens, second_tokens, recorded = self.tokens
        notes = [
            f"Mean of {len(self.steps)} steps ({self.steps[0]} to {self.steps[-1]}) on {ranks} "
            f"rank{'s' * (ranks > 1)}. Roofs as measured on rank 0, {first.threads} "
            f"thread{'s' * (first.threads > 1)} of {first.device}: "
            f"{dtypes}, memory {first.memory / 1e9:.1f} GB/s, ridge {first.ridge:.1f} FLOP/byte, launch "
            f"{first.launch * 1e6:.1f} us an operator{link}. What fits into a cache may pass the memory's roof."
        ]
        if under_way:
            error = max(rank.offset_error for rank in self.ranks)
            notes.append(
                f"Collectives were under way for {under_way * 1e3:.2f} ms of a step, {hidden * 1e3:.2f} ms of "
                f"them hidden behind operators. The ranks' clocks agree to {error * 1e6:.0f} us at worst."
            )
        if recorded not in (first_tokens, second_tokens):
            notes.append(
                f"FLOPs and bytes are those of the {recorded:,.0f} tokens of rank 0 in a recorded step, by "
                f"two counted steps before, of {first_tokens:,.0f} and {second_tokens:,.0f}."
            )
        if self.mfu is not None:
            source = "datasheet's" if self.peak else "measured"
            notes.append(
                f"MFU {self.mfu:.1%}: the model's FLOPs of a step, forward and backward without padding and "
                f"recomputation, by its seconds and the ranks' {source} peak."
            )
        return notes


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose source reads as a table too."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [
        [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    ruler = ["-" * width if column < 2 else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return ["| " + " | ".join(cells) + " |" for cells in (text[0], ruler, *text[1:])]
