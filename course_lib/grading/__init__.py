"""Exercises graded by behaviour: tasks, checks, the sandbox in which answers run, and reports."""

from course_lib.missing_extra import require_torch

require_torch("train")
