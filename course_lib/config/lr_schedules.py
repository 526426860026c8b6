"""Extra arguments of the learning-rate schedules that come from Transformers."""

import json
from typing import Any

from course_lib.errors import ConfigError, nearest

OWN = ("linear", "cosine", "constant")
"""Schedules that this course computes itself, :func:`course_lib.training.optimization.learning_rate_factor`."""

TAKEN = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate", "warmup_lr_rate", "num_cycles"),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}
"""Arguments of the functions in ``transformers.optimization``, by the schedule's name."""

NEEDED = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Of these one has to be given."""


def arguments(schedule: str, text: str | None) -> dict[str, Any]:
    """The further arguments of a schedule, from the JSON object in ``lr_scheduler_kwargs``.

    Raises:
        ConfigError: it is no JSON object, an argument is not this schedule's, or one that it needs is missing.
    """
    taken, needed = TAKEN.get(schedule, ()), NEEDED.get(schedule, ())
    try:
        given = json.loads(text or "{}")
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"lr_scheduler_kwargs `{text}` is no JSON object", """write it as '{"num_cycles": 1}'""")
    for name in given:
        if name not in taken:
            raise ConfigError(
                f"lr_scheduler {schedule} takes no `{name}`",
                nearest(name, taken) if taken else "leave lr_scheduler_kwargs out",
            )
    if needed and not any(name in given for name in needed):
        raise ConfigError(
            f"lr_scheduler {schedule} needs {' or '.join(needed)}",
            f"""give --lr_scheduler_kwargs '{{"{needed[0]}": …}}'""",
        )
    return given
