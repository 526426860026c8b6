"""The exercises: a module a topic, a `Task` each."""

from course_lib.grading.task import Task
from course_lib.grading.tasks import (
    cloud,
    ddp,
    evaluation,
    faults,
    fsdp,
    interruption,
    loop,
    pipeline,
    planning,
    prepared,
    resuming,
    tensor,
    tracking,
    zero,
)

_BY_LESSON = (loop, ddp, prepared, evaluation, zero, fsdp, pipeline, tensor, planning, resuming, faults,
              tracking, cloud, interruption)

TASKS: dict[str, Task] = {each.name: each for module in _BY_LESSON for each in module.ALL}
"""By name, in the order of the lessons."""
