"""Measurements of lesson 02: bytes of an all-reduce, buckets that leave early, two engines side by side.

The functions that say "on one rank" are run by `launch` on every rank, and return plain numbers.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel

from course_lib.errors import LaunchError
from course_lib.launching.launch import launch
from course_lib.launching.netns import in_own_network, not_private
from course_lib.lessons import lab_gpt2
from course_lib.lessons.turns import in_turns
from course_lib.metering.meter import Meter
from course_lib.parallel import collectives
from course_lib.parallel.clock import Clock, Stamp
from course_lib.parallel.ddp import Bucket, DataParallel, ReductionHandle, bf16_compression, sum_gradients

VOCABULARY, LENGTH = 1024, 32
TRIES = 3
"""Times that bytes on the wire are counted: on a busy machine TCP sends some packets twice, so the least counts."""


def launch_privately(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[list[Any], str]:
    """`launch` in a network of the ranks' own, so that a `Meter` can count on the wire; where there is none, without.

    Returns:
        Each rank's value, and why the wire was not measured: empty where it was.
    """
    try:
        in_own_network(not_private)
    except LaunchError as refused:
        return launch(function, *args, **options), str(refused)
    return in_own_network(launch, function, *args, **options), ""


def through_rank_0(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce as one would first write it: everyone sends to rank 0, which adds up and sends back. In place."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank:
        dist.send(tensor, group=group, group_dst=0)
        dist.recv(tensor, group=group, group_src=0)
        return
    theirs = torch.empty_like(tensor)
    for other in range(1, ranks):
        dist.recv(theirs, group=group, group_src=other)
        tensor += theirs
    for other in range(1, ranks):
        dist.send(tensor, group=group, group_dst=other)


class Moved(NamedTuple):
    """Bytes that one all-reduce moved.

    Attributes:
        sent: by this rank, as the meter counts its messages; 0 on a rank outside the group.
        wire: by all ranks together, as the kernel counts them, with headers, the least of `TRIES`; None in a shared
            network.
    """

    sent: int
    wire: int | None


def all_reduce_bytes(ranks: Sequence[int], numel: int) -> dict[str, dict[int, Moved]]:
    """On one rank: all-reduce ``numel`` fp32 numbers in groups of the first 2, 3, ... ranks, in three ways.

    Returns:
        By way, ``naive``, ``ring`` (ours) or ``torch``, and number of ranks.
    Raises:
        AssertionError: a sum is wrong.
    """
    state = Accelerator()
    ways = {
        "naive": through_rank_0,
        "torch": lambda tensor, group: dist.all_reduce(tensor, group=group),
        "ring": lambda tensor, group: collectives.all_reduce(tensor, group=group),
    }
    least: dict[str, dict[int, Moved]] = {name: {} for name in ways}
    for n in ranks:
        group = dist.new_group(list(range(n)))
        for name, way in ways.items():
            moved = []
            for _ in range(TRIES):
                tensor = torch.full((numel,), state.process_index + 1.0, device=state.device)
                with Meter() as meter:
                    dist.barrier()  # nobody's bytes cross before all meters run, or after the first has stopped
                    if state.process_index < n:
                        way(tensor, group)
                        assert (tensor == n * (n + 1) / 2).all(), f"{name} on {n} ranks summed wrongly"
                    dist.barrier()
                moved.append(Moved(meter.bytes_sent, meter.wire_bytes))
            least[name][n] = min(moved, key=lambda measurement: measurement.wire or 0)
    return least


def gpt2(layers: int, width: int) -> GPT2LMHeadModel:
    """A small GPT-2 without dropout on this rank's device, the same on every rank."""
    return lab_gpt2.gpt2(layers, width, LENGTH, VOCABULARY).to(Accelerator().device)


def gradient_bytes(layers: int, width: int) -> int:
    """Bytes of the gradients of that model, counted on the CPU: the caller of `launch` leaves the GPUs to the ranks."""
    return sum(weight.nbytes for weight in lab_gpt2.gpt2(layers, width, LENGTH, VOCABULARY).parameters())


def tokens(seed: int, rows: int) -> Tensor:
    """Rows of random tokens, the same for the same seed; int64 [rows, LENGTH], on this rank's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=generator).to(Accelerator().device)


def share(ids: Tensor) -> Tensor:
    """This rank's rows of a batch."""
    state = Accelerator()
    return ids[state.process_index :: state.num_processes]


class Way(NamedTuple):
    """A way to put gradients into buckets.

    Attributes:
        first_bytes: the first bucket is closed at this size.
        bytes_each: and the others at this.
        reverse: in reverse order of the parameters, as `DataParallel` does; else in their order, which is wrong.
    """

    first_bytes: int
    bytes_each: int
    reverse: bool = True


@dataclass(frozen=True)
class Sending:
    """The backward of one rank, and what it sends; times in ms from the start of the backward, on a GPU the device's.

    Attributes:
        buckets: bytes of each, in the order in which they were sent.
        gradients: number of trained parameters.
        missing_at_first: gradients that did not exist yet when the first bucket was sent.
        early_bytes: of the buckets that were sent before the last gradient existed.
        backward: when the last gradient was there.
        sent: begin and end of each bucket's all-reduce.
        end: all gradients are averaged.
        hidden: share of the time of communication that lay before the last gradient.
    """

    buckets: list[int]
    gradients: int
    missing_at_first: int
    early_bytes: int
    backward: float
    sent: list[tuple[float, float]]
    end: float
    hidden: float


def sendings(ways: Mapping[str, Way], layers: int, width: int, rows: int, repeats: int) -> dict[str, Sending]:
    """On one rank: of ``repeats`` steps, an odd number, the one of median length; the ways take turns."""
    engines = {name: _Watched(way, layers, width) for name, way in ways.items()}
    ids = share(tokens(1, rows))
    steps = in_turns({name: partial(watched.step, ids) for name, watched in engines.items()}, repeats, warm_up=1)
    return {name: sorted(tries, key=lambda sending: sending.end)[repeats // 2] for name, tries in steps.items()}


class _InForwardOrder(DataParallel):
    """Fills its buckets in the order of the parameters: the first one waits for the last gradient."""

    def bucket_order(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return parameters


class _Watched:
    """A `DataParallel` model that keeps the order in which gradients arise and buckets are sent."""

    def __init__(self, way: Way, layers: int, width: int):
        model = gpt2(layers, width)
        self.events: list[tuple[str, int, Stamp]] = []
        self.clock: Clock
        for parameter in model.parameters():  # before DataParallel's own hooks, so that they are called first
            parameter.register_post_accumulate_grad_hook(lambda p: self._note("gradient", p.nbytes))
        wrap = DataParallel if way.reverse else _InForwardOrder
        self.engine = wrap(
            model, first_bucket_bytes=way.first_bytes, bucket_bytes=way.bytes_each, communication_hook=self._send
        )

    def step(self, ids: Tensor) -> Sending:
        self.events.clear()
        with Meter(self.engine) as meter:
            self.clock = meter.clock
            loss = self.engine(input_ids=ids, labels=ids).loss
            dist.barrier()  # the backwards begin together
            first = self.clock.stamp()
            loss.backward()
            after = self.clock.stamp()
        seconds = self.clock.seconds
        begin, end = seconds(first), seconds(after)
        self.engine.zero_grad()
        kinds = [kind for kind, _, _ in self.events]
        last = max(i for i, kind in enumerate(kinds) if kind == "gradient")
        backward = 1e3 * (seconds(self.events[last][2]) - begin)
        sent = [
            (1e3 * (collective.start - begin), 1e3 * (collective.end - begin))
            for collective in meter.collectives
            if collective.name == "all_reduce"
        ]
        return Sending(
            buckets=[size for kind, size, _ in self.events if kind == "bucket"],
            gradients=kinds.count("gradient"),
            missing_at_first=kinds[kinds.index("bucket") :].count("gradient"),
            early_bytes=sum(size for kind, size, _ in self.events[:last] if kind == "bucket"),
            backward=backward,
            sent=sent,
            end=1e3 * (end - begin),
            hidden=_covered(sent, until=backward) / _covered(sent, until=math.inf),
        )

    def _note(self, kind: str, size: int) -> None:
        self.events.append((kind, size, self.clock.stamp()))

    def _send(self, bucket: Bucket) -> ReductionHandle:
        self._note("bucket", bucket.flat.nbytes)
        return sum_gradients(bucket)


def _covered(spans: Sequence[tuple[float, float]], until: float) -> float:
    """Length of what spans, in order of their beginnings, cover together before a moment."""
    covered, reached = 0.0, -math.inf
    for begin, end in spans:
        covered += max(0.0, min(end, until) - max(begin, reached))
        reached = max(reached, min(end, until))
    return covered


@dataclass
class Trained:
    """A short training on one rank.

    Attributes:
        losses: of this rank's rows, by step.
        sent: bytes in the last step, by this rank, under the ring model.
        wire: bytes that all ranks sent in a step, the least of the last `TRIES`; None in a shared network.
        seconds: of each step but the first two and the last `TRIES`, from barrier to barrier.
    """

    losses: list[float]
    sent: int
    wire: int | None
    seconds: list[float]


def side_by_side(steps: int, layers: int, width: int, rows: int) -> dict[str, Trained]:
    """On one rank: the same training by four engines that take turns, AdamW, ``rows`` rows per step over all ranks.

    Returns:
        ``ours``; ``torch``'s DistributedDataParallel; ``bf16``, ours with compressed gradients; and ``alone``: this
        process by itself with all the rows.
    """
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        "ours": DataParallel,
        "torch": DistributedDataParallel,
        "bf16": lambda model: DataParallel(model, communication_hook=bf16_compression),
        "alone": lambda model: model,
    }
    models = {name: wrap(gpt2(layers, width)) for name, wrap in wraps.items()}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in models.items()}
    trained = {name: Trained([], 0, None, []) for name in models}
    clock = Clock(Accelerator().device)
    for step in range(steps):
        batch = tokens(step % 4, rows)
        for name in list(models)[:: 1 if step % 2 else -1]:
            ids = batch if name == "alone" else share(batch)
            measured = Meter(models[name]) if step >= steps - TRIES else contextlib.nullcontext()
            with measured:
                seconds, loss = _step(models[name], optimizers[name], ids, clock)
            trained[name].losses.append(loss)
            if isinstance(measured, Meter):
                trained[name].sent = measured.bytes_sent
                if measured.wire_bytes is not None:
                    trained[name].wire = min(measured.wire_bytes, trained[name].wire or measured.wire_bytes)
            elif step >= 2:
                trained[name].seconds.append(seconds)
    return trained


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, clock: Clock) -> tuple[float, float]:
    dist.barrier()
    clock.settle()  # a barrier on GPUs may be one of their streams alone
    begin = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    clock.settle()
    return time.perf_counter() - begin, loss.item()


def speed_ratio(peer: Trained, trained: Trained) -> float:
    """Median over the steps of the peer's time by the other's; above 1 the other is faster than the peer."""
    return statistics.median(p / t for p, t in zip(peer.seconds, trained.seconds, strict=True))
