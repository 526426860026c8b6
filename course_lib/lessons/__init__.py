"""What the notebooks share and measure: one module for each lesson's experiments."""

from course_lib.missing_extra import require_torch

require_torch("train")
