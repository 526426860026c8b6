"""The processes of a run: this one's place among them, their groups, and what they say to each other."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import broadcast, gather_object
from torch.utils.data import IterableDataset

from course_lib.data.collating import moved
from course_lib.launching import ended_groups
from course_lib.parallel.topology import AxisGroups, Coordinates, RankGrid
from course_lib.training.votes import Votes


class Ranks:
    """The processes that Accelerate joined.

    Args:
        accelerator: joined them.
        grid: the ranks by axis: data, pipeline, tensor, context parallelism.
        precision: ``no``, ``fp16`` or ``bf16``.
        has_groups: make a group for each axis, also where all processes have other rows.

    Attributes:
        rank: of this process, from 0.
        num_processes: how many there are.
        is_main: whether this is rank 0.
        device: of this rank.
        place: of this rank in the grid.
        groups: this rank's group along each axis, where there is more than one axis.
        gradient_group: the ranks whose gradients are of the same parameters, from other rows or other tokens; None:
            all there are.
        copy_group: ranks that together hold one model copy, for this tensor-parallel position; None: all there are.
        layer_group: the ranks that hold the same layers, or parts of them.
    """

    groups: AxisGroups
    gradient_group: dist.ProcessGroup | None = None
    copy_group: dist.ProcessGroup | None = None
    layer_group: dist.ProcessGroup

    def __init__(self, accelerator: Accelerator, grid: RankGrid, precision: str, has_groups: bool = False):
        self.accelerator, self.grid, self.precision = accelerator, grid, precision
        self.rank, self.num_processes = accelerator.process_index, accelerator.num_processes
        self.device, self.is_main = accelerator.device, accelerator.is_main_process
        self.place: Coordinates = grid.coordinates(self.rank)
        self._votes = Votes(self.device)
        if has_groups or self.data_ranks < self.num_processes:
            self.groups, rows = grid.groups(), ("dp", "cp") if grid.cp > 1 else ("dp",)
            self.gradient_group = grid.new_group(*rows) if grid.cp > 1 else self.groups.dp
            self.copy_group, self.layer_group = grid.new_group("pp", *rows), grid.new_group("tp", *rows)

    # --- who is here ---

    @property
    def data_ranks(self) -> int:
        """Ranks that share the rows of a global batch: all processes, unless several work on the same rows."""
        return self.grid.dp

    @property
    def gradient_ranks(self) -> int:
        """Ranks that add up the gradients of a parameter: those with other rows, or other tokens of the same rows."""
        return self.grid.dp * self.grid.cp

    @property
    def part(self) -> int:
        """Index of the model part this rank holds."""
        return self.place.pp * self.grid.tp + self.place.tp

    @property
    def random_stream(self) -> int:
        """Index of this rank's random stream: ranks that share layers draw the same dropout masks."""
        return self.rank // self.grid.tp

    # --- batches ---

    def deal(self, loader: Any) -> Any:
        """A loader of all ranks' batches as one of this rank's, on its device; ranks of one dp place get the same."""
        dealt: dict[str, Any] = {"put_on_device": True, "rng_types": [], "non_blocking": True}
        if isinstance(loader.dataset, IterableDataset):  # a stream has dealt its rows already
            alone: dict[str, Any] = {"num_processes": 1, "process_index": 0, "dispatch_batches": False}
            return prepare_data_loader(loader, self.device, **alone, **dealt)
        if self.data_ranks == self.num_processes:
            return self.accelerator.prepare_data_loader(loader)
        return prepare_data_loader(
            loader, self.device, num_processes=self.data_ranks, process_index=self.place.dp, **dealt
        )

    def to_device(self, batch: Any) -> Any:
        """A batch of a dealt loader, on the device."""
        return batch

    # --- what the ranks say to each other ---

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the processes."""
        return self.accelerator.reduce(tensor, "sum")

    def counted_once(self, own: torch.Tensor) -> torch.Tensor:
        """A number of this rank's rows, for a sum over all ranks: zero where an earlier rank has the same rows."""
        return torch.zeros_like(own) if any(self.place[1:]) else own

    def own_part(self, loss: torch.Tensor) -> torch.Tensor:
        """This rank's summand of all ranks' losses: zero where an earlier rank has the same rows' loss."""
        return loss if self.place.tp == 0 else torch.zeros_like(loss)

    def gather(self, tensors: Any) -> Any:
        """All processes' rows of an evaluation batch, without the repeated ones."""
        if self.data_ranks == self.num_processes:
            return self.accelerator.gather_for_metrics(tensors)
        gathered = []
        for tensor in tensors:
            parts = [torch.empty_like(tensor) for _ in range(self.data_ranks)]
            dist.all_gather(parts, tensor.contiguous(), group=self.groups.dp)
            gathered.append(torch.cat(parts))
        state = self.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0:
            gathered = [tensor[: state.remainder] for tensor in gathered]
        return tuple(gathered)

    def gather_objects(self, value: Any) -> list[Any]:
        """A plain value of every process, by rank."""
        return gather_object([value])

    def from_main(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The main rank's tensors by name, on the CPU of every rank. A collective call."""
        about = self.gather_objects({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})[0]
        received = {}
        for name, (shape, dtype) in about.items():
            room = tensors[name] if self.is_main else torch.empty(shape, dtype=dtype)
            received[name] = broadcast(room.to(self.device)).cpu()
        return received

    def votes_to_stop(self, own: int, summed: torch.Tensor, waited: bool) -> int:
        """Sum of the ranks' votes to stop, the same on all.

        On several GPUs it is known one step later than on CPUs, where it was not worth waiting for.

        Args:
            own: this rank's.
            summed: over the ranks, with the targets of the step before this call.
            waited: the device has done all that was queued, on every process.
        """
        self._votes.cast(summed)
        return self._votes.counted(waited)

    def barrier(self) -> None:
        """Wait for all processes."""
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """End the ranks' part of the run that they make together."""
        self.accelerator.wait_for_everyone()
        with ended_groups.kept():  # the wrapped model is freed later
            self.accelerator.state.destroy_process_group()  # not end_training(): trackers have yet to get the model


class OneProcess(Ranks):
    """A process by itself, without Accelerate or a process group.

    Args:
        device: of the process.
        precision: ``no``, ``fp16`` or ``bf16``.
    """

    def __init__(self, device: torch.device, precision: str):
        self.grid, self.place, self.device, self.precision = RankGrid(), Coordinates(0, 0, 0), device, precision
        self.rank, self.num_processes, self.is_main = 0, 1, True

    def deal(self, loader: Any) -> Any:
        return loader

    def to_device(self, batch: Any) -> Any:
        return moved(batch, self.device)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, tensors: Any) -> Any:
        return tensors

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def from_main(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors

    def votes_to_stop(self, own: int, summed: torch.Tensor, waited: bool) -> int:
        return own

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
