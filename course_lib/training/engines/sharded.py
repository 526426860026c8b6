"""What engines share whose optimizer updates one tensor per parameter, a piece of it: checkpoints, whole weights."""

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from course_lib.errors import CheckpointError, ConfigError
from course_lib.parallel.clipping import scale_down_, sum_of_squares
from course_lib.parallel.sharding import Shard, gather_whole, names_of, scatter_whole
from course_lib.parallel.tensor_parallel import ParameterSplit
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.parallel.zero import Zero1
from course_lib.training.checkpoints import sharded
from course_lib.training.checkpoints.formats import device_of_step
from course_lib.training.checkpoints.tensor_shards import as_runs, enclosing
from course_lib.training.engines.base import Engine


class ShardedEngine(Engine):
    """Checkpoints and whole weights from pieces; a subclass gives ``pieces``, ``refresh`` and the step."""

    shards_state = needs_group = True

    def refuse(self, device: torch.device, precision: str) -> None:
        super().refuse(device, precision)
        if precision == "fp16" and self.config.parallel.chosen_engine != "deepspeed":
            raise ConfigError(
                f"fp16 needs a scaler that knows the shards of {self.strategy}",
                "use --mixed_precision bf16, or --engine deepspeed",
            )

    trained_names: list[str]
    """Names of the trained parameters, in the order of the optimizer's groups."""

    def pieces(self) -> dict[str, Shard]:
        """This rank's piece of every parameter, by name, whose data may be overwritten."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Bring the new contents of the pieces to where forward pass and optimizer read them. A collective call."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Shard]:
        """This rank's pieces of all that a checkpoint stores in pieces, as runs of the whole tensors; collective."""
        own = {f"model/{name}": piece for name, piece in self.stored(self.stored_pieces()).items()} | {
            f"optimizer/{name}": piece for name, piece in self.stored(self.optimizer_pieces()).items()
        }
        if self.tensor is None:
            return own
        held = self.parameters()  # a pipeline has empty pieces of other stages' parameters, too
        own = {key: piece for key, piece in own.items() if key.split("/")[1] in held}
        group = self.layer_group if self.shards_pieces else self.groups.tp
        return as_runs(own, self.split_of, self.groups.tp, group, self.device)

    def stored_pieces(self) -> dict[str, Shard]:
        """:meth:`pieces` of what a file of the run holds: of all, but for ``frozen``."""
        return {name: piece for name, piece in self.pieces().items() if name not in self.frozen}

    def stored(self, pieces: Mapping[str, Shard], keep_shape: bool = False) -> Mapping[str, Shard]:
        """Of some pieces, by ``name`` or ``name/state``, those that this rank stores."""
        return pieces

    def load_tensors(self, room: Mapping[str, Shard], folder: Path) -> None:
        """Fill pieces, by the names of :meth:`tensors`, from the files of any layout; a collective call."""
        shared = {
            key: enclosing(*found, self.grid.tp, self.place.tp, piece)
            for key, piece in room.items()
            if (found := self.split_of(key))
        }
        sharded.load({**room, **{key: run for key, (run, _) in shared.items()}}, folder)
        for key, (run, index) in shared.items():
            room[key].data.detach().copy_(run.data[index])

    tensor: TensorParallel | None = None
    """Where layers are shared: how."""
    shell: nn.Module | None = None
    """The whole model without its weights, where this rank has pieces of it."""

    def split_layers(self, model: nn.Module) -> None:
        self.model = model
        self.remember()
        parallel, ranks = self.config.parallel, self.grid.tp
        if ranks > 1:
            self.shell = without_weights(model)
            vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator,union-attr]
            self.tensor = TensorParallel(
                model, self.groups.tp, sequence=parallel.sequence_parallel, split_vocabulary=vocabulary % ranks == 0
            )
            self.names = names_of(model)

    def split_of(self, key: str) -> tuple[ParameterSplit, torch.Size] | None:
        """How a parameter, or a state ``parameter/state`` of its shape, is shared; None where it is not."""
        key = key.removeprefix("model/").removeprefix("optimizer/")
        name, _, state = key.partition("/")
        if self.tensor is None or name not in self.tensor.splits or state == "step":
            return None
        return self.tensor.splits[name], self.state_shapes[name]

    @property
    def shards_pieces(self) -> bool:
        """Whether data parallelism leaves a rank a shard of its pieces, rather than all of them."""
        return self.strategy != "ddp"

    def clip_together(
        self, gradients: Mapping[str, torch.Tensor], max_norm: float, copies: Collection[str] = ()
    ) -> torch.Tensor:
        """Scale gradients down to an L2 norm over the whole model; gives the norm before.

        Every element counts once: what tensor-parallel ranks have alike on the first of them, a tied weight's second
        copy not at all, and what all copies of the model have alike in one of them.

        Args:
            gradients: of this rank, by name; shards where data parallelism leaves shards.
            max_norm: to clip to.
            copies: names of second copies.
        """
        counted = [
            gradient
            for name, gradient in gradients.items()
            if name not in copies and (self.place.tp == 0 or self.split_of(name))
        ]
        square = sum_of_squares(counted, self.device)
        for group in (self.groups.tp, self.groups.pp, *([self.gradient_group] if self.shards_pieces else [])):
            if dist.get_world_size(group) > 1:
                dist.all_reduce(square, group=group)
        norm = square.sqrt()
        scale_down_(list(gradients.values()), norm, max_norm)
        return norm

    def remember(self) -> None:
        """Keep names and shapes, and which names are one tied parameter, before the model is sharded."""
        by_identity: dict[int, str] = {}
        self.ties: dict[str, str] = {}
        for name, tensor in self.model.named_parameters(remove_duplicate=False):
            first = by_identity.setdefault(id(tensor), name)
            if first != name:
                self.ties[name] = first
        self.state_shapes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.buffer_names = [
            name for name in self.state_shapes if name not in self.names.values() and name not in self.ties
        ]

    def remember_order(self) -> None:
        """Keep the order in which the optimizer has the parameters, before it is repointed, and let go of them."""
        self.trained_names = [self.names[p] for group in self.optimizer.param_groups for p in group["params"]]
        del self.names  # it would hold every parameter whole, beside the shards that FSDP2 puts in their place

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape in self.state_shapes.items() if name not in self.frozen}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that a state dict holds, the same on every rank."""
        there = dict(self.model.named_buffers())
        return {name: there[name] for name in self.buffer_names}

    def whole_weights(self) -> dict[str, torch.Tensor]:
        whole = gather_whole(self.stored(self.stored_pieces(), keep_shape=True), self.copy_group)
        if self.tensor is not None:  # the first copies of all pieces are on as many ranks
            whole = {
                name: self.tensor.splits[name].whole(each.to(self.device), self.groups.tp).cpu()
                if name in self.tensor.splits
                else each
                for name, each in whole.items()
            }
        if not self.is_main:
            return {}
        whole |= {name: buffer.detach().cpu() for name, buffer in self.buffers().items()}
        return whole | {name: whole[first] for name, first in self.ties.items() if name not in self.frozen}

    def load_whole_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        scatter_whole(self.own_share(weights), self.stored_pieces())
        self.load_buffers(weights)
        self.refresh()

    def own_share(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of whole tensors, by ``name`` or ``name/state``, this rank's pieces of shared layers; others as they are."""
        return {
            key: found[0].piece(tensor, self.groups.tp) if (found := self.split_of(key)) else tensor
            for key, tensor in whole.items()
        }

    def bare_model(self) -> nn.Module:
        return self.model if self.shell is None else self.shell

    def describe(self) -> Mapping[str, Any]:
        if self.tensor is None:
            return {}
        return {
            "tensor": {
                "tensor_parallel_size": self.grid.tp,
                "data_parallel_size": self.grid.dp,
                "sequence_parallel": self.config.parallel.sequence_parallel,
            }
        }

    def load_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy what is no parameter."""
        for name, buffer in self.buffers().items():
            buffer.copy_(values[name])

    def updated(self) -> dict[str, tuple[Shard, torch.Tensor]]:
        """The tensor that the optimizer's state is keyed by, beside its piece, for what is trained here.

        It is the piece's own data, or the parameter where the optimizer updates the model's.
        """
        keys = {id(tensor) for group in self.state_owner.param_groups for tensor in group["params"]}
        parameters, found = self.parameters(), {}
        for name, piece in self.pieces().items():
            tensor = piece.data if id(piece.data) in keys else parameters.get(name)
            if tensor is not None and id(tensor) in keys:
                found[name] = piece, tensor
        return found

    @property
    def state_owner(self) -> Optimizer:
        """The optimizer that holds this rank's state."""
        return self.optimizer

    def optimizer_pieces(self) -> dict[str, Shard]:
        """This rank's piece of every tensor of optimizer state, by ``parameter/state``."""
        found = {}
        for name, (piece, key) in self.updated().items():
            for state, value in sorted(self.state_owner.state.get(key, {}).items()):
                found[f"{name}/{state}"] = self.state_piece(piece, value)
        return found

    def state_piece(self, piece: Shard, value: torch.Tensor) -> Shard:
        """A tensor of state as a piece: like its parameter's, or a number that all ranks share."""
        if value.numel() == piece.data.numel() and value.ndim:
            return Shard(piece.shape, piece.start, value.view(-1))
        return Shard(torch.Size([1]), 0, value.view(1))

    def prepare_optimizer_pieces(self, states: Mapping[str, int]) -> dict[str, Shard]:
        """Room for the optimizer's state before its first step.

        Args:
            states: number of elements by ``parameter/state``, as a checkpoint holds them.
        Raises:
            CheckpointError: state of a parameter that the model does not have.
        """
        trained = self.updated()
        room = {}
        for key, numel in states.items():
            name, state = key.rsplit("/", 1)
            if name not in self.state_shapes:
                raise CheckpointError(
                    f"the checkpoint holds optimizer state of {name}, which this model has not",
                    "give the --model it was trained from",
                )
            if name not in trained:
                continue
            piece, parameter = trained[name]
            # A number, such as Adam's step, is kept by torch as a scalar; what is as long as the parameter is split.
            scalar = numel == 1 and state == "step"
            value = (
                torch.zeros((), device=device_of_step(self.state_owner, parameter))
                if scalar
                else torch.zeros_like(parameter)
            )
            self.state_owner.state[parameter][state] = value
            room[key] = self.state_piece(piece, value)
        return room


def without_weights(model: nn.Module) -> nn.Module:
    """The model with parameters that hold nothing: what is left of it to write it down by."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, empty)  # type: ignore[arg-type]


def gradients_of(zero: Zero1) -> dict[str, torch.Tensor]:
    """The gradients of this rank's shards, by the parameter's name, once they are reduced."""
    zero.reduce()
    return {
        zero.names[parameter]: bucket.gradient[shard_slice]
        for bucket in zero.buckets
        if bucket.gradient is not None
        for parameter, shard_slice in bucket.shard_slices.items()
    }
