"""The calls of a rank that have not ended, and how to find out without waiting.

On the CPU a call has ended when its Work says so, and whoever waits for it stands still until then. On a GPU a wait
lets the *stream* wait and returns at once (ProcessGroupNCCL.hpp, WorkNCCL::synchronize), so that a call ends when the
GPU comes past it: its Work knows (``is_completed`` asks an event in NCCL's stream); after a wait, or where there is
no Work because the call is in the current stream itself, an event of our own knows, which stands behind it in that
stream. To ask an event never waits. Events are used again: to make or to destroy one may wait for the driver's lock
(ProcessGroupNCCL.hpp, TORCH_NCCL_CUDA_EVENT_CACHE).
"""

import contextlib
import itertools
import threading
from typing import Any

import torch
import torch.distributed as dist

from course_lib.metering import graph_captures

PENDING = 256
"""Calls on the CPU that are followed until they end."""
AHEAD = 1024
"""The same on a GPU. A host that is so many launches ahead of it waits until there is room in its queue."""


class Pending:
    """Calls by their serials. Each method may be called on any thread."""

    def __init__(self) -> None:
        # By the id of whom to ask: him, and the serials of the calls; those of a batch have one Work.
        self._on_cpu: dict[int, tuple[dist.Work, list[int]]] = {}
        self._on_gpu: dict[int, tuple[dist.Work | torch.cuda.Event, list[int], torch.device]] = {}
        self._queued: set[int] = set()  # the serials of those on a GPU
        self._events: dict[torch.device, list[torch.cuda.Event]] = {}  # free ones
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._on_cpu or self._on_gpu)

    def on_gpu(self, serial: int) -> bool:
        """Whether a GPU has still to come past a call."""
        return serial in self._queued

    def clear(self) -> None:
        for calls in (self._on_cpu, self._on_gpu, self._queued):
            calls.clear()

    def add(self, serial: int, work: dist.Work | None, device: torch.device | None) -> bool:
        """Follow a call that was just issued on the calling thread; False where it needs no following.

        Args:
            serial: the call's number on this rank.
            work: None: it is in the current stream of ``device``, or has ended.
            device: a GPU, or None for the CPU.
        """
        if device is None and work is None:
            return False
        if device is not None and torch.cuda.is_current_stream_capturing():
            return False  # a graph's calls run when it is replayed, and then nobody issues them
        asked: Any = self._event(device) if work is None and device is not None else work
        with self._lock:
            calls: dict[int, Any] = self._on_cpu if device is None else self._on_gpu
            if id(asked) in calls:
                calls[id(asked)][1].append(serial)
            else:
                if len(calls) >= (PENDING if device is None else AHEAD):
                    self._queued.difference_update(calls.pop(next(iter(calls)))[1])  # such as a send that nobody kept
                calls[id(asked)] = (asked, [serial]) if device is None else (asked, [serial], device)
            if device is not None:
                self._queued.add(serial)
        return True

    def waiting(self, work: Any) -> list[int]:
        """The calls whose Work a thread is going to wait for."""
        with self._lock:
            # From here on its end is that of the wait, which may raise instead.
            if waited_for := self._on_cpu.pop(id(work), None):
                return waited_for[1]
            return list(self._on_gpu[id(work)][1]) if id(work) in self._on_gpu else []

    def waited(self, work: Any) -> bool:
        """Whether the calls of a Work ended with the wait that has returned; on a GPU the stream may still wait."""
        on_gpu = self._on_gpu.get(id(work))
        if on_gpu is None:
            return True
        _, serials, device = on_gpu
        if torch.cuda.is_current_stream_capturing():
            return False
        event = self._event(device)
        with self._lock:
            self._on_gpu.pop(id(work), None)  # it holds the tensors, which are to be freed
            self._on_gpu[id(event)] = event, serials, device
        return False

    def ended(self, most: int | None = None) -> list[int]:
        """The calls that have ended in the meantime, which are followed no more.

        Args:
            most: ask until so many have been found that have not; None for all.
        """
        with self._lock:
            on_cpu = list(itertools.islice(self._on_cpu.items(), most))
            on_gpu = list(self._on_gpu.items())
        serials: list[int] = []
        for key, (work, _) in on_cpu:
            if work.is_completed():  # gloo's sends, receives and reduce-scatters end only when they are waited for
                serials += self._forget(self._on_cpu, key)
        if not on_gpu:
            return serials
        # A thread's first word to CUDA makes a context on its current device, which on a new thread is GPU 0.
        there = torch.cuda.device(on_gpu[0][1][2]) if most is None else contextlib.nullcontext()
        try:
            with graph_captures.may_ask() as may, there:
                for key, (asked, _, device) in on_gpu if may else ():
                    if asked.query() if isinstance(asked, torch.cuda.Event) else asked.is_completed():
                        ended = self._forget(self._on_gpu, key)
                        serials += ended
                        if ended and isinstance(asked, torch.cuda.Event):
                            self._events[device].append(asked)
                    elif most is not None and (most := most - 1) == 0:
                        break
        except RuntimeError:  # the GPU has failed, as the main thread's next use of it says: its calls never end
            self._on_gpu.clear()
        return serials

    def _forget(self, calls: dict[int, Any], key: int) -> list[int]:
        """Follow those of one key no more; none where another thread was first."""
        with self._lock:
            serials = calls.pop(key, (None, []))[1]
            self._queued.difference_update(serials)
        return serials

    def _event(self, device: torch.device) -> torch.cuda.Event:
        """An event behind all that is in the calling thread's current stream."""
        free = self._events.setdefault(device, [])
        try:
            event = free.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event
