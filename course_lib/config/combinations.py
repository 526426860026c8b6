"""Combinations of options that run, by engine: queries of the table of axes and refusals.

The configuration, ``course train --explain``, the planner, the documentation and lesson 08 read it.
"""

from collections.abc import Iterable
from typing import Any

from course_lib.config.axes import AXES, ENGINES, Leaves, Refusal, merged
from course_lib.config.refusals import NAMES, REFUSALS, SHARDED

PLAIN: Leaves = {
    "training_type": "accelerated",
    "strategy": "ddp",
    "engine": None,
    "tensor_parallel_size": 1,
    "sequence_parallel": False,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
    "communication": "all_reduce",
    "shard_group_size": None,
    "offload": "none",
    "torch_compile": False,
    "activation_checkpointing": False,
    "mixed_precision": "auto",
    "lora_r": None,
    "load_in_4bit": False,
    "optimizer": "adamw",
    "watch": "none",
    "async_save": False,
    "schedule": "1f1b",
    "split_batches": False,
    "task": "causal_lm",
    "cpu_kernels": "auto",
    "profile": False,
    "device": "auto",
}
"""A run of a language model that chooses none of it: what else an axis is looked at beside."""
OURS_FIRST = ("pipeline", "tensor", "experts", "communication")
"""Axes by which the default engine is the course's own, where it has the layout."""
LAYOUT = {"basic", "accelerated", "pipeline", "ddp", *SHARDED.split("|"), *NAMES, "context", *OURS_FIRST}
"""Axes that decide the default engine; what else is asked for does not change it."""


def refusal(leaves: Leaves) -> Refusal | None:
    """The first row that refuses a run; None where it runs.

    Args:
        leaves: every field by name, the engine filled in.
    """
    return next((row for row in REFUSALS if row.chosen(leaves)), None)


def check(leaves: Leaves) -> None:
    """Refuse a run with a row's line.

    Raises:
        ConfigError: the run has axes that are not had together.
    """
    if row := refusal(leaves):
        raise row.error(leaves)


def default_engine(leaves: Leaves) -> Any:
    """The engine of a run that names none: the first that has its layout, or the first there is."""
    ours = any(AXES[axis].chosen(leaves) for axis in OURS_FIRST)
    known = (*("scratch",) * ours, *ENGINES[leaves["strategy"]])
    rows = [row for row in REFUSALS if LAYOUT.issuperset("|".join(row.axes).split("|"))]
    return next(
        (engine for engine in known if not any(row.chosen({**leaves, "engine": engine}) for row in rows)), known[0]
    )


def together(*axes: str) -> dict[str, Refusal | None] | None:
    """Whether some axes go together, by engine; None where they are values of one option.

    Where no axis says which strategy, an engine has them together if it has with any of its strategies.

    Args:
        axes: names in :data:`AXES`.
    Returns:
        For each engine None where it runs them, or the row that refuses them.
    """
    if (options := merged(axes)) is None:
        return None
    answers: dict[str, Refusal | None] = {}
    for engine in NAMES:
        strategies = [options["strategy"]] if "strategy" in options else [s for s in ENGINES if engine in ENGINES[s]]
        rows = [refusal({**PLAIN, "strategy": s, **options, "engine": engine}) for s in strategies]
        answers[engine] = None if None in rows else _most_telling(rows, options)
    return answers


def reason(*axes: str) -> Refusal | None:
    """The row that refuses some axes by every engine; None where one runs them, or they are values of one option."""
    answers = together(*axes)
    return None if answers is None or None in answers.values() else _most_telling(answers.values(), merged(axes) or {})


def _most_telling(rows: Iterable[Refusal | None], options: Leaves) -> Refusal:
    """The row that names most of what some options choose."""
    return max(filter(None, rows), key=lambda row: row.named({**PLAIN, **options}) - row.named(PLAIN))


RANKS = (
    *("pipeline", "ddp", "zero1", "zero2", "zero3", "fsdp"),
    *("tensor", "sequence", "context", "experts", "communication"),
)
"""Axes of ranks: the columns of :func:`table`."""
OTHERS = (
    *("groups", "offload", "compile", "checkpointing", "fp16", "lora", "4bit"),
    *("sgd", "adafactor", "muon", "watch", "async_save"),
)
"""What has to know of them: its further rows."""


def table(columns: Iterable[str] = RANKS, rows: Iterable[str] = (*RANKS, *OTHERS)) -> list[list[str]]:
    """A line of headings, and one for each row: initials of the engines that have it together with each column."""
    columns = list(columns)
    lines = ([row, *(_initials(together(row, column)) for column in columns)] for row in rows)
    return [["", *columns], *lines]


def _initials(answers: dict[str, Refusal | None] | None) -> str:
    """``t s d a`` of the engines that answer yes; a dash where none does; nothing for two values of one option."""
    if answers is None:
        return ""
    return " ".join(name[0] for name, row in answers.items() if row is None) or "–"
