"""Each parallelism at its shortest, one file each: what a lesson shows first, before the full one beside it."""

from course_lib import torch_names  # noqa: F401
