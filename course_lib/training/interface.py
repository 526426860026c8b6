"""What each trainer says for itself: how it connects, prepares, steps, joins its processes and keeps its tensors."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib.training.checkpoints import formats, safetensors_tree
from course_lib.training.precision import autocast


class TrainerInterface:
    """What :class:`~course_lib.training.frame.TrainerFrame` calls; where a method has a body, it is one process's."""

    rank: int
    num_processes: int
    is_main: bool
    device: torch.device
    precision: str
    model: nn.Module
    optimizer: Optimizer

    def connect(self) -> None:
        """Set rank, num_processes, is_main and device."""
        raise NotImplementedError

    @property
    def data_ranks(self) -> int:
        """How many share the rows of a global batch: all processes, but where several work on the same rows."""
        return self.num_processes

    def take_part(self, model: nn.Module) -> nn.Module:
        """The part of the model that this process trains: all of it, but in a pipeline."""
        return model

    scores: Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]] | None = None
    """In evaluation, what to call in the model's place; see :func:`evaluate_split`."""

    def describe(self) -> Mapping[str, Any]:
        """What else belongs into the run's summary."""
        return {}

    def prepare(self) -> None:
        """Wrap model, optimizer and loaders as the engine wants them."""
        raise NotImplementedError

    def train_epoch(self) -> None:
        """Step to the end of the epoch or of the run, calling :meth:`after_step` after each."""
        raise NotImplementedError

    def settle(self) -> None:
        """Bring the learning rate up to the last step, where that was put off."""
        raise NotImplementedError

    def gather(self, tensors: Any) -> Any:
        """All processes' rows of an evaluation batch, without the repeated ones."""
        raise NotImplementedError

    def sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the processes."""
        raise NotImplementedError

    def gather_objects(self, value: Any) -> list[Any]:
        """A plain value of every process, by rank."""
        raise NotImplementedError

    def from_main(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The main rank's tensors by name, on the CPU of every rank. A collective call."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait for all processes."""
        raise NotImplementedError

    def autocast(self) -> AbstractContextManager:
        """What a forward pass runs under."""
        return autocast(self.precision, self.device)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The model's state dict, whole, on the main rank; elsewhere perhaps nothing. A collective call."""
        return self.model.state_dict()

    def load_whole_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Put whole weights in, the same on every rank. A collective call."""
        self.model.load_state_dict(weights)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every tensor of the model's state dict."""
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    def write_whole_tensors(self, folder: Path) -> None:
        """Store what every rank holds alike; called on the main rank."""
        safetensors_tree.save(self.model.state_dict(), folder / formats.MODEL)
        safetensors_tree.save(self.optimizer.state_dict(), folder / formats.OPTIMIZER)

    def check_tensors(self, folder: Path) -> None:
        """Refuse a checkpoint of another model or optimizer before anything is changed."""
        if not formats.is_sharded(folder):
            formats.check_model(safetensors_tree.load(folder / formats.MODEL), self.shapes(), folder)
            formats.check_optimizer(safetensors_tree.load(folder / formats.OPTIMIZER), self.optimizer, folder)

    def read_tensors(self, folder: Path) -> None:
        """Fill model and optimizer from a checkpoint. A collective call."""
        formats.read_into_whole(self.model, self.optimizer, folder, self.shapes())

    @property
    def engine_name(self) -> str:
        """Whose state :meth:`engine_state` is."""
        return "torch"

    def engine_state(self) -> dict[str, Any]:
        """What the engine has to remember in a checkpoint."""
        raise NotImplementedError

    def load_engine_state(self, state: dict[str, Any]) -> None:
        """Put :meth:`engine_state` back."""
        raise NotImplementedError

    def asked_to_stop(self, waited: bool) -> int:
        """Exit code to end with where a process was asked to stop, else 0; all processes give the same answer.

        On several GPUs it is known one step later than on CPUs, where it was not worth waiting for.

        Args:
            waited: the device has done all that was queued, on every process.
        """
        raise NotImplementedError

    def checkpoints_written(self) -> None:
        """Wait for checkpoints that are still being written. A collective call."""

    def let_checkpoints_end(self) -> None:
        """Let what this rank still writes of a checkpoint end, also where other ranks fail."""
