"""Arguments by the names and values of the Hugging Face Trainer; which these are says ``trainer_names.json``.

Together with the names that are the same here they are all fields of ``transformers.TrainingArguments``, version 5.23;
``docs/trainer-names.md`` is made from them.
"""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from course_lib.errors import ConfigError

NAMED = json.loads(resources.files("course_lib.config").joinpath("trainer_names.json").read_text(encoding="utf-8"))
ALIASES: dict[str, str] = NAMED["aliases"]
"""Names that the Hugging Face Trainer, Accelerate and common scripts give to fields."""
TRANSLATED: dict[str, dict[str, Any]] = NAMED["translated"]
"""Arguments whose values are written otherwise here: in words, and as fields; a value that is not listed is refused."""
ALWAYS: dict[str, list[str]] = NAMED["always"]
"""Arguments of which one value holds here, with what there is instead of another."""
ABSENT: dict[str, str] = NAMED["absent"]
"""Arguments without a counterpart, and what to do instead; DeepSpeed's launcher starts scripts with the last."""
NAMES = (*TRANSLATED, *ALWAYS, *ABSENT, "hub_model_id", "greater_is_better")
"""Every name that this module answers to."""
FLAGS = {"true": "true", "yes": "true", "1": "true"} | dict.fromkeys(("false", "no", "0", "none", "null", ""), "false")
TRACKERS = ("trackio", "wandb", "tensorboard", "jsonl", "none")


def is_true(name: str, value: Any) -> bool:
    """A flag's value, from YAML or the command line.

    Raises:
        ConfigError: it is neither true nor false.
    """
    text = FLAGS.get(str(value).strip().lower())
    if text is None:
        raise ConfigError(f"`{name}` cannot be {value!r}", "choose from `true`, `false`")
    return text == "true"


def _trackers(value: Any) -> str:
    names = [str(name).strip() for name in (value if isinstance(value, list) else str(value).split(","))]
    if names == ["all"]:
        return "trackio,wandb,tensorboard"
    if other := [name for name in names if name not in TRACKERS]:
        raise ConfigError(f"report_to {other[0]} is not here", f"use {', '.join(TRACKERS)} or all")
    return ",".join(names)


def _listed(name: str, value: Any) -> dict[str, Any]:
    """Fields for a value of an argument of which the values are listed."""
    known, text = TRANSLATED[name]["values"], str(value).strip()
    text = text if text in known else FLAGS.get(text.lower(), text)
    if name == "logging_strategy" and text == "false":  # YAML reads a bare `no` as false
        text = "no"
    if text not in known:
        other = TRANSLATED[name].get("other", "")
        raise ConfigError(f"{name} {value} is not here", f"use {', '.join(known)}{other and ', '}{other}")
    return known[text]


def translate(name: str, value: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of this project from one of :data:`NAMES`.

    Args:
        name: with `_`.
        value: as it was given.
        raw: all that was given with it, by name.
    Raises:
        ConfigError: it has no counterpart here, or not with that value.
    """
    if name == "report_to":
        return {"tracker": _trackers(value)}
    if name == "lr_scheduler_kwargs":
        return {name: json.dumps(value) if isinstance(value, Mapping) else value}
    if name in TRANSLATED:
        return _listed(name, value)
    if name == "hub_model_id":
        if not is_true("push_to_hub", raw.get("push_to_hub", "false")):
            raise ConfigError(f"hub_model_id {value} alone pushes nothing", f"use --push_to_hub {value}")
        return {"push_to_hub": str(value)}
    if name == "greater_is_better":
        metric = own_value("best_metric", raw.get("metric_for_best_model", raw.get("best_metric")), raw) or "macro_f1"
        if is_true(name, value) != (metric in ("accuracy", "macro_f1")):
            raise ConfigError(f"greater_is_better {value} is not so for {metric}", "leave it out")
        return {}
    if name in ABSENT:
        raise ConfigError(f"{name} is not here", ABSENT[name])
    holds, why = ALWAYS[name]
    same = str(value) == holds if holds not in FLAGS else is_true(name, value) == (holds == "true")
    if not same:
        raise ConfigError(f"{name} {value} is not here", why)
    return {}


def own_value(field: str, value: Any, raw: Mapping[str, Any]) -> Any:
    """Our value for a field's value as the Hugging Face Trainer writes it; other values come back as they are."""
    text = str(value).strip().lower()
    if field == "max_steps" and text == "-1":
        return None
    if field == "tf32" and text in ("true", "false"):
        return "on" if text == "true" else "off"
    if field == "best_metric" and value is not None:
        return str(value).removeprefix("eval_")
    if field == "push_to_hub" and text in ("true", "false"):
        if text == "true" and "hub_model_id" not in raw:
            raise ConfigError("push_to_hub true names no repository", "use --push_to_hub NAME or OWNER/NAME")
        return raw["hub_model_id"] if text == "true" else None
    return value


def check_warmup(raw: Mapping[str, Any]) -> None:
    """Refuse a warm-up that the Hugging Face Trainer's `constant` would ignore."""
    warms = any(str(raw.get(name, 0)) not in ("0", "0.0") for name in ("warmup_steps", "warmup_ratio"))
    if str(raw.get("lr_scheduler_type")) == "constant" and warms:
        raise ConfigError(
            "lr_scheduler_type constant has no warm-up there", "use constant_with_warmup, or leave warmup_steps out"
        )
