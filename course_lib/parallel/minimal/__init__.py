"""Each parallelism at its shortest, one file each: the classes that lessons 02 and 05 to 08 show in their cells."""

from course_lib import torch_names  # noqa: F401
