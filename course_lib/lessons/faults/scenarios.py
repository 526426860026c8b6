"""Ten faults that stop a training, each with its cure; `lab` runs them on real ranks.

Every function here runs on each rank, in a group over gloo, unless its docstring says that it joins the group itself.
``folder`` is the run's own. The fault is always rank 1's; in the pipeline rank 0 waits for it and it for rank 0.

On GPUs they run over NCCL, with tensors on the rank's GPU by default. There a collective returns before it is done, so
what counts as a step asks for its sum's value, which waits.
"""

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, TensorDataset

CULPRIT = 1
STEPS = 4
PATIENCE = timedelta(seconds=1)
"""What a lesson can wait for a rank that does not come."""


def is_culprit() -> bool:
    return int(os.environ["RANK"]) == CULPRIT


# --- collectives that do not fit together -----------------------------------------------------------------------------


def mismatched_collectives(folder: Path) -> float:
    norm = torch.ones(4)
    if is_culprit():
        dist.broadcast(norm, src=0)
    else:
        dist.all_reduce(norm)
    return norm[0].item()


def matching_collectives(folder: Path) -> float:
    norm = torch.ones(4)
    dist.all_reduce(norm)
    return norm[0].item()


def skipped_step(folder: Path) -> list[float]:
    sums = []
    for step in range(STEPS):
        if is_culprit() and step == 2:
            continue  # "this batch looked odd"
        gradient = torch.full((2,), float(step))
        dist.all_reduce(gradient)
        sums.append(gradient[0].item())
    return sums


def step_with_nothing_to_add(folder: Path) -> list[float]:
    sums = []
    for step in range(STEPS):
        gradient = torch.full((2,), float(step))
        if is_culprit() and step == 2:
            gradient.zero_()  # left out of the sum, and still there to make it
        dist.all_reduce(gradient)
        sums.append(gradient[0].item())
    return sums


def _token_losses() -> Tensor:
    """One number per token of this rank's batch, padded to the longest of its own texts."""
    return torch.ones(6 if is_culprit() else 4)


def different_shapes(folder: Path) -> float:
    losses = _token_losses()
    dist.all_reduce(losses)
    return losses.sum().item()


def padded_to_the_longest(folder: Path) -> float:
    losses = _token_losses()
    longest = torch.tensor(len(losses))
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    losses = pad(losses, (0, int(longest) - len(losses)))
    dist.all_reduce(losses)
    return losses.sum().item()


def different_dtypes(folder: Path) -> float:
    tokens = torch.tensor([128], dtype=torch.int32) if is_culprit() else torch.tensor([128.0])
    dist.all_reduce(tokens)
    return tokens.item()


def one_dtype(folder: Path) -> float:
    tokens = torch.tensor([128], dtype=torch.int32) if is_culprit() else torch.tensor([128.0])
    tokens = tokens.float()
    dist.all_reduce(tokens)
    return tokens.item()


def _loader() -> DataLoader:
    """Batches of two rows, of which the culprit has two rows less."""
    return DataLoader(TensorDataset(torch.arange(6.0 if is_culprit() else 8.0)), batch_size=2)


def shorter_loader(folder: Path) -> int:
    steps = 0
    for (batch,) in _loader():
        gradient = batch.sum()
        dist.all_reduce(gradient)
        gradient.item()
        steps += 1
    return steps


def barrier_before_each_step(folder: Path) -> int:
    steps, hosts = 0, _hosts()
    for (batch,) in _loader():
        dist.monitored_barrier(hosts, timeout=PATIENCE, wait_all_ranks=True)
        gradient = batch.sum()
        dist.all_reduce(gradient)
        gradient.item()
        steps += 1
    return steps


def _hosts() -> dist.ProcessGroup | None:
    """A group over gloo, which alone has such a barrier; None where the default one is."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def as_many_as_the_shortest(folder: Path) -> int:
    steps, loader = 0, _loader()
    batches = torch.tensor(len(loader))
    dist.all_reduce(batches, dist.ReduceOp.MIN)
    for (batch,) in itertools.islice(loader, int(batches)):
        gradient = batch.sum()
        dist.all_reduce(gradient)
        gradient.item()
        steps += 1
    return steps


def deadlocked_pipeline(folder: Path) -> list[float]:
    """Each stage sends to its neighbours, activations one way and gradients the other, and then receives."""
    rank, neighbours = dist.get_rank(), _neighbours()
    received = [torch.zeros(4) for _ in neighbours]
    for neighbour in neighbours:
        dist.send(torch.full((4,), float(rank)), neighbour)
    for neighbour, tensor in zip(neighbours, received, strict=True):
        dist.recv(tensor, neighbour)
    return [tensor[0].item() for tensor in received]


def sends_and_receives_at_once(folder: Path) -> list[float]:
    rank, neighbours = dist.get_rank(), _neighbours()
    received = [torch.zeros(4) for _ in neighbours]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((4,), float(rank)), neighbour) for neighbour in neighbours]
        + [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in zip(neighbours, received, strict=True)]
    )
    for work in works:
        work.wait()
    return [tensor[0].item() for tensor in received]


def _neighbours() -> list[int]:
    rank = dist.get_rank()
    return [other for other in (rank - 1, rank + 1) if 0 <= other < dist.get_world_size()]


# --- ranks that are gone or never come --------------------------------------------------------------------------------


def dead_rank(folder: Path) -> int:
    return _train_on(folder, lambda step: os.kill(os.getpid(), signal.SIGKILL))


def restarted_from_the_last_step(folder: Path) -> int:
    """The same fault, once: the second start finds where the first one ended."""

    def dies_once(step: int) -> None:
        if not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return _train_on(folder, dies_once)


def _train_on(folder: Path, fault: Callable[[int], None]) -> int:
    """Steps done by this start; rank 0 writes down each step that is over."""
    done = folder / "step"
    first = int(done.read_text()) if done.exists() else 0
    for step in range(first, STEPS):
        if is_culprit() and step == 2:
            fault(step)
        gradient = torch.ones(2)
        dist.all_reduce(gradient)
        gradient.tolist()
        if dist.get_rank() == 0:
            done.write_text(str(step + 1))
        dist.barrier()  # else rank 0 may be ended, as all are after the next step's death, before it has written
    return STEPS - first


def stopped_rank(folder: Path) -> list[float]:
    return _stop_in_step_2(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def stopped_rank_is_woken(folder: Path) -> list[float]:
    def stop_and_be_woken() -> None:
        # Until this process is gone: on a busy machine the first call may come before the stop.
        subprocess.Popen(["sh", "-c", f"while sleep 0.2; do kill -CONT {os.getpid()} || exit; done 2>/dev/null"])
        os.kill(os.getpid(), signal.SIGSTOP)

    return _stop_in_step_2(stop_and_be_woken)


def _stop_in_step_2(stop: Callable[[], None]) -> list[float]:
    sums = []
    for step in range(STEPS):
        time.sleep(0.15)  # a step's work
        if is_culprit() and step == 2:
            stop()
        gradient = torch.full((2,), float(step))
        dist.all_reduce(gradient)
        sums.append(gradient[0].item())
    return sums


def wrong_port(folder: Path) -> int:
    """Joins the group itself."""
    if is_culprit():
        os.environ["MASTER_PORT"] = "1"
    dist.init_process_group("gloo", timeout=PATIENCE)
    return dist.get_world_size()


def wrong_address(folder: Path) -> int:
    """The culprit looks for rank 0 at an address that nobody has: RFC 5737 keeps it for documentation."""
    if is_culprit():
        os.environ["MASTER_ADDR"] = "192.0.2.1"
    dist.init_process_group("gloo", timeout=PATIENCE)
    return dist.get_world_size()


def one_place_to_meet(folder: Path) -> int:
    """Joins the group itself."""
    dist.init_process_group("gloo")
    return dist.get_world_size()
