"""Model and optimizer as a run's files hold them, where a rank has only shards of them."""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib.errors import CheckpointError
from course_lib.modeling.experts import ExpertParallel
from course_lib.parallel.sharding import Shard, gather_whole, local, names_of, scatter_whole
from course_lib.parallel.tensor_parallel import ParameterSplit
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.training.checkpoints import safetensors_tree, sharded
from course_lib.training.checkpoints.formats import (
    BUFFERS,
    MODEL,
    check_model,
    device_of_step,
    is_sharded,
    whole_optimizer_state,
)
from course_lib.training.checkpoints.stored_state import StoredState
from course_lib.training.checkpoints.tensor_shards import as_runs, enclosing
from course_lib.training.ranks import Ranks


class ShardedState(StoredState):
    """Writes and reads this rank's shards; an engine's subclass gives ``own_shards``, and ``refresh`` where it has to.

    Args:
        ranks: of the run.
        model: whole, before anything is split or sharded.
        frozen: see :class:`StoredState`.

    Attributes:
        tensor: how layers are split over tensor-parallel ranks; None where they are whole.
        experts: how experts are spread over ranks; None where every rank has all.
        shell: the whole model without its weights, where this rank has shards of it.
        trained_names: of the trained parameters, in the order of the optimizer's groups.
        state_shapes: whole shape of every tensor of the state dict.
        ties: names of second uses of a tied parameter, with the first.
        names: of the parameters, until the optimizer stands.
    """

    holds_shards = True
    """Whether data parallelism leaves a rank a part of its tensors, rather than all of them."""
    tensor: TensorParallel | None = None
    experts: ExpertParallel | None = None
    shell: nn.Module | None = None
    trained_names: list[str]

    def __init__(self, ranks: Ranks, model: nn.Module, frozen: frozenset[str] = frozenset()):
        super().__init__(ranks, model, frozen)
        by_identity: dict[int, str] = {}
        self.ties: dict[str, str] = {}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            first = by_identity.setdefault(id(tensor), name)
            if first != name:
                self.ties[name] = first
        self.state_shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self.names = names_of(model)
        self.buffer_names = [
            name for name in self.state_shapes if name not in self.names.values() and name not in self.ties
        ]

    def keep_shell(self) -> None:
        """Keep the model's modules, before its layers are split."""
        self.shell = without_weights(self.model)

    def remember_split(self, tensor: TensorParallel | None = None) -> None:
        """Take note of the names again, after layers were split by ``tensor``, or experts spread."""
        self.tensor, self.names = tensor or self.tensor, names_of(self.model)

    def remember_order(self, optimizer: Optimizer) -> None:
        """Keep the order in which the optimizer has the parameters, before it is repointed, and let go of them."""
        self.trained_names = [self.names[p] for group in optimizer.param_groups for p in group["params"]]
        del self.names  # it would hold every parameter whole, beside the shards that FSDP2 puts in their place

    # --- what an engine says ---

    def own_shards(self) -> dict[str, Shard]:
        """This rank's shard of every parameter that it computes with, by name, whose data may be overwritten."""
        raise NotImplementedError

    def shards(self) -> dict[str, Shard]:
        """The same as shards of the whole model's parameters, where experts are of all ranks that share them."""
        own = self.own_shards()
        return {name: self.experts.in_whole(name, shard) for name, shard in own.items()} if self.experts else own

    def parameters_by_part(self) -> list[tuple[int, dict[str, torch.Tensor]]]:
        ((part, parameters),) = super().parameters_by_part()
        if self.experts is None:
            return [(part, parameters)]
        spread = {name: parameters.pop(name) for name in self.experts.shapes}
        return [(part, parameters), (self.experts.place, spread)]

    def refresh(self) -> None:
        """Bring the new contents of the shards to where forward pass and optimizer read them. A collective call.

        Nothing to do where the next forward reads, or gathers, what stands in the shards.
        """

    def stored(self, shards: Mapping[str, Shard], keep_shape: bool = False) -> Mapping[str, Shard]:
        """Of some shards, by ``name`` or ``name/state``, those that this rank stores."""
        return shards

    @property
    def state_owner(self) -> Optimizer:
        """The optimizer that holds this rank's state."""
        return self.optimizer

    # --- files ---

    def write(self, folder: Path) -> None:
        safetensors_tree.save(self.buffers(), folder / BUFFERS)

    def check(self, folder: Path) -> None:
        if not is_sharded(folder):
            check_model(safetensors_tree.load(folder / MODEL), self.shapes(), folder)

    def read(self, folder: Path) -> None:
        if is_sharded(folder):
            room = self.prepare_optimizer_shards(sharded.sizes(folder, "optimizer/"))
            self._load_tensors(
                {f"model/{name}": shard for name, shard in self._stored_shards().items()}
                | {f"optimizer/{name}": shard for name, shard in room.items()},
                folder,
            )
            self._load_buffers(safetensors_tree.load(folder / BUFFERS))
        else:
            self.load_whole_weights(safetensors_tree.load(folder / MODEL))
            whole = self._own_share(whole_optimizer_state(folder, self.trained_names))
            scatter_whole(whole, self.prepare_optimizer_shards({key: v.numel() for key, v in whole.items()}))
        self.refresh()

    def tensors(self) -> dict[str, Shard]:
        """This rank's shards of all that a checkpoint stores in shards, as runs of the whole tensors; collective."""
        own = {f"model/{name}": shard for name, shard in self.stored(self._stored_shards()).items()} | {
            f"optimizer/{name}": shard for name, shard in self.stored(self.optimizer_shards()).items()
        }
        if self.tensor is None:
            return own
        held = self.parameters()  # a pipeline has empty shards of other stages' parameters, too
        own = {key: shard for key, shard in own.items() if key.split("/")[1] in held}
        ranks = self.ranks
        group = ranks.layer_group if self.holds_shards else ranks.groups.tp
        return as_runs(own, self.split_of, ranks.groups.tp, group, ranks.device)

    def _load_tensors(self, room: Mapping[str, Shard], folder: Path) -> None:
        """Fill shards, by the names of :meth:`tensors`, from the files of any layout; a collective call."""
        shared = {
            key: enclosing(*split, self.ranks.grid.tp, self.ranks.place.tp, shard)
            for key, shard in room.items()
            if (split := self.split_of(key))
        }
        sharded.load({**room, **{key: run for key, (run, _) in shared.items()}}, folder)
        for key, (run, index) in shared.items():
            room[key].data.detach().copy_(run.data[index])

    # --- the model ---

    def split_of(self, key: str) -> tuple[ParameterSplit, torch.Size] | None:
        """Split of a parameter, or of a state ``parameter/state`` of its shape; None where it is not shared."""
        key = key.removeprefix("model/").removeprefix("optimizer/")
        name, _, state = key.partition("/")
        if self.tensor is None or name not in self.tensor.splits or state == "step":
            return None
        return self.tensor.splits[name], self.state_shapes[name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape in self.state_shapes.items() if name not in self.frozen}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that a state dict holds, the same on every rank."""
        there = dict(self.model.named_buffers())
        return {name: there[name] for name in self.buffer_names}

    def whole_weights(self) -> dict[str, torch.Tensor]:
        whole = gather_whole(self.stored(self._stored_shards(), keep_shape=True), self.ranks.copy_group)
        if self.tensor is not None:  # the first copies of all shards are on as many ranks
            whole = {
                name: self.tensor.splits[name].whole(tensor.to(self.ranks.device), self.ranks.groups.tp).cpu()
                if name in self.tensor.splits
                else tensor
                for name, tensor in whole.items()
            }
        if not self.ranks.is_main:
            return {}
        whole |= {name: buffer.detach().cpu() for name, buffer in self.buffers().items()}
        return whole | {name: whole[first] for name, first in self.ties.items() if name not in self.frozen}

    def load_whole_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        scatter_whole(self._own_share(weights), self._stored_shards())
        self._load_buffers(weights)
        self.refresh()

    def bare_model(self) -> nn.Module:
        return self.model if self.shell is None else self.shell

    def _stored_shards(self) -> dict[str, Shard]:
        """:meth:`shards` of what a file of the run holds: of all, except for ``frozen``."""
        return {name: shard for name, shard in self.shards().items() if name not in self.frozen}

    def _own_share(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of whole tensors, by ``name`` or ``name/state``, this rank's shards of shared layers; others as they are."""
        return {
            key: split[0].shard(tensor, self.ranks.groups.tp) if (split := self.split_of(key)) else tensor
            for key, tensor in whole.items()
        }

    def _load_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy what is no parameter."""
        for name, buffer in self.buffers().items():
            buffer.copy_(values[name])

    # --- the optimizer ---

    def _updated(self) -> dict[str, tuple[Shard, torch.Tensor]]:
        """The tensor that the optimizer's state is keyed by, beside its shard, for what is trained here.

        It is the shard's own data, or the parameter where the optimizer updates the model's.
        """
        keys = {id(tensor) for group in self.state_owner.param_groups for tensor in group["params"]}
        parameters, updated = self.parameters(), {}
        for name, shard in self.shards().items():
            tensor = shard.data if id(shard.data) in keys else parameters.get(name)
            if tensor is not None and id(tensor) in keys:
                updated[name] = shard, tensor
        return updated

    def optimizer_shards(self) -> dict[str, Shard]:
        """This rank's shard of every tensor of optimizer state, by ``parameter/state``."""
        return {
            f"{name}/{state}": self.state_shard(shard, value)
            for name, (shard, key) in self._updated().items()
            for state, value in sorted(self.state_owner.state.get(key, {}).items())
        }

    def state_shard(self, shard: Shard, value: torch.Tensor) -> Shard:
        """A tensor of state as a shard: like its parameter's, or a number that all ranks share."""
        value = local(value)
        if value.numel() == shard.data.numel() and value.ndim:
            return Shard(shard.shape, shard.start, value.view(-1))
        return Shard(torch.Size([1]), 0, value.view(1))

    def prepare_optimizer_shards(self, states: Mapping[str, int]) -> dict[str, Shard]:
        """Room for the optimizer's state before its first step.

        Args:
            states: number of elements by ``parameter/state``, as a checkpoint holds them.
        Raises:
            CheckpointError: state of a parameter that the model does not have.
        """
        trained, owner, room = self._updated(), self.state_owner, {}
        for key, numel in states.items():
            name, state = key.rsplit("/", 1)
            if name not in self.state_shapes:
                raise CheckpointError(
                    f"the checkpoint holds optimizer state of {name}, which this model has not",
                    "give the --model it was trained from",
                )
            if name not in trained:
                continue
            shard, parameter = trained[name]
            # A number, such as Adam's step, is kept by torch as a scalar; what is as long as the parameter is split.
            scalar = numel == 1 and state == "step"
            value = torch.zeros((), device=device_of_step(owner, parameter)) if scalar else torch.zeros_like(parameter)
            owner.state[parameter][state] = value
            room[key] = self.state_shard(shard, value)
        return room


class SplitState(ShardedState):
    """State of a rank that computes with all it has: whole models, or whole shards of split layers, and own experts."""

    holds_shards = False

    def own_shards(self) -> dict[str, Shard]:
        return whole_shards(self.model)


def whole_shards(module: nn.Module) -> dict[str, Shard]:
    """Each parameter of a module, by its name there, as one shard that is all of it."""
    return {name: Shard(p.shape, 0, p.detach().view(-1)) for name, p in module.named_parameters()}


def without_weights(model: nn.Module) -> nn.Module:
    """The model with parameters that hold nothing: what is left of it to write it down by."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, empty)  # type: ignore[arg-type]
