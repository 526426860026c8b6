"""A package for each lesson, with its experiments, figures and diagrams; beside them, what several lessons use."""

from course_lib.missing_extra import require_torch

require_torch("train")
