"""Engine interface, with defaults for engines launched by Accelerate."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.optim import Optimizer

from course_lib.config import Config, combinations, flatten
from course_lib.errors import LaunchError
from course_lib.launching import launch_environment
from course_lib.modeling.context import ContextParallel
from course_lib.modeling.inputs import WholeSequences
from course_lib.parallel.blocks import blocks
from course_lib.parallel.topology import RankGrid
from course_lib.training.checkpoints.stored_state import StoredState
from course_lib.training.engines import process_group
from course_lib.training.loss import loss_of_rows
from course_lib.training.precision import autocast, make_accelerator, pick_device, pick_precision
from course_lib.training.ranks import Ranks
from course_lib.training.unused_parameters import may_leave_out


class StepEngine:
    """Makes one optimizer step on the ranks: wraps the model, carries the gradients, clips them, updates.

    ``StepEngine.start(config)`` joins the ranks first. Where a method of the step has no body, each engine has its own.

    Args:
        config: the run.
        ranks: have joined.

    Attributes:
        model: the bare model, or this rank's part of it.
        wrapped: what the forward pass calls.
        sequences: which tokens of a batch this rank computes.
        optimizer: the torch optimizer whose groups the learning-rate schedule moves.
        stored: model and optimizer as files hold them.
        name: by which a checkpoint says whose extra state it holds.
    """

    stored_class: type[StoredState] = StoredState
    """Class of :attr:`stored`."""
    needs_group = False
    """Whether one process, too, has to have a process group."""
    has_schedule = False
    """Whether ``run_schedule`` takes the place of forward and backward."""
    step_was_skipped = False
    """Whether the last step found an overflow under fp16 and left the weights alone."""
    knows_at_once = True
    """Whether ``step_was_skipped`` answers without waiting for the GPU."""
    trains_apart = False
    """Whether weights are different on each rank between the steps at which the ranks agree."""
    by_ddp = False
    """Whether gradients are summed by DDP, torch's or the course's own."""
    finds_unused = False
    """Whether DDP looks for parameters that the loss does not use, see :meth:`examine`."""
    scores: Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]] | None = None
    """In evaluation, what to call in the model's place; see :func:`course_lib.training.evaluation.evaluate_split`."""

    model: nn.Module
    wrapped: Any
    optimizer: Optimizer
    stored: StoredState

    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.strategy, self.ranks = config, config.parallel.strategy, ranks
        self.name: str = config.parallel.chosen_engine
        self.device, self.precision = ranks.device, ranks.precision
        self.sequences: WholeSequences | ContextParallel = WholeSequences(config.data.task)

    # --- joining the ranks ---

    @classmethod
    def start(cls, config: Config) -> Self:
        """Join the ranks.

        Raises:
            ConfigError: this machine cannot run the engine; the reason, and what to do.
            LaunchError: there are other ranks than the config says.
        """
        device = pick_device(config.run.device)
        if device.type == "cuda":
            process_group.use_own_gpu()
        precision = pick_precision(config.run.mixed_precision, device)
        cls.refuse(config, device, precision)
        with cls.environment(), process_group.group_of_one() if cls.needs_group else contextlib.nullcontext():
            options = {"cpu": device.type == "cpu"} | cls.plugins(config, device, precision)
            options["kwargs_handlers"] = [
                process_group.process_group(device, config.guard.watchdog),
                *options.get("kwargs_handlers", ()),
            ]
            accelerator = make_accelerator(
                precision, **options, dataloader_config=DataLoaderConfiguration(non_blocking=True)
            )
        here, joined = launch_environment.discover(), accelerator.num_processes
        wanted = here.world_size if here.elastic else config.run.num_processes or here.world_size
        if joined != wanted:
            raise LaunchError(
                f"Accelerate joined {joined} processes, not {wanted}",
                "start with `course train --num_processes N`, which starts the ranks itself",
            )
        return cls(config, Ranks(accelerator, cls.make_grid(config, joined), precision, cls.has_schedule))

    @classmethod
    def refuse(cls, config: Config, device: torch.device, precision: str) -> None:
        """Raise ConfigError for what the engine cannot do on that device, which the config may have left open."""
        here = {"device": device.type, "mixed_precision": precision, "engine": config.parallel.chosen_engine}
        combinations.check(flatten(config) | here)

    @classmethod
    def environment(cls) -> AbstractContextManager[None]:
        """Environment variables that the accelerator is made under."""
        return contextlib.nullcontext()

    @classmethod
    def plugins(cls, config: Config, device: torch.device, precision: str) -> dict[str, Any]:
        """Further arguments of the accelerator."""
        return {}

    @classmethod
    def make_grid(cls, config: Config, processes: int) -> RankGrid:
        """The ranks by axis."""
        parallel = config.parallel
        return RankGrid.over(processes, pp=1, tp=parallel.tensor_parallel_size, cp=parallel.context_parallel_size)

    # --- composing the model; see :func:`course_lib.training.engines.compose.compose` ---

    def split_layers(self, model: nn.Module) -> None:
        """Keep this rank's shards of matrices that several ranks share; in place."""

    def take_part(self, model: nn.Module) -> nn.Module:
        """The part of the model that this process trains: all of it, but in a pipeline."""
        return model

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks of this process's part of the model.

        Raises:
            ConfigError: the model has none.
        """
        return list(blocks(self.model).values())

    def examine(self, model: nn.Module) -> None:
        """Look at this process's part of the model, on its device, before it is compiled and wrapped."""
        if self.by_ddp:
            asked = self.config.parallel.ddp_find_unused_parameters
            self.finds_unused = (self.ranks.num_processes > 1 and may_leave_out(model)) if asked is None else asked

    def share_tokens(self, model: nn.Module) -> None:
        """Let the ranks of ``groups.cp`` share the tokens of each row, and replace the model's attention accordingly.

        Raises:
            ConfigError: attention that cannot be shared so.
            ModelError: attention that is not known.
        """
        grid = self.ranks.grid
        if grid.cp > 1:
            group, way = self.ranks.groups.cp, self.config.parallel.context_parallel
            assert group is not None
            self.sequences = ContextParallel(model, self.config.data.task, group, way, grid.tp)
            self.scores = self._scores_of_shared_rows

    def _scores_of_shared_rows(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Of a batch whose tokens several ranks share, what metrics are made of: alike on these ranks."""
        inputs, labels = self.sequences.cut(batch)
        losses = loss_of_rows(self.wrapped(**inputs).logits, labels, self.sequences.scored_as)
        dist.all_reduce(losses, group=self.ranks.groups.cp)
        return (losses,)

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Take the model, on its device, and its optimizer, which has made no step."""
        raise NotImplementedError

    def score_with(self, model: nn.Module) -> None:
        """Take the model, on its device, to evaluate it and no more."""
        self.wrapped = model

    # --- one step ---

    def autocast(self) -> AbstractContextManager:
        """Context of the forward pass: matrix products in the low precision.

        It must be empty where the engine itself computes in that, parameters and activations: autocast would upcast
        between matmuls, and cast at each of them.
        """
        return autocast(self.precision, self.device)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch. Gradients that every rank keeps whole travel with the last
        alone; those of which it keeps a shard are reduced with each."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of this rank's share of a loss, which is the sum of all ranks' shares."""
        raise NotImplementedError

    def run_schedule(self, batch: Mapping[str, torch.Tensor], share: torch.Tensor) -> torch.Tensor:
        """Forward and backward of a batch through the stages of a pipeline.

        Args:
            batch: of this rank's pipeline.
            share: what the summed loss is multiplied by.
        Returns:
            This rank's part of the loss.
        """
        raise NotImplementedError

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to a global L2 norm; gives the norm before."""
        raise NotImplementedError

    def update(self) -> None:
        """Let the optimizer make its step."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Forget the gradients."""
        raise NotImplementedError

    # --- the run ---

    def describe(self) -> Mapping[str, Any]:
        """Entries that the engine adds to the run's summary."""
        return {}

    def close(self) -> None:
        """End the ranks' part of the run that they make together."""
        self.ranks.close()
