"""Options of a resumed run: each may change, has to be as it was, or does not bear on the training."""

from collections.abc import Mapping
from importlib import resources
from pathlib import PurePath
from typing import Any, NamedTuple

import yaml

from course_lib.config.axes import ENGINES, Leaves
from course_lib.config.learning import OFFLINE_NAMES


class Change(NamedTuple):
    """A field's value in the checkpoint's config, and in the config of the run that goes on from it."""

    was: Any
    now: Any


class Rule(NamedTuple):
    """Rule for fields of a resumed run whose values differ from the checkpoint's.

    Attributes:
        does: in a word or two, as the documentation says it.
        why: what decides it.
        fields: by name.
    """

    does: str
    why: str
    fields: list[str]


_HELD = resources.files("course_lib.config").joinpath("resumed.yaml").read_text(encoding="utf-8")
_BY_NAME = {name: Rule(**rule) for name, rule in yaml.safe_load(_HELD).items()}
RULES = tuple(_BY_NAME.values())
"""Every field of a config stands in one of them."""
APPLIED, LOOKED, JUDGING, BATCH, ROWS, MODEL, ADAPTER, SAME, ELSEWHERE = (
    _BY_NAME[name]
    for name in ("applied", "looked", "judging", "batch", "rows", "model", "adapter", "same", "elsewhere")
)

KEEPS_RANK_STATE = ("outer_lr", "outer_momentum", "topk_density")
"""Fields of communication under whose other values a rank goes on with what it alone had."""


def effective(leaves: Leaves) -> dict[str, Any]:
    """The fields of a config with the defaults that follow from other fields filled in.

    Args:
        leaves: of a checkpoint of an older version some may be missing.
    """
    values = dict(leaves)
    metrics = {"classification": "macro_f1", "causal_lm": "loss", "masked_lm": "loss"}
    for name, other, default in (
        ("data_seed", "seed", lambda seed: seed),
        ("best_metric", "task", metrics.get),
        ("engine", "strategy", lambda strategy: ENGINES[strategy][0]),
    ):
        if name in values and values[name] is None and other in values:
            values[name] = default(values[other])
    if values.get("lora_r") and values.get("lora_alpha", 0) is None:
        values["lora_alpha"] = 2.0 * values["lora_r"]
    if values.get("clean_text", True) is None:
        values["clean_text"] = values.get("task") == "classification" or values.get("dataset") in OFFLINE_NAMES
    return values


def changed(before: Leaves, now: Leaves) -> dict[str, Change]:
    """The fields that both configs have, with other values, in the order of the rules.

    Where a default follows from a field that is another, that one alone counts.
    """
    was, is_now = effective(before), effective(now)
    return {
        name: Change(was[name], is_now[name])
        for rule in RULES
        if rule is not ELSEWHERE
        for name in rule.fields
        if name in before and name in now and before[name] != now[name] and was[name] != is_now[name]
    }


def among(changes: Mapping[str, Change], *rules: Rule) -> dict[str, Change]:
    """Those changes whose fields stand in some rules."""
    return {name: change for name, change in changes.items() if any(name in rule.fields for rule in rules)}


def refused(changes: Mapping[str, Change], *, same_rows: bool, same_batch: bool) -> dict[str, Change]:
    """Those changes with which a run cannot go on.

    Args:
        changes: see :func:`changed`.
        same_rows: whether the tokens of all splits are those of the checkpoint.
        same_batch: whether a step has as many rows.
    """
    changed = among(changes, SAME, ADAPTER)
    if "model" in changes and len({PurePath(path).name for path in changes["model"]}) > 1:
        changed["model"] = changes["model"]
    if not same_rows:
        changed |= among(changes, ROWS, MODEL)
    return changed if same_batch else changed | among(changes, BATCH)


def shown(value: Any) -> str:
    """A value as one types it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def told(changes: Mapping[str, Change], was: str = "was") -> str:
    """``learning_rate 1e-05 (was 0.001), weight_decay 0.5 (was 0.01)``."""
    return ", ".join(f"{name} {shown(change.now)} ({was} {shown(change.was)})" for name, change in changes.items())
