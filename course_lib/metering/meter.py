"""Meter of one rank: collectives, bytes resident by kind, and a timeline."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from course_lib.errors import CourseError
from course_lib.launching.netns import loopback_bytes, not_private
from course_lib.metering.collective import Collective, ring_bytes
from course_lib.metering.collective_log import CollectiveLog
from course_lib.metering.intervals import Interval, common, length, united, without
from course_lib.metering.resident_memory import KINDS, Residency, Resident
from course_lib.parallel.clock import Clock, Stamp

__all__ = ["KINDS", "Collective", "Meter", "TimelineSpan", "ring_bytes"]


@dataclass(frozen=True)
class TimelineSpan:
    """A stretch of time on one rank.

    Attributes:
        kind: ``compute`` or ``communication``.
        name: ``forward``, ``backward``, ``step`` or what was given to `Meter.compute`; else the collective's.
        start: seconds on ``time.perf_counter``'s clock.
        end: likewise.
    """

    kind: str
    name: str
    start: float
    end: float


class Meter:
    """Measures a stretch of code on this rank, whichever engine runs in it.

    ```python
    with Meter(model, optimizer) as meter:
        model(**batch).loss.backward()
        optimizer.step()
    meter.bytes_sent, meter.peak["gradients"], meter.overlap_seconds
    ```

    Compute is the module's forward and backward and the optimizer's step, less the time that they stood still
    for a collective. All is on the clock of ``time.perf_counter``, the GPU's stamps too.

    Measuring costs Python time: some microseconds a collective, a module and a tensor saved for backward. Steps of a
    few milliseconds take a third longer, steps of a tenth of a second a tenth (``benchmarks/meter_overhead.py``); so
    take step times without it.

    Args:
        module: the model or the engine around it; None to measure only collectives.
        optimizer: the optimizer, or a wrapper of Accelerate or DeepSpeed around it.
        resident: an engine's own account of its tensors now alive, by kind; see `Residency`.
    Attributes:
        collectives: in the order in which this rank issued them.
        bytes_sent: by this rank, under the ring model.
        wire_bytes: that all ranks' sockets sent in the meantime, headers and acknowledgements included, as the
            private network's counter has it; None outside one. With a barrier before the stretch and one as
            its first and its last call, it holds all of every rank's transfers and no others.
        wire_reason: why wire_bytes is None, else empty.
        resident: bytes at the end, by kind of `KINDS`.
        peak: the most bytes of each kind; not all at the same time.
        peak_total: the most bytes of all kinds together at one time.
        timeline: spans of compute and communication by start.
    """

    _running = False

    def __init__(self, module: nn.Module | None = None, optimizer: Any = None, resident: Resident | None = None):
        self.module = module
        self._residency = Residency(module, optimizer, resident)
        self._compute: list[tuple[str, Stamp, Stamp]] = []
        self._waits: list[tuple[Stamp, Stamp]] = []
        self._begun: Stamp | None = None  # of the forward, backward or step under way
        self._in_backward = False

    def __enter__(self) -> "Meter":
        if Meter._running:
            raise CourseError("a meter is running already", "leave its `with` before another begins")
        self.clock = Clock(_device(self.module))
        self._traffic = CollectiveLog(self.clock, self._residency.hold_handed_over, self._waited)
        with contextlib.ExitStack() as stack:
            Meter._running = True
            stack.callback(setattr, Meter, "_running", False)
            stack.callback(self._residency.close)
            self._hook(stack)
            self._residency.look()
            self._traffic.start()
            stack.callback(self._traffic.stop)
            self._stack = stack.pop_all()
        self._wire = loopback_bytes()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.clock.settle()
        self.end = time.perf_counter()
        wire = loopback_bytes()
        self._residency.look()
        self.resident, self.peak = dict(self._residency.now), dict(self._residency.peak)
        self.peak_total = self._residency.peak_total
        self._stack.close()
        self.wire_reason = not_private()
        self.wire_bytes = None if self.wire_reason else wire - self._wire
        self.collectives = self._traffic.collectives()
        self.bytes_sent = sum(record.sent for record in self.collectives)
        self.timeline = self._timeline()

    @contextlib.contextmanager
    def compute(self, name: str) -> Iterator[None]:
        """Mark work that no module and no optimizer does as compute."""
        begin = self.clock.stamp()
        yield
        self._compute.append((name, begin, self.clock.stamp()))

    def total(self, name: str) -> int:
        """Payload bytes of all collectives of one name."""
        return sum(record.bytes for record in self.collectives if record.name == name)

    def count(self, name: str) -> int:
        """Number of collectives of one name."""
        return sum(record.name == name for record in self.collectives)

    def table(self) -> list[dict[str, Any]]:
        """A row for each kind of collective: name, dtype, ranks, calls, bytes and sent."""
        rows: dict[tuple, Counter] = {}
        for record in self.collectives:
            row = rows.setdefault((record.name, record.dtype_name, record.ranks), Counter())
            row.update(calls=1, bytes=record.bytes, sent=record.sent)
        return [{"name": name, "dtype": dtype, "ranks": ranks, **row} for (name, dtype, ranks), row in rows.items()]

    @property
    def communication_seconds(self) -> float:
        """During which at least one collective was under way."""
        return length(self._spans("communication"))

    @property
    def compute_seconds(self) -> float:
        return length(self._spans("compute"))

    @property
    def overlap_seconds(self) -> float:
        """Of communication during which this rank computed."""
        return length(common(self._spans("communication"), self._spans("compute")))

    @property
    def exposed_seconds(self) -> float:
        """Of communication that no compute hid."""
        return self.communication_seconds - self.overlap_seconds

    def _hook(self, stack: contextlib.ExitStack) -> None:
        """Watch the module, the optimizer and autograd, until the stack is closed."""
        handles = []
        if self.module is not None:
            self._residency.hold_inputs(list(self.module.buffers()))
            for module in self.module.modules():
                if module._parameters:
                    handles.append(module.register_forward_pre_hook(lambda m, _: self._residency.hold_parameters(m)))
            handles.append(self.module.register_forward_pre_hook(self._forward_begins, with_kwargs=True))
            handles.append(self.module.register_forward_hook(self._forward_ends))
        if self._residency.optimizer is not None:
            handles.append(self._residency.optimizer.register_step_pre_hook(lambda *_: self._begin()))
            handles.append(self._residency.optimizer.register_step_post_hook(lambda *_: self._finish("step")))
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._residency.hold_saved, lambda tensor: tensor))

    def _begin(self) -> None:
        self._residency.sample()
        self._begun = self.clock.stamp()

    def _finish(self, name: str) -> None:
        if self._begun is not None:
            self._compute.append((name, self._begun, self.clock.stamp()))
        self._begun = None
        if name == "step":
            self._residency.look()
        else:
            self._residency.sample()

    def _forward_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._residency.hold_inputs(args, kwargs)
        self._begin()

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._finish("forward")
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._finish("backward")

    def _waited(self, begin: Stamp, end: Stamp) -> None:
        self._waits.append((begin, end))
        self._residency.sample()

    def _timeline(self) -> list[TimelineSpan]:
        seconds = self.clock.seconds
        waits = united([(seconds(begin), seconds(end)) for begin, end in self._waits])
        spans = [
            TimelineSpan("compute", name, *rest)
            for name, begin, end in self._compute
            for rest in without([(seconds(begin), seconds(end))], waits)
        ]
        spans += [
            TimelineSpan("communication", call.name, call.start, call.end if call.ended else self.end)
            for call in self.collectives
        ]
        return sorted(spans, key=lambda span: span.start)

    def _spans(self, kind: str) -> list[Interval]:
        return united([(span.start, span.end) for span in self.timeline if span.kind == kind])


def _device(module: nn.Module | None) -> torch.device:
    """Where a module computes; without one, on the GPU if this process uses one."""
    parameter = next(module.parameters(), None) if module is not None else None
    if parameter is not None:
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
