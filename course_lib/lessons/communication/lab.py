"""Lesson 18's experiment: one small language model trained in ways that say less, and what each costs over a link.

Each run is real: N ranks train on their own rows, every collective is counted, and the model that the ranks agree on is
evaluated. What a link of some rate and latency adds is computed from the messages that were counted, step by step; and
:func:`over_a_slow_network` lets the kernel slow the ranks' network down, as a check.
"""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from course_lib.data.bundled import load_tweets
from course_lib.errors import LaunchError
from course_lib.launching.launch import launch
from course_lib.launching.netns import in_own_network
from course_lib.lessons.lab_gpt2 import gpt2
from course_lib.lessons.slow_link import Link
from course_lib.metering.meter import Meter
from course_lib.parallel.communication.diloco import DiLoCo, plain_sum
from course_lib.parallel.communication.hierarchical import HierarchicalAllReduce, machine_groups
from course_lib.parallel.communication.local_sgd import LocalSGD, LocalTraining
from course_lib.parallel.communication.power_sgd import PowerSGD
from course_lib.parallel.communication.quantized_all_reduce import QuantizedAllReduce
from course_lib.parallel.communication.top_k import TopK
from course_lib.parallel.ddp import DataParallel, sum_gradients

TOKENS, ROWS = 64, 8
"""Bytes of a row, and rows of a rank's batch."""
LINKS = {
    "1 Gbit/s, 1 ms": Link(1e-3, 1.25e8),
    "100 Mbit/s, 10 ms": Link(1e-2, 1.25e7),
    "10 Mbit/s, 50 ms": Link(5e-2, 1.25e6),
}
"""Three links, by rate and latency: of a rank, per collective."""

Wrap = Callable[[nn.Module, int], nn.Module]
"""Makes an engine of a model; the number is H."""


def _diloco(bits: int = 0, lr: float = 0.7, momentum: float = 0.9) -> Wrap:
    def wrap(model: nn.Module, sync_every: int) -> nn.Module:
        return DiLoCo(
            model,
            sync_every=sync_every,
            outer_lr=lr,
            outer_momentum=momentum,
            group=None,
            sum_over_ranks=QuantizedAllReduce(bits, 256).sum if bits else plain_sum,
        )

    return wrap


def _hooked(make_hook: Callable[[], Any]) -> Wrap:
    return lambda model, _: DataParallel(model, communication_hook=make_hook())


METHODS: dict[str, Wrap] = {
    "all-reduce": _hooked(lambda: sum_gradients),
    "int8": _hooked(lambda: QuantizedAllReduce(8, 256)),
    "int4": _hooked(lambda: QuantizedAllReduce(4, 256)),
    "PowerSGD, rank 4": _hooked(lambda: PowerSGD(4, error_feedback=True)),
    "PowerSGD, rank 4, no feedback": _hooked(lambda: PowerSGD(4, error_feedback=False)),
    "top-k, 1 %": _hooked(lambda: TopK(0.01, error_feedback=True)),
    "top-k, 1 %, no feedback": _hooked(lambda: TopK(0.01, error_feedback=False)),
    "LocalSGD": lambda model, sync_every: LocalSGD(model, sync_every=sync_every, group=None),
    "LocalSGD, int4": _diloco(bits=4, lr=1.0, momentum=0.0),
    "DiLoCo": _diloco(),
    "DiLoCo, int4": _diloco(bits=4),
    "hierarchical, 2 per machine": _hooked(lambda: HierarchicalAllReduce(*machine_groups(2))),
}
"""Every way, by its name; hierarchical wants ranks in pairs, and more than one pair to be of use."""


@dataclass
class TrainingRun:
    """One way's training, as rank 0 saw it.

    Attributes:
        parameters: of the model.
        losses: validation loss (nats per byte) by optimizer steps made.
        messages: bytes that this rank sent in each collective, step by step.
        cpu_seconds: of this rank per step: model, optimizer, compression, gloo.
        wall_seconds: of all steps, evaluations left out.
    """

    parameters: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    messages: list[list[int]] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    wall_seconds: float = 0.0

    @property
    def bytes_per_step(self) -> float:
        """That this rank sent, the mean over all steps."""
        return sum(map(sum, self.messages)) / len(self.messages)

    def seconds(self, link: Link, compute: float) -> list[float]:
        """End of each step over a link, if a step computes so many seconds; see :func:`step_ends`."""
        return step_ends(self.messages, link, compute)

    def first_below(self, loss: float) -> int | None:
        """The first evaluated step whose loss is at most this; None where there is none."""
        return next((step for step, value in sorted(self.losses.items()) if value <= loss), None)


def step_ends(messages: list[list[int]], link: Link, compute: float) -> list[float]:
    """Seconds at which each step ends: when its messages have arrived, none of which hides behind backward.

    Args:
        messages: bytes of each collective, by step; they are issued at the step's end.
        link: rate and latency.
        compute: seconds of a step's computation.
    """
    clock = 0.0
    ends = []
    for sizes in messages:
        clock += compute
        for size in sizes:
            clock += link.seconds(size)
        ends.append(clock)
    return ends


# --- the training ---


def small_model(seed: int, width: int) -> GPT2LMHeadModel:
    """A GPT-2 of two layers over bytes."""
    return gpt2(2, width, TOKENS, vocabulary=256, seed=seed)


def texts() -> dict[str, Tensor]:
    """The bundled tweets as bytes, (B,) int64 for ``train`` and ``validation``."""
    return {
        split: torch.tensor(list("\n".join(rows["text"]).encode()))
        for split, rows in load_tweets().items()
        if split != "test"
    }


def windows(text: Tensor, rows: int, seed: int) -> Tensor:
    """(rows, TOKENS) int64, cut at places that the seed draws."""
    places = torch.randint(len(text) - TOKENS, (rows,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[place : place + TOKENS] for place in places.tolist()])


def train(
    text: dict[str, Tensor], method: str, *, steps: int, sync_every: int, seed: int, width: int, evaluate_every: int
) -> TrainingRun:
    """Train one way on the ranks that are here, over rows of their own; the process group has to stand."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    engine = METHODS[method](small_model(seed, width), sync_every)
    # Beta 2 of 0.95: with 0.999 the first hundreds of steps are a plateau, which rounding errors alone can end sooner.
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    run = TrainingRun(sum(parameter.numel() for parameter in engine.parameters()))
    held_out = windows(text["validation"], 128, seed=1)
    for first in range(0, steps, evaluate_every):
        ends = []
        dist.barrier()
        with Meter() as meter:
            for step in range(first, min(first + evaluate_every, steps)):
                rows = windows(text["train"], ROWS, seed=(seed * 100_000 + step) * ranks + rank)
                begun = time.process_time()
                engine(input_ids=rows, labels=rows).loss.backward()
                nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if isinstance(engine, LocalTraining):
                    engine.after_step()
                run.cpu_seconds.append(time.process_time() - begun)
                ends.append(time.perf_counter())
        run.wall_seconds += meter.end - meter.start
        by_step: list[list[int]] = [[] for _ in ends]
        for record in meter.collectives:
            by_step[sum(end < record.start for end in ends)].append(record.sent)
        run.messages += by_step
        run.losses[first + len(ends)] = validation_loss(engine, held_out)
    return run


@torch.no_grad()
def validation_loss(engine: nn.Module, rows: Tensor) -> float:
    """Nats per byte of the model that the ranks agree on."""
    with engine.agreed() if isinstance(engine, LocalTraining) else contextlib.nullcontext():
        return engine(input_ids=rows, labels=rows).loss.item()


def _trainings(text: dict[str, Tensor], methods: list[str], options: dict[str, Any]) -> dict[str, TrainingRun]:
    dist.init_process_group("gloo")
    return {method: train(text, method, **options) for method in methods}


def trainings(methods: list[str], num_processes: int, timeout: float = 600.0, **options: Any) -> dict[str, TrainingRun]:
    """Some ways, one after the other on the same ranks; see :func:`train`."""
    return launch(_trainings, texts(), methods, options, num_processes=num_processes, timeout=timeout, device="cpu")[0]


# --- over a network that the kernel slows down ---


def limit_rate(rate: float) -> str:
    """Let the loopback interface of this network send so many bytes/s; gives what ``tc`` then says of it.

    Raises:
        LaunchError: this system cannot.
    """
    if not shutil.which("tc"):
        raise LaunchError("there is no `tc` here", "install iproute2")
    for what in (f"add dev lo root tbf rate {round(8 * rate)}bit burst 128kb limit 64mb", "show dev lo"):
        done = subprocess.run(["tc", "qdisc", *what.split()], capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise LaunchError(f"this kernel cannot limit a rate (tc tbf: {done.stderr.strip()})", "compute it instead")
    return done.stdout


def _throttled(
    rate: float, methods: list[str], num_processes: int, timeout: float, options: dict[str, Any]
) -> dict[str, TrainingRun]:
    limit_rate(rate * num_processes)
    return trainings(methods, num_processes, timeout, **options)


def over_a_slow_network(
    rate: float, methods: list[str], num_processes: int, timeout: float = 600.0, **options: Any
) -> dict[str, TrainingRun]:
    """As :func:`trainings`, on a loopback interface that lets each rank send so many bytes/s.

    The interface is one queue for all ranks, and gets N times the rate. There is no latency in it.

    Raises:
        LaunchError: this system allows no network of one's own, or cannot limit its rate.
    """
    return in_own_network(_throttled, rate, methods, num_processes, timeout, options)
