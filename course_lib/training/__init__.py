"""The trainer and its engines, evaluation, checkpoints, callbacks and baselines."""

from course_lib.missing_extra import require_torch

require_torch("train")
