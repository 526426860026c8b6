"""On one rank: the lines that run, chosen variables, collectives, waits and held bytes, written down as they happen.

An event is a line of JSON, handed to the kernel at once: a rank that hangs or is killed leaves all that it did. Its
first word is the kind, its second the time in microseconds of ``time.perf_counter``:

    line   section, line       this line begins; section -1: none of the code that is followed
    value  variable, text      it is something else than before
    call   number, name, bytes, dtype, ranks, group, sent      a collective or message is handed to the backend
    done   number              it has ended
    wait   / woke              a thread begins and ends to stand still for one
    held   bytes               of tensors that this rank has made and that live
    end    how, text           "returned", or "raised" and what

A line that is followed takes some 20 microseconds more than otherwise.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.metering.collective_log import CollectiveLog, Transfer
from course_lib.metering.storages import StorageTable, TrackedStorage, resizes
from course_lib.parallel.clock import Clock

SHOWN = 3
"""Numbers of a tensor that are written down."""
TEXT = 60
"""Characters of a value's text at most."""


class HeldBytes(TorchDispatchMode):
    """Bytes of the tensors that were made while it is entered and that live, each storage counted once.

    Attributes:
        bytes: held now.
        paused: nothing is looked at; for tensors that the recorder itself makes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.paused = 0, False
        self._table = StorageTable(("held",), self._resized)

    def __enter__(self) -> "HeldBytes":
        self._resizing = resizes(self._table.measure_again)
        self._resizing.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.__exit__(*error)
        self._table.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused and func.namespace not in ("prim", "profiler"):
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._table.hold(tensor, "held")
        return result

    def _resized(self, storage: TrackedStorage, change: int) -> None:
        self.bytes += change


class RankRecorder(CollectiveLog):
    """Follows this rank while it is entered.

    Args:
        path: of the file to write.
        functions: whose lines are followed, by their place in the list; the functions within them too.
        variables: names of their locals, or of attributes of these, as ``self.missing``.
        held: tells the bytes that this rank holds.
    """

    def __init__(self, path: Path, functions: Sequence[Callable[..., Any]], variables: Sequence[str], held: HeldBytes):
        super().__init__(Clock(torch.device("cpu")), ended=self._ended)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC)
        self._sections = {code: place for place, function in enumerate(functions) for code in codes(function)}
        self._names = [name.split(".") for name in variables]
        self._texts: dict[int, str] = {}
        self._frames: list[FrameType] = []
        self._held, self._last_held = held, -1
        self._numbers: dict[int, int] = {}

    def begin(self, stamps: Sequence[tuple[float, float]]) -> None:
        """Note what brings this rank's clock to rank 0's, see :func:`course_lib.metering.rank_clocks.exchange`."""
        self._write("begin", stamps)

    def __enter__(self) -> "RankRecorder":
        self.start()
        self._tracer_before = sys.gettrace()
        self._note_held()
        sys.settrace(self._called)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        sys.settrace(self._tracer_before)
        self.stop()
        self._note_held()
        said = "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
        self._write("end", "returned" if error is None else "raised", said)
        os.close(self._file)

    # Lines and variables: what Python calls.

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code not in self._sections:
            return None
        self._frames.append(frame)
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "return"):
            self._note_values(frame)
            self._note_held()
        if event == "line":
            self._write_line(frame)
        elif event == "return":
            self._frames.pop()
            self._write_line(self._frames[-1] if self._frames else None)
        return self._trace

    def _write_line(self, frame: FrameType | None) -> None:
        place = (-1, 0) if frame is None else (self._sections[frame.f_code], frame.f_lineno)
        self._write("line", *place)

    def _note_values(self, frame: FrameType) -> None:
        for number, (first, *rest) in enumerate(self._names):
            value = frame.f_locals.get(first, ABSENT)
            for name in rest:
                value = getattr(value, name, ABSENT)
            if value is ABSENT:
                continue
            self._held.paused = True
            text = short(value)
            self._held.paused = False
            if self._texts.get(number) != text:
                self._texts[number] = text
                self._write("value", number, text)

    def _note_held(self) -> None:
        if self._held.bytes != self._last_held:
            self._last_held = self._held.bytes
            self._write("held", self._last_held)

    # What the collective hooks call, on any thread.

    def issuing(self, operator: str, args: Sequence[Any]) -> Any:
        self._note_held()
        note = super().issuing(operator, args)
        call, number = note[0], len(self._numbers)
        self._numbers[id(call)] = number
        dtype = str(call.dtype).removeprefix("torch.")
        self._write("call", number, call.name, call.bytes, dtype, call.ranks, call.group, call.sent)
        return note

    def waiting(self, waited_for: dist.Work | torch.Tensor) -> Any:
        self._write("wait")
        return super().waiting(waited_for)

    def waited(self, note: Any, waited_for: dist.Work | torch.Tensor) -> None:
        super().waited(note, waited_for)
        self._write("woke")

    def _ended(self, transfer: Transfer) -> None:
        self._write("done", self._numbers[id(transfer)])

    def _write(self, kind: str, *values: Any) -> None:
        """One system call: what is in the kernel survives this process, and events of two threads do not mix."""
        event = [kind, round(time.perf_counter() * 1e6), *values]
        os.write(self._file, json.dumps(event, separators=(",", ":")).encode() + b"\n")


ABSENT = object()


def codes(function: Callable[..., Any]) -> list[CodeType]:
    """The code of a function, and of the functions, lambdas and comprehensions written within it.

    Raises:
        TypeError: it has no Python code.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function!r} is no Python function")
    listed = [function.__code__]
    for code in listed:  # which grows meanwhile
        listed += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return listed


def short(value: Any) -> str:
    """A value in a few words: of a tensor dtype (``f32``), shape and first numbers, of a container its length."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.").replace("float", "f").replace("uint", "u").replace("int", "i")
        text = f"{dtype} {tuple(value.shape)}".replace(",)", ")")
        if value.numel() and not value.untyped_storage().nbytes():
            return f"{text}: freed"
        numbers = value.detach().flatten()[:SHOWN].tolist()
        return f"{text}: {' '.join(map(_number, numbers))}{' …' * (value.numel() > SHOWN)}".rstrip(": ")
    if isinstance(value, bool | str | None):
        return repr(value)[:TEXT]
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, list | tuple) and all(isinstance(member, int) for member in value):
        return str(list(value))[:TEXT]
    if hasattr(value, "__len__"):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) or not math.isfinite(value) else f"{value:.3g}"
