"""Runs side by side: which numbers and which options are worth a column, and which of them a screen has room for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.config import options
from course_lib.tracking.collect import TrackedRun, differing_options
from course_lib.tracking.redact import redact

SCORES = ("macro_f1", "accuracy", "loss", "perplexity")
"""Of an evaluation, in the order of columns; the one that a run was chosen by comes before all."""
UNDERWAY = ("train/loss", "train/samples_per_second")
SECTIONS = ("data", "model", "optim", "parallel", "pipeline", "run")
"""Sections whose fields decide what a run computes; the others say where it writes and who watches it."""
ASIDE = frozenset(
    {
        "text_column",
        "label_column",
        "num_workers",
        "pin_memory",
        "progress_bar",
        "logging_steps",
        "eval_steps",
        "eval_batch_size",
        "baselines",
        "revision",
        "device",
        "best_metric",
    }
)
"""Fields of those sections that change neither the training nor its speed, or follow from the data."""
WIDEST = 24
"""Characters of a cell; what is longer keeps its end, by which paths and names of models are told apart."""


@dataclass(frozen=True)
class SummaryTable:
    """A row per run.

    Attributes:
        columns: names, the most telling first; in several lines where the width asked for it.
        rows: a text per column.
        left_out: columns that the width had no room for.
    """

    columns: list[str]
    rows: list[list[str]]
    left_out: tuple[str, ...] = ()

    def within(self, width: int, gap: int = 2) -> "SummaryTable":
        """The table with as many columns as fit into so many characters; the first three stay in any case."""
        whole = self._fitted(width, gap, fold=width)
        return self._fitted(width, gap, fold=WIDEST // 2) if whole.left_out else whole

    def _fitted(self, width: int, gap: int, fold: int) -> "SummaryTable":
        kept, used = [], 0
        for i, name in enumerate(self.columns):
            needed = max(len(line) for line in (*folded(name, fold), *(shortened(row[i]) for row in self.rows)))
            if i >= 3 and used + needed > width:
                continue
            kept.append(i)
            used += needed + gap
        return SummaryTable(
            ["\n".join(folded(self.columns[i], fold)) for i in kept],
            [[shortened(row[i]) for i in kept] for row in self.rows],
            tuple(name for i, name in enumerate(self.columns) if i not in kept),
        )


def summary_table(runs: Sequence[TrackedRun]) -> SummaryTable:
    """Each run's name, state and steps, the score that it was chosen by, the options in which the runs differ, its
    other scores, and how it went on its way.

    Scores are those of the test split; of the validation split where a run has no other; and of the last evaluation
    where it did not come to its end.
    """
    last = [{metric: value for _, _, metric, value in run.rows} for run in runs]
    scores = [name for name in score_columns(runs) if any(name in values for values in last)]
    deciding = {chosen_by(run) for run in runs}
    first = [name for name in scores if name.partition("/")[2] in deciding]
    others = [name for name in scores if name not in first]
    underway = [name for name in UNDERWAY if any(name in values for values in last)]
    differing = telling_options(runs)
    rows = []
    for run, values in zip(runs, last, strict=True):
        steps = max((step for step, *_ in run.rows), default=0)

        def numbers(names: Iterable[str], values: dict[str, float] = values) -> list[str]:
            return [_number(values, name) for name in names]

        rows.append(
            [
                run.name,
                run.state,
                str(steps),
                *numbers(first),
                *(redact(_text(run.config.get(name, ""))) for name in differing),
                *numbers([*others, *underway]),
            ]
        )
    return SummaryTable(["run", "state", "steps", *first, *differing, *others, *underway], rows)


def score_columns(runs: Iterable[TrackedRun]) -> list[str]:
    """Names of final scores that the runs have, the metric that they were chosen by first."""
    columns: dict[str, list[str]] = {}
    chosen: list[str] = []
    for run in runs:
        names = {metric for _, _, metric, _ in run.rows}
        chosen.append(chosen_by(run))
        split = next(
            (split for split in ("test", "validation", "eval") if any(f"{split}/{score}" in names for score in SCORES)),
            None,
        )
        for score in SCORES:
            if split and f"{split}/{score}" in names:
                columns.setdefault(score, []).append(split)
    order = dict.fromkeys([*chosen, *SCORES])
    return [
        f"{split}/{score}"
        for score in order
        for split in ("test", "validation", "eval")
        if split in columns.get(score, ())
    ]


def chosen_by(run: TrackedRun) -> str:
    """The evaluation metric that decided which of the run's models is the best one."""
    if best := run.config.get("best_metric"):
        return str(best)
    classes = run.config.get("task", "classification") == "classification"
    return "macro_f1" if classes and any(metric.endswith("/macro_f1") for _, _, metric, _ in run.rows) else "loss"


def telling_options(runs: Iterable[TrackedRun]) -> list[str]:
    """Config fields in which the runs differ and that decide what is computed; fields that are none of ours too."""
    section = {option.name: option.section for option in options()}
    return [
        name for name in differing_options(runs) if name not in ASIDE and section.get(name, SECTIONS[0]) in SECTIONS
    ]


def folded(name: str, width: int) -> list[str]:
    """A column's name in lines of about ``width`` characters, cut behind ``/`` and ``_``."""
    lines = [""]
    for part in name.replace("/", "/\0").replace("_", "_\0").split("\0"):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def shortened(text: str) -> str:
    """The end of a text that is wider than a cell."""
    return text if len(text) <= WIDEST else "…" + text[1 - WIDEST :]


def _number(values: Mapping[str, float], name: str) -> str:
    """A metric, with half the width of its 95 % interval where the run tracked one; empty where it has none."""
    ends = [values[f"{name}_{side}"] for side in ("low", "high") if f"{name}_{side}" in values]
    shown = f"{values[name]:.4g}" if name in values else ""
    return f"{shown} ±{(ends[1] - ends[0]) / 2:.2g}" if shown and len(ends) == 2 else shown


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
