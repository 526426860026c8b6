"""On a rank of somebody else's job: every collective and the optimizer's memory, written down while the job runs.

A line of JSON for each thing, so that a rank which is killed leaves what it had: ``rank{R}-{PID}.jsonl``.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from course_lib.metering import collective_hooks
from course_lib.metering.collective import Collective
from course_lib.metering.collective_log import CollectiveLog, device_of
from course_lib.metering.storages import local_tensors
from course_lib.parallel.clock import Clock, Stamp

WRITE_SECONDS = 0.5
SAMPLED_AT_FIRST = 4
"""Steps whose memory is looked at; after them those whose number is a power of two."""


class JobLog:
    """Listens to the collectives of this process from now to `end`.

    Args:
        folder: where all ranks write.
        window: of the optimizer's steps, counted from 0, in which anything is written down; None for all.
    """

    def __init__(self, folder: Path, window: range | None = None):
        self.rank, self._steps, self._window = dist.get_rank(), 0, window
        self._log: CollectiveLog | None = None
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._waits: list[tuple[Stamp, Stamp]] = []
        self._held: dict[str, int] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._file: TextIO = open(folder / f"rank{self.rank}-{os.getpid()}.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        where = {"machine": machine(), "host": socket.gethostname()}
        when = {"began": time.time(), "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))}
        self._write("begin", {"rank": self.rank, "world": dist.get_world_size(), **where, **when})
        self._file.flush()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        collective_hooks.listen(self)
        self._thread = threading.Thread(target=self._keep_writing, name="course-meter", daemon=True)
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """Write what is left; collectives that have not ended have no end."""
        collective_hooks.leave(self)
        for hook in self._hooks:
            hook.remove()
        self._ended.set()
        self._thread.join()
        if self._log is not None:
            if error is None:
                self._log.clock.settle()
            self._take()
            for call in self._log.collectives():
                self._write_call(call)
        self._write("end", time.perf_counter(), None if error is None else type(error).__name__)
        self._file.close()

    # What the collective hooks call, on any thread.

    def issuing(self, operator: str, args: Sequence[Any]) -> Any:
        if not self._is_open():
            return None
        if self._log is None:  # only now it is known where this rank computes
            with self._lock:
                self._log = self._log or CollectiveLog(Clock(device_of(args)), waited=self._waited)
        return self._log.issuing(operator, args)

    def issued(self, note: Any, work: dist.Work | None) -> None:
        if self._log is not None and note is not None:
            self._log.issued(note, work)

    def waiting(self, waited_for: dist.Work | torch.Tensor) -> Any:
        return None if self._log is None else self._log.waiting(waited_for)

    def waited(self, note: Any, waited_for: dist.Work | torch.Tensor) -> None:
        if self._log is not None and note is not None:
            self._log.waited(note, waited_for)

    def _waited(self, begin: Stamp, end: Stamp) -> None:
        if self._is_open() and isinstance(begin, float) and isinstance(end, float):
            self._waits.append((begin, end))

    def _is_open(self) -> bool:
        """Whether the step under way is in the window."""
        return self._window is None or self._steps in self._window

    # The optimizer's memory.

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_sampled():
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._held = {
                "parameters": _bytes(parameters),
                "gradients": _bytes([p.grad for p in parameters if p.grad is not None]),
            }

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = self._held
        if self._is_sampled():
            states = [value for state in optimizer.state.values() for value in state.values()]
            held["optimizer states"] = _bytes([value for value in states if isinstance(value, torch.Tensor)])
        if self._is_open():
            with self._lock:
                self._write("step", self._steps + 1, time.perf_counter(), held)
        self._steps += 1
        self._held = {}

    def _is_sampled(self) -> bool:
        done = self._steps - (self._window.start if self._window else 0) + 1
        return self._is_open() and (done <= SAMPLED_AT_FIRST or done & (done - 1) == 0)

    # The file.

    def _keep_writing(self) -> None:
        while not self._ended.wait(WRITE_SECONDS):
            self._take()

    def _take(self) -> None:
        with self._lock:
            if self._log is not None:
                for call in self._log.take_ended():
                    self._write_call(call)
            waits, self._waits = self._waits, []
            for begin, end in waits:
                self._write("wait", begin, end)
            self._file.flush()

    def _write_call(self, call: Collective) -> None:
        key = call.group, call.ranks
        if key not in self._groups:
            self._groups[key] = len(self._groups)
            self._write("group", self._groups[key], call.group, call.axis, call.ranks)
        times = call.start, call.end if call.ended else None
        self._write("call", call.name, self._groups[key], call.bytes, call.dtype_name, *times, call.sent)

    def _write(self, kind: str, *values: Any) -> None:
        self._file.write(json.dumps([kind, *values], separators=(",", ":")) + "\n")


def machine() -> str:
    """The same on processes that share a monotonic clock: a boot of a machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def begin(settings: dict[str, Any]) -> JobLog:
    """Start on this rank.

    Args:
        settings: ``folder``, and ``steps``: the first one and the one after the last, or None.
    """
    steps = settings.get("steps")
    return JobLog(Path(settings["folder"]), None if steps is None else range(*steps))


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of their storages on this rank, each counted once."""
    storages = {
        part.untyped_storage()._cdata: part.untyped_storage().nbytes()
        for tensor in tensors
        for part in local_tensors(tensor)
    }
    return sum(storages.values())
