"""The flight recorder: which collectives this rank has issued, where in the user's code, and whether they have ended.

It listens at the :mod:`~course_lib.metering.collective_hooks`, so that it sees DDP's C++ reducer, FSDP2, DeepSpeed and
pipelines too, and writes each call straight into the rank's record of the :mod:`~course_lib.hangs.rank_state_exchange`:
what it noted stays readable when this process is stopped or killed in the next instruction. A call costs some tens of
microseconds (``benchmarks/watchdog.py``), two thirds of them for the dispatcher's way through Python and back. When a
call has ended, :mod:`~course_lib.hangs.pending_calls` knows.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import CodeType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from course_lib.hangs.pending_calls import Pending
from course_lib.hangs.rank_state import CALL_ROOM, CALLS, ENDED, WAITED_FOR, RankState, spans
from course_lib.hangs.user_frames import Place, frame_of, main_place, nearness, shown, user_frame
from course_lib.metering import collective_hooks
from course_lib.metering.collective_hooks import ARGUMENTS, INPUTS, OPERATORS
from course_lib.metering.collective_log import axis_of

GLANCE = 4
"""Calls, the oldest, that each call looks at: on a GPU hundreds may be under way, and to ask for each takes time."""
TEXTS = 4096
"""Descriptions that are kept: shapes may be others in every step."""
PEER = {"send": "dst", "recv_": "src"}


def _at(operator: str, names: Sequence[str]) -> int | None:
    """Where in an operator's arguments one of these names stands."""
    return next((i for i, name in enumerate(ARGUMENTS[operator]) if name in names), None)


_SUBJECT = {operator: _at(operator, [INPUTS.get(operator, "")]) for operator in OPERATORS}
_GROUP = {operator: ARGUMENTS[operator].index("process_group") for operator in OPERATORS}
_PEER = {operator: _at(operator, [PEER.get(operator, "")]) for operator in OPERATORS}
_ROOT = {operator: _at(operator, ["root_rank"]) for operator in OPERATORS}
_ASYNC = {operator: _at(operator, ["async_op"]) for operator in OPERATORS}

_DEBUGGERS = ("pdb", "bdb", "ipdb", "pudb", "debugpy", "pydevd")


class FlightRecorder:
    """Notes every collective between `start` and `stop`.

    Args:
        record: where.
    """

    def __init__(self, record: RankState):
        self.record = record
        self.step = -1
        self.serial = 0
        self._sequences: dict[str, int] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._texts: dict[Any, tuple[bytes, str, CodeType | None]] = {}  # the code is kept: it is known by its id
        self._pending = Pending()
        self._waiting: set[int] = set()  # those that a thread waits for
        self._lock = threading.Lock()
        self._folder = os.getcwd()

    def start(self) -> None:
        collective_hooks.listen(self)

    def stop(self) -> None:
        collective_hooks.leave(self)
        self._pending.clear()

    def issuing(self, operator: str, args: Sequence[Any]) -> tuple[int, torch.device | None]:
        group = dist.ProcessGroup.unbox(args[_GROUP[operator]])
        subject, peer, root = _SUBJECT[operator], _PEER[operator], _ROOT[operator]
        shape, dtype, count, gpu = _described(args[subject or 0])
        if subject is None:  # a barrier's is a dummy
            shape, dtype, count = (), None, 0
        frame = user_frame(sys._getframe(1)) or user_frame(frame_of(threading.main_thread()))
        code, line = (frame.f_code, frame.f_lineno) if frame else (None, None)
        # A code object hashes slowly, but is the same object as long as it runs.
        key = (
            operator,
            shape,
            dtype,
            count,
            group.group_name,
            None if peer is None else args[peer],
            None if root is None else args[root],
            gpu is not None,
            id(code),
            line,
        )
        with self._lock:
            text, stream, _ = self._texts.get(key) or self._text(key, group, code)
            self.serial += 1
            serial = self.serial
            sequence = self._sequences[stream] = self._sequences.get(stream, 0) + 1
            if self._pending.on_gpu(serial - CALLS):
                self.record.keep(serial - CALLS)
            self.record.write_call(
                serial, sequence, time.monotonic(), self.step, stream, text, collective_hooks.batch()
            )
            if gpu is not None and _is_synchronous(operator, args):
                self.record.mark(serial, WAITED_FOR, serial)  # by the stream; a barrier's caller also waits itself
        return serial, gpu

    def issued(self, note: tuple[int, torch.device | None], work: dist.Work | None) -> None:
        if self._pending:
            self.look(GLANCE)
        serial, gpu = note
        if not self._pending.add(serial, work, gpu):
            self.record.mark(serial, ENDED)

    def waiting(self, waited_for: dist.Work | torch.Tensor) -> list[int]:
        serials = self._pending.waiting(waited_for)
        for serial in serials:
            self._waiting.add(serial)
            self.record.mark(serial, WAITED_FOR, self.serial)
        return serials

    def waited(self, note: list[int], waited_for: dist.Work | torch.Tensor) -> None:
        self._waiting.difference_update(note)
        if not note:
            self.look(GLANCE if isinstance(waited_for, torch.Tensor) and waited_for.is_cuda else None)
        elif self._pending.waited(waited_for):
            for serial in note:
                self.record.mark(serial, ENDED)

    def look(self, most: int | None = None) -> bool:
        """Mark the calls that have ended in the meantime; whether there were any.

        Args:
            most: look until so many have been found that have not, the oldest first; None for all.
        """
        ended = self._pending.ended(most)  # the watchdog's thread looks too
        for serial in ended:
            self.record.mark(serial, ENDED)
        return bool(ended)

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits for a collective; waits inside C++, such as DDP's, and for a GPU don't tell."""
        return bool(self._waiting)

    def place(self) -> Place:
        """File and line of the user's code that the main thread is in."""
        return main_place(self._folder)

    def place_of(self, trace: TracebackType | None) -> Place:
        """File and line of the user's code that an exception went through last."""
        where: Place = (None, None)
        nearest = 1
        while trace is not None:
            if (near := nearness(trace.tb_frame)) >= nearest:
                nearest, where = near, (shown(trace.tb_frame.f_code.co_filename, self._folder), trace.tb_lineno)
            trace = trace.tb_next
        return where

    def position(self) -> int:
        """A number that changes when the main thread's Python code goes on."""
        frame, position = frame_of(threading.main_thread()), 0
        while frame is not None:
            position, frame = hash((position, id(frame.f_code), frame.f_lasti)), frame.f_back
        return position

    def is_debugged(self) -> bool:
        """Whether the main thread stands in a debugger's prompt."""
        frame = frame_of(threading.main_thread())
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in _DEBUGGERS:
            frame = frame.f_back
        return frame is not None

    def stacks(self) -> str:
        """The Python stack of every thread but the caller's, the main thread's first."""
        frames, main = sys._current_frames(), threading.main_thread()
        shown = []
        for thread in sorted(threading.enumerate(), key=lambda other: other is not main):
            frame = frames.get(thread.ident or 0)
            if frame is not None and thread is not threading.current_thread():
                shown.append(f"thread {thread.name}, most recent call last:\n{''.join(traceback.format_stack(frame))}")
        return "\n".join(shown)

    def _text(self, key: Any, group: dist.ProcessGroup, code: CodeType | None) -> tuple[bytes, str, CodeType | None]:
        """What the record keeps of a call besides its numbers, and the name of the order that it is part of."""
        operator, shape, dtype, count, name, peer, root, on_gpu, _, line = key
        ranks = self._groups.get(name)
        if ranks is None:
            ranks = self._groups[name] = tuple(dist.get_process_group_ranks(group))
        kind, own = OPERATORS[operator], ranks[group.rank()]
        other = None if peer is None else ranks[peer]
        stream = name
        if kind == "send":
            stream = f"{name}:{own}>{other}:send"
        elif kind == "recv":
            stream = f"{name}:{'any' if other is None else other}>{own}:recv"
        described = {
            "stream": stream,
            "name": kind,
            "shape": shape[:8],
            "tensors": count,
            "dtype": str(dtype).removeprefix("torch.") if dtype else None,
            "peer": other,
            "root": None if root is None else ranks[root],
            "axis": _group_in_words(group)[:32],
            "on_gpu": on_gpu,
            "file": shown(code.co_filename, self._folder) if code else None,
            "line": line,
            "ranks": spans(ranks),
        }
        end = described["file"] and described["file"][-40:]
        for shorter in ({}, {"file": end}, {"file": end, "ranks": []}):  # long paths, odd groups of hundreds of ranks
            text = json.dumps(described | shorter).encode()
            if len(text) <= CALL_ROOM:
                break
        if len(self._texts) >= TEXTS:
            self._texts.clear()
        self._texts[key] = text[:CALL_ROOM], stream, code
        return self._texts[key]


def _group_in_words(group: dist.ProcessGroup) -> str:
    """``world`` for the default group, an axis of a mesh by its name, and any other group by that of torch."""
    if group.group_name == getattr(dist.group.WORLD, "group_name", None):
        return "world"
    axis = axis_of(group)
    return axis if axis not in ("", "world") else f"group {group.group_name}"


def _described(value: Any) -> tuple[tuple[int, ...], torch.dtype | None, int, torch.device | None]:
    """Shape and dtype of the first tensor, how many there are, and the GPU that they are on."""
    count = 1
    while isinstance(value, list):
        if not value:
            return (), None, 0, None
        count *= len(value)
        value = value[0]
    return tuple(value.shape), value.dtype, count, value.device if value.is_cuda else None


def _is_synchronous(operator: str, args: Sequence[Any]) -> bool:
    at = _ASYNC[operator]
    return at is not None and at < len(args) and not args[at]
