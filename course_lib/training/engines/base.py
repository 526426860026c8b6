"""What the trainer asks of every engine, and what all that Accelerate joins do alike."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DataLoaderConfiguration, broadcast, gather_object
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from course_lib.config import Config
from course_lib.errors import ConfigError, LaunchError
from course_lib.launching import ended_groups, launch_environment
from course_lib.modeling.context import ContextParallel, WholeSequences
from course_lib.parallel.sharding import Shard
from course_lib.parallel.topology import AxisGroups, Coordinates, RankGrid
from course_lib.training.engines import process_group
from course_lib.training.loss import loss_of_rows
from course_lib.training.precision import autocast, make_accelerator, pick_device, pick_precision
from course_lib.training.unused_parameters import may_leave_out
from course_lib.training.votes import Votes


class Engine:
    """What stands between the trainer's loop and the ranks.

    An engine says how the model is wrapped, how a loss becomes gradients, how they are clipped and applied, and what
    of the state lies on this rank. Where a method of the step has no body, each engine has its own.

    Attributes:
        accelerator: joins the ranks; made by :meth:`connect`.
        grid: the ranks by axis: data, pipeline, tensor parallelism.
        place: of this rank in it.
        rank: of this process, from 0.
        num_processes: ranks.
        is_main: whether this is rank 0.
        device: of this rank.
        precision: ``no``, ``fp16`` or ``bf16``.
        model: the bare model.
        wrapped: what the forward pass calls.
        sequences: which tokens of a batch this rank computes.
        optimizer: the torch optimizer whose groups the learning-rate schedule moves.
        shards_state: whether a rank holds only a part, so that checkpoints are written in pieces.
        casts: whether the engine itself computes in the low precision, parameters and activations: autocast besides
            would give float32 between the matrix products, and cast at each of them.
    """

    shards_state = False
    needs_group = False
    """Whether one process, too, has to have a process group."""
    casts = False
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

    grid, place = RankGrid(), Coordinates(0, 0, 0)
    groups: AxisGroups
    """This rank's group along each axis, where there is more than one."""
    gradient_group: dist.ProcessGroup | None = None
    """The ranks whose gradients are of the same parameters, from other rows or other tokens; None: all there are."""
    copy_group: dist.ProcessGroup | None = None
    """The ranks that hold a whole model among them but for what they share with others of their ``groups.tp``."""
    layer_group: dist.ProcessGroup
    """The ranks that hold the same layers, or shards and pieces of them."""
    accelerator: Accelerator
    rank: int
    num_processes: int
    is_main: bool
    device: torch.device
    precision: str
    model: nn.Module
    wrapped: nn.Module
    optimizer: Optimizer
    frozen: frozenset[str] = frozenset()
    """Names in the state dict of what no file of the run holds: the frozen weights beside adapters."""

    def __init__(self, config: Config):
        self.config, self.strategy = config, config.parallel.strategy
        self.sequences: WholeSequences | ContextParallel = WholeSequences(config.data.task)

    # --- before training ---

    def connect(self) -> None:
        """Join the ranks.

        Raises:
            ConfigError: this machine cannot run the engine; the reason, and what to do.
            LaunchError: there are other ranks than the config says.
        """
        run = self.config.run
        device = pick_device(run.device)
        if device.type == "cuda":
            process_group.use_own_gpu()
        self.precision = pick_precision(run.mixed_precision, device)
        self.refuse(device, self.precision)
        with self.environment(), process_group.group_of_one() if self.needs_group else contextlib.nullcontext():
            options = {"cpu": device.type == "cpu"} | self.plugins(device, self.precision)
            options["kwargs_handlers"] = [
                process_group.process_group(device, self.config.guard.watchdog),
                *options.get("kwargs_handlers", ()),
            ]
            self.accelerator = make_accelerator(
                self.precision, **options, dataloader_config=DataLoaderConfiguration(non_blocking=True)
            )
        self.device, self.rank = self.accelerator.device, self.accelerator.process_index
        self.num_processes, self.is_main = self.accelerator.num_processes, self.accelerator.is_main_process
        here = launch_environment.discover()
        wanted = here.world_size if here.elastic else run.num_processes or here.world_size
        if self.num_processes != wanted:
            raise LaunchError(
                f"Accelerate joined {self.num_processes} processes, not {wanted}",
                "start with `course train --num_processes N`, which starts the ranks itself",
            )
        self.votes = Votes(self.device)
        self.grid = self.make_grid()
        self.place = self.grid.coordinates(self.rank)
        if self.has_schedule or self.data_ranks < self.num_processes:
            self.groups, rows = self.grid.groups(), ("dp", "cp") if self.grid.cp > 1 else ("dp",)
            self.gradient_group = self.grid.new_group(*rows) if self.grid.cp > 1 else self.groups.dp
            self.copy_group, self.layer_group = self.grid.new_group("pp", *rows), self.grid.new_group("tp", *rows)

    def make_grid(self) -> RankGrid:
        """The ranks by axis."""
        parallel = self.config.parallel
        return RankGrid.over(
            self.num_processes, pp=1, tp=parallel.tensor_parallel_size, cp=parallel.context_parallel_size
        )

    def refuse(self, device: torch.device, precision: str) -> None:
        """Raise ConfigError for what the engine cannot do on that device."""
        if self.config.parallel.offload != "none" and device.type == "cpu":
            raise ConfigError("offload moves state off a GPU, and this run is on the CPU", "use --offload none")

    def environment(self) -> AbstractContextManager[None]:
        """Environment variables that the accelerator is made under."""
        return contextlib.nullcontext()

    def plugins(self, device: torch.device, precision: str) -> dict[str, Any]:
        """Further arguments of the accelerator."""
        return {}

    @property
    def data_ranks(self) -> int:
        """How many share the rows of a global batch: all processes, but where several work on the same rows."""
        return self.grid.dp

    @property
    def gradient_ranks(self) -> int:
        """How many add up the gradients of a parameter: those with other rows, or other tokens of the same rows."""
        return self.grid.dp * self.grid.cp

    @property
    def part(self) -> int:
        """A number for the part of the model that this rank holds, other on ranks that hold other parts."""
        return self.place.pp * self.grid.tp + self.place.tp

    @property
    def random_stream(self) -> int:
        """A number for the random stream of this rank: ranks that share layers draw the same dropout masks."""
        return self.rank // self.grid.tp

    def split_layers(self, model: nn.Module) -> None:
        """Keep this rank's pieces of matrices that several ranks share; in place."""

    def take_part(self, model: nn.Module) -> nn.Module:
        """The part of the model that this process trains: all of it, but in a pipeline."""
        return model

    def examine(self, model: nn.Module) -> None:
        """Look at this process's part of the model, on its device, before it is compiled and wrapped."""
        if self.by_ddp:
            asked = self.config.parallel.ddp_find_unused_parameters
            self.finds_unused = (self.num_processes > 1 and may_leave_out(model)) if asked is None else asked

    def share_tokens(self, model: nn.Module) -> None:
        """Let the ranks of ``groups.cp`` share the tokens of each row, and replace the model's attention accordingly.

        Raises:
            ConfigError: attention that cannot be shared so.
            ModelError: attention that is not known.
        """
        if self.grid.cp > 1:
            assert self.groups.cp is not None
            parallel = self.config.parallel
            self.sequences = ContextParallel(
                model, self.config.data.task, self.groups.cp, parallel.context_parallel, self.grid.tp
            )
            self.scores = self.scores_of_shared_rows

    def scores_of_shared_rows(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Of a batch whose tokens several ranks share, what metrics are made of: alike on these ranks."""
        inputs, labels = self.sequences.cut(batch)
        losses = loss_of_rows(self.wrapped(**inputs).logits, labels, self.sequences.scored_as)
        dist.all_reduce(losses, group=self.groups.cp)
        return (losses,)

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Take the model, on its device, and its optimizer, which has made no step."""
        raise NotImplementedError

    def deal(self, loader: Any) -> Any:
        """A loader of all ranks' batches as one of this rank's, on its device; ranks of one dp place get the same."""
        if isinstance(loader.dataset, IterableDataset):  # a stream has dealt its rows already
            return prepare_data_loader(
                loader,
                self.device,
                num_processes=1,
                process_index=0,
                put_on_device=True,
                rng_types=[],
                dispatch_batches=False,
                non_blocking=True,
            )
        if self.data_ranks == self.num_processes:
            return self.accelerator.prepare_data_loader(loader)
        return prepare_data_loader(
            loader,
            self.device,
            num_processes=self.data_ranks,
            process_index=self.place.dp,
            put_on_device=True,
            rng_types=[],
            non_blocking=True,
        )

    def to_device(self, batch: Any) -> Any:
        """A batch of a dealt loader, on the device."""
        return batch

    # --- one step ---

    def counted_once(self, own: torch.Tensor) -> torch.Tensor:
        """A number of this rank's rows, for a sum over all ranks: zero where an earlier rank has the same rows."""
        return torch.zeros_like(own) if any(self.place[1:]) else own

    def own_part(self, loss: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum of all ranks' losses: nothing where another one has the same rows' loss."""
        return loss if self.place.tp == 0 else torch.zeros_like(loss)

    def autocast(self) -> AbstractContextManager:
        """What the forward pass runs under."""
        return autocast("no" if self.casts else self.precision, self.device)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch. Gradients that every rank keeps whole travel with the last
        alone; those of which it keeps a piece are reduced with each."""
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

    def votes_to_stop(self, own: int, summed: torch.Tensor, waited: bool) -> int:
        """Sum of the ranks' votes to stop, the same on all.

        On several GPUs it is known one step later than on CPUs, where it was not worth waiting for.

        Args:
            own: this rank's.
            summed: over the ranks, with the targets of the step before this call.
            waited: the device has done all that was queued, on every process.
        """
        self.votes.cast(summed)
        return self.votes.counted(waited)

    # --- what the ranks say to each other ---

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

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the processes."""
        return self.accelerator.reduce(tensor, "sum")

    def gather_objects(self, value: Any) -> list[Any]:
        """A plain value of every process, by rank."""
        return gather_object([value])

    def from_main(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The main rank's tensors by name, on the CPU of every rank. A collective call."""
        about = self.gather_objects({name: (each.shape, each.dtype) for name, each in tensors.items()})[0]
        received = {}
        for name, (shape, dtype) in about.items():
            room = tensors[name] if self.is_main else torch.empty(shape, dtype=dtype)
            received[name] = broadcast(room.to(self.device)).cpu()
        return received

    def barrier(self) -> None:
        """Wait for all processes."""
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """End the ranks' part of the run that they make together."""
        self.accelerator.wait_for_everyone()
        with ended_groups.kept():  # the wrapped model is freed later
            self.accelerator.state.destroy_process_group()  # not end_training(): trackers have yet to get the model

    # --- what is kept ---

    @property
    def name(self) -> str:
        """Whose state :meth:`state` is."""
        return self.config.parallel.chosen_engine

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold beside model, optimizer and schedule."""
        return {"scaler": {}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Put :meth:`state` back."""

    def agreed(self) -> AbstractContextManager[None]:
        """Within it every rank has the weights that all agree on; where they train apart, a collective call."""
        return contextlib.nullcontext()

    def rank_state(self) -> dict[str, Any]:
        """What a checkpoint has to hold of this rank alone; a collective call."""
        return {}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Put :meth:`rank_state` back, after all else; empty where a checkpoint has none for these ranks."""

    def describe(self) -> Mapping[str, Any]:
        """What else belongs into the run's summary."""
        return {}

    def tensors(self) -> dict[str, Shard]:
        """This rank's pieces of all that a checkpoint stores in pieces; see :class:`ShardedEngine`."""
        raise NotImplementedError

    def bare_model(self) -> nn.Module:
        """The model without what was wrapped around it; its weights may be elsewhere."""
        return self.model

    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that this rank computes with, by their names in the whole model."""
        return dict(self.model.named_parameters())

    def parameters_by_part(self) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """:meth:`parameters` in sets, each with a number that is the same on the ranks that hold the same set."""
        return [(self.part, self.parameters())]

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The model's state dict, whole but for ``frozen``, on the main rank; elsewhere nothing. A collective call."""
        return self.stored_weights() if self.is_main else {}

    def load_whole_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put whole weights in, the same on every rank. A collective call."""
        held = {name: tensor for name, tensor in self.model.state_dict().items() if name in self.frozen}
        self.model.load_state_dict(held | dict(weights))

    def stored_weights(self) -> dict[str, torch.Tensor]:
        """Of the model's state dict on this rank, what a file of the run holds: all, but for ``frozen``."""
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in self.frozen}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every tensor that a file of the run holds."""
        return {name: tuple(tensor.shape) for name, tensor in self.stored_weights().items()}
