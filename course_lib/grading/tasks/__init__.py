"""The exercises: one module per topic, each with its `Task`s, and what exercises.csv says of them.

`TASKS` imports them all; a sandbox takes just the one it needs.
"""

import importlib

from course_lib.grading.task import Task
from course_lib.grading.tasks.kit import CATALOGUE

TASKS: dict[str, Task]
"""By name, in the order of the lessons; made when it is first asked for."""


def tasks_of(module: str) -> dict[str, Task]:
    """The tasks of one of the modules, by name, in the order of the lessons."""
    members = vars(importlib.import_module(f"{__name__}.{module}")).values()
    tasks = {member.name: member for member in members if isinstance(member, Task)}
    return {name: tasks[name] for name, row in CATALOGUE.items() if row["module"] == module}


def __getattr__(name: str) -> dict[str, Task]:
    if name != "TASKS":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    global TASKS
    modules = dict.fromkeys(row["module"] for row in CATALOGUE.values())
    TASKS = {name: task for module in modules for name, task in tasks_of(module).items()}
    return TASKS
