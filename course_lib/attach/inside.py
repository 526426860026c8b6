"""In a process of the job: waits for torch.distributed, and starts the tools on it once it is a rank.

No module here imports torch before the job does: a launcher that never does is not to pay for it.
"""

import atexit
import functools
import importlib
import importlib.machinery
import inspect
import json
import os
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType, TracebackType
from typing import Any, Protocol

VARIABLE = "COURSE_ATTACH"
"""Names the tools, with the settings of each, as JSON."""
TOOLS = {"meter": "course_lib.metering.job_log", "watch": "course_lib.hangs.job_watch"}
"""Modules with a function ``begin(settings)``, which gives a :class:`Tool`."""
EARLY = {"watch": "course_lib.hangs.startup_watch"}
"""What a tool has until then: modules with a function ``begin(settings)``, which gives an :class:`EarlyTool`."""
C10D = "torch.distributed.distributed_c10d"


class Tool(Protocol):
    """Tool that runs on a rank."""

    def end(self, error: BaseException | None) -> None:
        """The process group is going to be destroyed, or the process ends, by an error or not."""


class EarlyTool(Protocol):
    """Tool that runs on a rank before its process group stands."""

    def arrive(self, rank: int | None, world_size: int | None) -> None:
        """The rank comes to wait for the others in ``init_process_group``, and is told which it is, or not."""

    def end(self) -> None:
        """The group stands."""


class Attached:
    """The tools of this process, from its first process group to the end of its last."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings
        self.tools: list[Tool] = []
        self._error: BaseException | None = None
        self.early: list[EarlyTool] = []
        for name in settings.keys() & EARLY.keys():
            try:
                self.early.append(importlib.import_module(EARLY[name]).begin(settings[name]))
            except Exception as error:
                self._tell(name, error)
        atexit.register(self.end)
        # A worker of a data loader is no rank, and what it inherits is not its own.
        os.register_at_fork(after_in_child=self.tools.clear)

    def arrive(self, rank: int | None, world_size: int | None) -> None:
        """Called as the rank comes to wait for the others in ``init_process_group``."""
        for tool in self.early:
            tool.arrive(rank, world_size)

    def begin(self) -> None:
        """Called once the default process group stands."""
        while self.early:
            self.early.pop().end()
        if self.tools:
            return
        before, sys.excepthook = sys.excepthook, self._excepthook
        self._hook_before = before
        for name, settings in self.settings.items():
            try:
                self.tools.append(importlib.import_module(TOOLS[name]).begin(settings))
            except Exception as error:
                self._tell(name, error)

    def end(self) -> None:
        """Called before the default group is destroyed, and at the end of the process."""
        while self.tools:
            tool = self.tools.pop()
            try:
                tool.end(self._error)
            except Exception as error:
                self._tell(type(tool).__name__, error)

    def _tell(self, name: str, error: Exception) -> None:
        """A tool's mistake costs the job nothing but this line."""
        print(
            f"course {name}: rank {os.environ.get('RANK', '?')} goes on without it: {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._error = error
        self._hook_before(kind, error, trace)


class _OnceImported(MetaPathFinder):
    """Has the module of the process groups followed once it is imported."""

    def __init__(self, attached: Attached):
        self.attached = attached

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != C10D:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_follow(module: ModuleType) -> None:
                run(module)
                follow(module, self.attached)

            spec.loader.exec_module = run_and_follow  # type: ignore[method-assign]
        return spec


def follow(c10d: ModuleType, attached: Attached) -> None:
    """Tell ``attached`` when the default group begins and ends; before anybody has taken the functions from here."""
    init, destroy = c10d.init_process_group, c10d.destroy_process_group

    told = inspect.signature(init)

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = told.bind_partial(*args, **kwargs).arguments
        rank, world_size = (given.get(name) for name in ("rank", "world_size"))  # -1: as the environment has it
        attached.arrive(None if rank == -1 else rank, None if world_size == -1 else world_size)
        result = init(*args, **kwargs)
        attached.begin()
        return result

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> Any:
        if group is None or group is c10d.GroupMember.WORLD:
            attached.end()
        return destroy(group)

    c10d.init_process_group, c10d.destroy_process_group = (  # type: ignore[attr-defined]
        init_process_group,
        destroy_process_group,
    )


def wait_for_torch() -> None:
    """Attach to this process once it imports torch.distributed."""
    sys.meta_path.insert(0, _OnceImported(Attached(json.loads(os.environ[VARIABLE]))))
