"""What engines share whose optimizer updates one tensor per parameter, a piece of it: checkpoints, whole weights."""

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from course_lib.errors import CheckpointError, ConfigError
from course_lib.parallel.sharding import Shard, gather_whole, scatter_whole
from course_lib.training.checkpoints.formats import device_of_step
from course_lib.training.engines.base import Engine


class ShardedEngine(Engine):
    """Checkpoints and whole weights from pieces; a subclass gives ``pieces``, ``refresh`` and the step."""

    shards_state = needs_group = True

    def refuse(self, device: torch.device, precision: str) -> None:
        super().refuse(device, precision)
        if precision == "fp16" and self.config.parallel.chosen_engine != "deepspeed":
            raise ConfigError(f"fp16 needs a scaler that knows the shards of {self.strategy}",
                              "use --mixed_precision bf16, or --engine deepspeed")

    trained_names: list[str]
    """Names of the trained parameters, in the order of the optimizer's groups."""

    def pieces(self) -> dict[str, Shard]:
        """This rank's piece of every parameter, by name, whose data may be overwritten."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Bring the new contents of the pieces to where forward pass and optimizer read them. A collective call."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Shard]:
        """This rank's pieces of all that a checkpoint stores in pieces."""
        return ({f"model/{name}": piece for name, piece in self.pieces().items()}
                | {f"optimizer/{name}": piece for name, piece in self.optimizer_pieces().items()})

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
        self.buffer_names = [name for name in self.state_shapes
                             if name not in self.names.values() and name not in self.ties]

    def remember_order(self) -> None:
        """Keep the order in which the optimizer has the parameters, before it is repointed, and let go of them."""
        self.trained_names = [self.names[p] for group in self.optimizer.param_groups for p in group["params"]]
        del self.names  # it would hold every parameter whole, beside the shards that FSDP2 puts in their place

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape in self.state_shapes.items()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that a state dict holds, the same on every rank."""
        there = dict(self.model.named_buffers())
        return {name: there[name] for name in self.buffer_names}

    def whole_weights(self) -> dict[str, torch.Tensor]:
        whole = gather_whole(self.pieces())
        if not self.is_main:
            return {}
        whole |= {name: buffer.detach().cpu() for name, buffer in self.buffers().items()}
        return whole | {name: whole[first] for name, first in self.ties.items()}

    def load_whole_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        scatter_whole(weights, self.pieces())
        self.load_buffers(weights)
        self.refresh()

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
                raise CheckpointError(f"the checkpoint holds optimizer state of {name}, which this model has not",
                                      "give the --model it was trained from")
            if name not in trained:
                continue
            piece, parameter = trained[name]
            # A number, such as Adam's step, is kept by torch as a scalar; what is as long as the parameter is split.
            scalar = numel == 1 and state == "step"
            value = (torch.zeros((), device=device_of_step(self.state_owner, parameter)) if scalar
                     else torch.zeros_like(parameter))
            self.state_owner.state[parameter][state] = value
            room[key] = self.state_piece(piece, value)
        return room
