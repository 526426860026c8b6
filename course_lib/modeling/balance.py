"""Cost of each unit of a model, in FLOPs or seconds. dealing.py deals the units out to stages."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from course_lib.parallel.clock import Clock, Stamp


def count_flops(model: nn.Module, front: Sequence[str], blocks: Sequence[str], length: int) -> list[float]:
    """FLOPs of one sequence's forward: of the front, each block, and what comes after them.

    Matrix products and attention scores are counted, by running the model; lookups and sums are not.

    Args:
        model: takes ``input_ids``.
        front: names of the modules before the blocks.
        blocks: names of the blocks.
        length: tokens.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # others hide the scores
        _forward(model, length, next(model.parameters()).device)
    counts = {name.partition(".")[2]: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    before, within = sum(counts.get(name, 0) for name in front), [float(counts[name]) for name in blocks]
    return [float(before), *within, counter.get_total_flops() - before - sum(within)]


def measure_seconds(
    model: nn.Module, blocks: Sequence[str], length: int, device: torch.device, tries: int = 5
) -> list[float]:
    """Seconds of one sequence's forward on a device, by the same units; the shortest of some tries.

    A block is lent to the device for its own forward, and all else for the whole: the model may be too large for it.

    Args:
        model: takes ``input_ids``; left where it is.
        blocks: names of the blocks.
        length: tokens.
        device: to measure on.
        tries: forwards that are timed, after one more to warm up.
    """
    clock = Clock(device)
    modules = [model.get_submodule(name) for name in blocks]
    inside = {id(held) for block in modules for held in _held(block)}
    spans: list[tuple[Stamp, Stamp]] = []
    since: list[Stamp] = []
    lent = contextlib.ExitStack()

    def begin(block: nn.Module, _: object) -> None:
        if not spans:
            spans.append((since.pop(), clock.stamp()))
        lent.enter_context(_on(device, _held(block)))
        since[:] = [clock.stamp()]

    def end(*_: object) -> None:
        spans.append((since.pop(), clock.stamp()))
        lent.close()
        since[:] = [clock.stamp()]

    handles = [
        hook for block in modules for hook in (block.register_forward_pre_hook(begin), block.register_forward_hook(end))
    ]
    tried = []
    with _on(device, [held for held in _held(model) if id(held) not in inside]), lent:
        for turn in range(tries + 1):
            spans.clear()
            since[:] = [clock.stamp()]
            _forward(model, length, device)
            spans.append((since.pop(), clock.stamp()))
            clock.settle()
            if turn:  # the first loads kernels
                tried.append([clock.seconds(after) - clock.seconds(before) for before, after in spans])
    for handle in handles:
        handle.remove()
    return [min(unit) for unit in zip(*tried, strict=True)]


def _held(module: nn.Module) -> list[torch.Tensor]:
    """A module's parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


@contextlib.contextmanager
def _on(device: torch.device, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Tensors on a device for a while, and then as they were."""
    before = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def _forward(model: nn.Module, length: int, device: torch.device) -> None:
    """One sequence of the same token, without gradients."""
    with torch.no_grad():
        model(input_ids=torch.ones(1, length, dtype=torch.long, device=device))
