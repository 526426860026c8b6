"""Five faults of lesson 10 with their cures: a straggler, a NaN, diverging parameters, no memory, a full disk."""

import contextlib
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.errors import TrainingDiverged
from course_lib.hangs.desync import GatheringRanks, compare, replicas
from course_lib.lessons.faults.scenarios import CULPRIT, STEPS, is_culprit

MIB = 2**20


def straggler(folder: Path) -> list[tuple[float, float]]:
    """The culprit has all the long texts."""
    return _timed_steps([_milliseconds(dist.get_rank())] * dist.get_world_size())


def long_texts_dealt_out(folder: Path) -> list[tuple[float, float]]:
    return _timed_steps([_milliseconds(rank) for rank in range(dist.get_world_size())])


def _milliseconds(rank: int) -> int:
    """What a text of the pile that was meant for this rank takes to compute."""
    return 20 if rank == CULPRIT else 2


def _timed_steps(texts: list[int], steps: int = 8) -> list[tuple[float, float]]:
    """Seconds of computing and of waiting, step by step. Sleeping stands for computing: it needs no core of its own."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        time.sleep(sum(texts) / 1000)
        computed = time.perf_counter()
        total = torch.ones(2)
        dist.all_reduce(total)
        total.tolist()  # a GPU's ranks wait here
        times.append((computed - start, time.perf_counter() - computed))
    return times


def _fit(weight: Tensor, batch: Callable[[int], Tensor], averaged: Callable[[int, Tensor], bool]) -> list[float]:
    """A linear model on every rank; ``averaged`` makes one gradient of the ranks', or says to leave the step out.

    Returns:
        The mean loss over the ranks of each step that was done, as a trainer would log it.
    """
    losses = []
    for step in range(STEPS):
        x = batch(step)
        loss = (x @ weight - x.sum(1)).square().mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        if averaged(step, gradient):
            dist.all_reduce(loss := loss.detach().clone())
            losses.append(loss.item() / dist.get_world_size())
            weight.data -= 0.1 * gradient
    return losses


def _mean(step: int, gradient: Tensor) -> bool:
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
    return True


def _rows(step: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(10 * step + dist.get_rank())
    return torch.randn(8, 4, generator=generator, device="cpu").to(torch.get_default_device())


def _rows_with_a_hole(step: int) -> Tensor:
    rows = _rows(step)
    if is_culprit() and step == 2:
        rows[0, 0] = math.nan
    return rows


def nan_on_one_rank(folder: Path) -> list[float]:
    return _fit(torch.zeros(4, requires_grad=True), _rows_with_a_hole, _mean)


def nan_is_looked_for(folder: Path) -> list[float]:
    return _fit(torch.zeros(4, requires_grad=True), _rows_with_a_hole, finite_or_name_the_rank)


def finite_or_name_the_rank(step: int, gradient: Tensor) -> bool:
    """Average the gradients, unless one of them is not finite: after the sum nobody can tell whose it was.

    Raises:
        TrainingDiverged: on every rank, with the ranks whose own gradient was not finite.
    """
    finite = torch.zeros(dist.get_world_size(), dtype=torch.int)
    finite[dist.get_rank()] = bool(gradient.isfinite().all())
    dist.all_reduce(finite)
    if ranks := (finite == 0).nonzero().flatten().tolist():
        raise TrainingDiverged(
            f"the gradient of rank {' and '.join(map(str, ranks))} is not finite at step {step}",
            "look at that rank's batch of that step",
        )
    return _mean(step, gradient)


def step_left_out_by_all(folder: Path) -> list[float]:
    def averaged(step: int, gradient: Tensor) -> bool:
        usable = gradient.isfinite().all().int()
        dist.all_reduce(usable, dist.ReduceOp.MIN)
        return bool(usable) and _mean(step, gradient)

    return _fit(torch.zeros(4, requires_grad=True), _rows_with_a_hole, averaged)


def diverging_parameters(folder: Path) -> dict[str, Any]:
    return _fit_from(_own_weight())


def diverging_is_looked_for(folder: Path) -> dict[str, Any]:
    weight = _own_weight()
    topic = replicas({"weight": weight}, "let every rank read the same checkpoint")
    compare([topic], "before the first step", GatheringRanks(weight.device))
    return _fit_from(weight)


def start_from_rank_0(folder: Path) -> dict[str, Any]:
    weight = _own_weight()
    dist.broadcast(weight.data, src=0)
    return _fit_from(weight)


def _own_weight() -> Tensor:
    """What each rank starts from: the culprit read another checkpoint."""
    return torch.full((4,), 0.5 if is_culprit() else 0.0, requires_grad=True)


def _fit_from(weight: Tensor) -> dict[str, Any]:
    losses = _fit(weight, _rows, _mean)
    return {"losses": losses, "weight": weight.tolist()}


# --- room that runs out -----------------------------------------------------------------------------------------------


def out_of_memory(folder: Path) -> float:
    """Every rank has room for 1 GiB more; the culprit's batch is a long one, of 2 GiB."""
    with _room_for(1024 * MIB):
        activations = torch.ones(2048 * MIB // 4 if is_culprit() else MIB)
    total = activations.mean()
    dist.all_reduce(total)
    return total.item()


def micro_batches(folder: Path) -> float:
    pieces = 128 if is_culprit() else 1
    total = torch.zeros(())
    with _room_for(1024 * MIB):
        for _ in range(pieces):
            total += torch.ones(16 * MIB // 4).mean() / pieces
    dist.all_reduce(total)
    return total.item()


@contextlib.contextmanager
def _room_for(size: int) -> Iterator[None]:
    """Let this process have so many more bytes of the GPU, or of its address space, and no more, in the block.

    Only there, so that what tells of a refusal, and what talks to other ranks, has the room that it needs.
    """
    if torch.get_default_device().type == "cuda":
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + min(size, free)) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    torch.ones(16 * MIB // 4).mean()  # starts torch's threads, whose stacks and heaps would take from the room
    process, before = psutil.Process(), resource.getrlimit(resource.RLIMIT_AS)
    try:
        # Half of the room is too little for a block that malloc does not have, and enough for Python's objects.
        resource.setrlimit(resource.RLIMIT_AS, (process.memory_info().vms + size // 2, before[1]))
        _taken.extend(_kept_by_malloc(size))
        resource.setrlimit(resource.RLIMIT_AS, (process.memory_info().vms + size, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


_taken: list[Tensor] = []


def _kept_by_malloc(size: int) -> Iterator[Tensor]:
    """Blocks that malloc has of what was freed before the fork: it gives them without asking the system for room."""
    with contextlib.suppress(RuntimeError):  # the first that it would have to ask for is the last
        while True:
            yield torch.empty(size, dtype=torch.uint8)


def full_disk(folder: Path) -> str:
    if dist.get_rank() == 0:
        _fill_disk()
        torch.save(torch.ones(MIB), folder / "step-2.pt")
    dist.barrier()
    return "saved"


def failure_is_told_to_all(folder: Path) -> str:
    trouble: list[str | None] = [None]
    if dist.get_rank() == 0:
        torch.save(torch.ones(4), folder / "step-1.pt")
        _fill_disk()
        try:
            torch.save(torch.ones(MIB), folder / "writing")
            os.replace(folder / "writing", folder / "step-2.pt")
        except (OSError, RuntimeError) as error:
            trouble = [f"step 2 was not saved: {str(error).splitlines()[0]}"]
            (folder / "writing").unlink(missing_ok=True)
    dist.broadcast_object_list(trouble, src=0)
    newest = max(folder.glob("step-*.pt"))
    saved = torch.load(newest, map_location="cpu", weights_only=True)
    return f"{newest.name} holds {int(saved.sum())}; {trouble[0]}"


def _fill_disk() -> None:
    """No file of this process may grow beyond 100 kB: the write fails as it does where no block is left."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
