"""The exercises: a module a topic, a `Task` each."""

from course_lib.grading.task import Task
from course_lib.grading.tasks import ddp, evaluation, fsdp, loop, pipeline, prepared, tensor, zero

TASKS: dict[str, Task] = {each.name: each for module in (loop, ddp, prepared, evaluation, zero, fsdp, pipeline, tensor)
                          for each in module.ALL}
"""By name, in the order of the lessons."""
