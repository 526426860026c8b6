"""Every operator that a stretch of code calls: how often, its FLOPs and bytes, in which module and pass, how long.

The counts are of what an operator has to do, whatever the kernel does with caches; so they are exact, the same on
every machine, and the two coordinates of the roofline (Williams et al. 2009).
"""

import bisect
import contextlib
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.metering.operator_costs import KINDS, describe

__all__ = ["KINDS", "Operator", "OperatorCounter", "merged"]


@dataclass(frozen=True)
class Operator:
    """All calls of one operator at one place."""

    name: str
    """PyTorch's, as ``addmm``; of a collective its standard name, as ``all_reduce``."""
    module: str
    """Path of the innermost module that called it, or whose forward the backward belongs to; empty outside."""
    phase: str
    """``forward``, ``backward``, ``optimizer``, or what the caller named."""
    kind: str
    """One of :data:`KINDS`."""
    dtype: str
    """Of what it wrote, else of what it read; ``float32`` and the like."""
    calls: int
    flops: int
    bytes: int
    """Read and written; of a collective what this rank sends by the ring model."""
    seconds: float = math.nan
    """NaN where the counter did not time."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte; 0 where nothing moves."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def rate(self) -> float:
        """FLOP/s; NaN where it was not timed."""
        return self.flops / self.seconds if self.seconds else math.nan

    @property
    def bandwidth(self) -> float:
        """Bytes/s; NaN where it was not timed."""
        return self.bytes / self.seconds if self.seconds else math.nan


def merged(operators: Sequence[Operator], *by: str) -> list[Operator]:
    """Rows that agree in some fields added up, in the order in which they came first.

    Args:
        operators: the rows.
        by: names of fields, as ``"module", "name"``; none to add up all. Others that differ become empty.
    """
    groups: dict[tuple, list[Operator]] = {}
    for operator in operators:
        groups.setdefault(tuple(getattr(operator, field) for field in by), []).append(operator)
    texts = [field.name for field in fields(Operator) if field.type in (str, "str")]
    rows = []
    for members in groups.values():
        same = {text: values.pop() if len(values := {getattr(o, text) for o in members}) == 1 else "" for text in texts}
        rows.append(
            Operator(
                **same,
                calls=sum(o.calls for o in members),
                flops=sum(o.flops for o in members),
                bytes=sum(o.bytes for o in members),
                seconds=sum(o.seconds for o in members),
            )
        )
    return rows


class OperatorCounter:
    """Counts what PyTorch's operators do while it is entered, forward, backward and in the optimizer.

    ```python
    with OperatorCounter(model, optimizer, timed=True) as counter:
        model(x).sum().backward()
        optimizer.step()
    counter.operators
    ```

    FLOPs: matrix products, convolutions and attention as ``torch.utils.flop_counter`` has them (a multiply-add is
    two, causal attention counts whole, its backward with what it computes again); pointwise one for each element
    written; reductions, norms and softmax one for each element of the largest argument; moves, views and collectives
    none. Bytes: each distinct part of a storage that goes in once, however many arguments show it, and all that is
    written; of a look-up only the rows that are chosen. Views and allocations are 0.

    Args:
        module: its modules' paths are named; None to name none.
        optimizer: its steps are the phase ``optimizer``; the rest outside of a backward is ``forward``.
        timed: take each call's seconds too. A GPU is waited for around each, and a collective until it is done, so
            nothing overlaps: the seconds are of each operator alone.

    Attributes:
        phase: of what runs outside of a backward; to be set by the caller for phases of their own.
    """

    def __init__(self, module: nn.Module | None = None, optimizer: Any = None, *, timed: bool = False):
        self.phase, self.timed = "forward", timed
        self._module, self._optimizer = module, optimizer
        self._rows: dict[tuple[str, ...], list[float]] = {}
        self._inside: list[str] = []
        # Autograd numbers its nodes: from each number on, those are of the module beside it.
        self._numbers, self._modules = [0], [""]
        self._owners: dict[int, str] = {}

    @property
    def operators(self) -> list[Operator]:
        """The rows so far, in the order of their first calls."""
        return [
            Operator(
                name, module, phase, kind, dtype, int(calls), int(flops), int(size), seconds if self.timed else math.nan
            )
            for (name, module, phase, kind, dtype), (calls, flops, size, seconds) in self._rows.items()
        ]

    def __enter__(self) -> "OperatorCounter":
        with contextlib.ExitStack() as stack:
            for name, module in self._module.named_modules() if self._module is not None else ():
                self._owners |= {id(parameter): name for parameter in module._parameters.values()}
                begins = module.register_forward_pre_hook(functools.partial(self._begins, name), prepend=True)
                ends = module.register_forward_hook(self._ends, always_call=True)
                stack.callback(begins.remove)
                stack.callback(ends.remove)
            if self._optimizer is not None:
                stack.callback(self._optimizer.register_step_pre_hook(self._updates).remove)
                stack.callback(self._optimizer.register_step_post_hook(self._updated).remove)
            stack.enter_context(_Mode(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an operator and count it."""
        start = self._now() if self.timed else 0.0
        result = func(*args, **kwargs)
        if self.timed and func.namespace == "c10d":
            _wait(func, result)
        seconds = self._now() - start if self.timed else 0.0
        derived = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, result)))  # DTensor's shapes
        if func.namespace in ("aten", "c10d", "_c10d_functional") and not derived:
            name, kind, flops, size, dtype = describe(func, args, kwargs, result)
            row = self._rows.setdefault((name, *self._place(), kind, dtype), [0, 0, 0, 0.0])
            for column, value in enumerate((1, flops, size, seconds)):
                row[column] += value
        return result

    def _now(self) -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _place(self) -> tuple[str, str]:
        """Module and phase of the call under way."""
        node = torch._C._current_autograd_node()
        inside = self._inside[-1] if self._inside else ""
        if node is None:
            return inside, self.phase
        if inside:  # a checkpoint computes it again
            return inside, "backward"
        variable = getattr(node, "variable", None)  # of a node that accumulates a gradient
        if isinstance(variable, torch.Tensor):
            return self._owners.get(id(variable), ""), "backward"
        return self._modules[bisect.bisect_right(self._numbers, node._sequence_nr()) - 1], "backward"

    def _begins(self, name: str, module: nn.Module, args: Any) -> None:
        self._inside.append(name)
        self._from_here_on()

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()
        self._from_here_on()

    def _from_here_on(self) -> None:
        number = torch.autograd._get_sequence_nr()
        if number >= self._numbers[-1]:  # a thread of autograd's own, on which a checkpoint computes, numbers anew
            self._numbers.append(number)
            self._modules.append(self._inside[-1] if self._inside else "")

    def _updates(self, *_: Any) -> None:
        self._before, self.phase = self.phase, "optimizer"

    def _updated(self, *_: Any) -> None:
        self.phase = self._before


class _Mode(TorchDispatchMode):
    """Hands every operator below autograd to a counter."""

    def __init__(self, counter: OperatorCounter):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor and the like take themselves apart first
        leaves = tree_leaves((args, kwargs))
        device = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
        if func.namespace == "aten" and not _has_kernel(func, device):
            with self:
                parts = func.decompose(*args, **(kwargs or {}))  # in inference mode composite operators come whole
            if parts is not NotImplemented:
                return parts
        return self.counter.call(func, args, kwargs or {})


@functools.cache
def _has_kernel(func: Any, device: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), device.upper())


def _wait(func: Any, result: Any) -> None:
    """Wait for a collective that was issued, except for messages, whose peer may wait for another one first."""
    if func._schema.name.partition("::")[2] in ("send", "recv_", "recv_any_source_"):
        return
    boxed = result[-1] if isinstance(result, tuple) else result
    if boxed is not None:
        dist.Work.unbox(boxed).wait()
