"""Roofline: the measured limits of this machine, and the one that bounds an operator.

Williams, Waterman and Patterson, Roofline, 2009: an operator of F FLOPs and B bytes takes at least F / peak FLOP/s and
at least B / memory bandwidth; which is longer goes by its intensity F / B, beside the ridge, peak / bandwidth. Two
more roofs bound what training does: a collective's bytes on the link, and the host's time to start an operator.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib.errors import CourseError
from course_lib.metering.collective_log import ring_bytes
from course_lib.metering.operators import Operator, OperatorCounter, merged

__all__ = [
    "Bound",
    "Operator",
    "OperatorCounter",
    "Peaks",
    "bound",
    "floor_seconds",
    "measure_link",
    "measure_peaks",
    "merged",
]

SIZES = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192)}
"""Rows and columns of the matrix products that are tried."""
ARRAY = 64 * 2**20
"""Bytes of an array that is streamed, at least; twice the last cache where that is more, up to four times this."""
LINK_ARRAY = 16 * 2**20
TRIES = 3
"""Of each measurement at least, after one that is thrown away."""


@dataclass(frozen=True)
class Peaks:
    """The roofs of one rank's device."""

    flops: Mapping[str, float]
    """FLOP/s of a large matrix product, by data type (``float32``, ``bfloat16``)."""
    memory: float
    """Bytes/s, read and written together."""
    launch: float
    """Seconds from the start of one small operator to the start of the next."""
    device: str
    """``cpu``, or the GPU's name."""
    threads: int
    """That PyTorch computes with on the host."""
    link: float | None = None
    """Bytes/s that a rank sends in a large all_reduce by the ring model; None where it was not measured."""

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on the fastest data type is bound by compute."""
        return max(self.flops.values()) / self.memory


class Bound(NamedTuple):
    """Roof that an operator is under."""

    by: str
    """``compute``, ``memory``, ``launch`` or ``link``."""
    seconds: float
    """That it takes at least, all its calls together."""


def bound(operator: Operator, peaks: Peaks) -> Bound:
    """The roof that is lowest over an operator, and its seconds there.

    What is smaller than a cache may be faster than the memory's roof. FLOPs of a data type that was not measured are
    held to the fastest that was.

    Raises:
        CourseError: it is a collective that sends bytes, and the link was not measured.
    """
    launching = Bound("launch", operator.calls * peaks.launch)
    if operator.kind == "collective":
        if operator.bytes and peaks.link is None:
            raise CourseError(
                f"no link was measured for {operator.name}",
                "put measure_link()'s result into the peaks: dataclasses.replace(peaks, link=...)",
            )
        return max(Bound("link", operator.bytes / (peaks.link or 1)), launching, key=lambda roof: roof.seconds)
    rate = peaks.flops.get(operator.dtype, max(peaks.flops.values()))
    return max(
        Bound("compute", operator.flops / rate),
        Bound("memory", operator.bytes / peaks.memory),
        launching,
        key=lambda roof: roof.seconds,
    )


def floor_seconds(operators: Sequence[Operator], peaks: Peaks) -> float:
    """Seconds that some operators take at least, one after the other, each at its own roof."""
    return sum(bound(operator, peaks).seconds for operator in operators)


def measure_peaks(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, seconds: float = 2.5
) -> Peaks:
    """Measure this machine's roofs, in about ``seconds``.

    The rule is the fastest of all tries: a roof is what can be reached, and what else the machine does only lowers a
    try. Matrix products are square, of several sizes; memory is a triad ``a = b + s c``, a copy, and a sum in place
    ``a += b`` of arrays beyond the last cache, of which what goes in and comes out counts (the sum is fastest on a CPU,
    which has to read a line of memory before it writes to it); launching is an addition to one element. Where all ranks
    measure at once, each gets its share of the machine.

    Args:
        device: what is measured.
        dtype: of the matrix product.
        seconds: half of it for the products; a larger product is left out where one try would take longer.
    """
    device = torch.device(device)
    wait = _waiting(device)
    rate, taken = 0.0, 0.0
    sizes = SIZES.get(device.type, SIZES["cpu"])
    generator = torch.Generator(device).manual_seed(0)  # the caller's random numbers stay as they are
    for size in sizes:
        if taken * 8 * (TRIES + 1) > seconds / 2:
            break
        left, right = torch.randn(2, size, size, device=device, generator=generator).to(dtype)
        out = torch.empty_like(left)
        taken = _fastest(functools.partial(torch.mm, left, right, out=out), wait, seconds / 2 / len(sizes))
        rate = max(rate, 2 * size**3 / taken)
    a, b, c = (torch.ones(_array_bytes(device) // 4, device=device) for _ in range(3))
    streams = [(3, lambda: torch.add(b, c, alpha=3.0, out=a)), (2, lambda: a.copy_(b)), (3, lambda: a.add_(b))]
    memory = max(arrays * a.nbytes / _fastest(call, wait, seconds / 8) for arrays, call in streams)
    one = torch.ones(1, device=device)

    def small() -> None:
        for _ in range(1000):
            one.add_(one)

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Peaks(
        {str(dtype).removeprefix("torch."): rate},
        memory,
        _fastest(small, wait, seconds / 20) / 1000,
        name,
        torch.get_num_threads(),
    )


def measure_link(
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    *,
    size: int = LINK_ARRAY,
    tries: int = TRIES,
) -> float | None:
    """Bytes/s that a rank sends in a large all_reduce, by the ring model; a collective call, the same on all ranks.

    The fastest of some tries, of the rank where that is slowest.

    Args:
        device: where the tensor lies; the group's backend has to take it.
        group: None for all ranks.
        size: bytes of the tensor.
        tries: after one that is thrown away.
    Returns:
        None where the rank has no other to send to.
    Raises:
        CourseError: there is no process group.
    """
    if not dist.is_initialized():
        raise CourseError("there is no link to measure without ranks", "call dist.init_process_group() before")
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return None
    device = torch.device(device)
    wait, tensor = _waiting(device), torch.zeros(size // 4, device=device)

    def once() -> None:
        dist.all_reduce(tensor, group=group)

    fastest = torch.tensor([_fastest(once, wait, 0.0, tries)], device=device)
    dist.all_reduce(fastest, dist.ReduceOp.MAX, group)
    return ring_bytes("all_reduce", tensor.nbytes, ranks) / fastest.item()


def _fastest(call: Callable[[], object], wait: Callable[[], object], seconds: float, tries: int = TRIES) -> float:
    """Seconds of the fastest of some calls, after one that is thrown away."""
    call()
    wait()
    fastest, tried, end = float("inf"), 0, time.perf_counter() + seconds
    while tried < tries or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        wait()
        fastest, tried = min(fastest, time.perf_counter() - start), tried + 1
    return fastest


def _waiting(device: torch.device) -> Callable[[], object]:
    """What waits until the device has done all that was queued."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def _array_bytes(device: torch.device) -> int:
    """Bytes of an array that no cache holds."""
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    else:
        caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")  # Linux alone says it
        cache = max((int(path.read_text().strip().removesuffix("K")) * 1024 for path in caches), default=0)
    return min(max(ARRAY, 2 * cache), 4 * ARRAY)
