"""Model and optimizer of a pipeline's stages, as a run's files hold them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.parallel.sharding import Shard
from course_lib.parallel.zero import Zero1
from course_lib.training.checkpoints.sharded_state import ShardedState, whole_shards
from course_lib.training.optimization import parameter_groups


class StagesState(ShardedState):
    """State of the stages of this rank: their parameters whole, or shards of them, and empty shards of the others'.

    Attributes:
        all_shapes: of all parameters of the model, by name.
        copies: names of this rank's copies of tied weights that an earlier rank stores.
        zero: shards the optimizer over the copies of a stage; None: each has all of it.
    """

    copies: set[str]
    zero: Zero1 | None

    def remember_whole(self, model: nn.Module) -> None:
        """Take note of all parameters, before the other ranks' are cut off."""
        self.trained_names = [self.names[p] for group in parameter_groups(model, 0.0) for p in group["params"]]
        self.all_shapes = {name: parameter.shape for parameter, name in self.names.items()}

    def remember_order(self, optimizer: Optimizer) -> None:
        pass  # it is that of the whole model

    def shards(self) -> dict[str, Shard]:
        """A shard of every parameter of the model: whole for this rank's stages, empty for the others'."""
        device, local = self.ranks.device, self.own_shards()
        shards = {name: Shard(shape, 0, torch.empty(0, device=device)) for name, shape in self.all_shapes.items()}
        return shards | {self.names[self.model.get_parameter(name)]: shard for name, shard in local.items()}

    def own_shards(self) -> dict[str, Shard]:
        """Shards of this rank's stages, by their names there."""
        return self.zero.shards() if self.zero else whole_shards(self.model)

    def parameters(self) -> dict[str, Tensor]:
        return {self.names[parameter]: parameter for parameter in self.model.parameters()}

    def stored(self, shards: Mapping[str, Shard], keep_shape: bool = False) -> dict[str, Shard]:
        """Of some shards, by ``name`` or ``name/state``, those that this rank stores: every element has one owner.

        With ``keep_shape``, an empty shard stands for each of the others.
        """
        elsewhere = set(self.all_shapes) if not self.holds_shards and self.ranks.place.dp > 0 else self.copies
        kept = {}
        for key, shard in shards.items():
            if key not in elsewhere and key.rpartition("/")[0] not in elsewhere:
                kept[key] = shard
            elif keep_shape:
                kept[key] = Shard(shard.shape, 0, shard.data[:0])
        return kept

    def whole_weights(self) -> dict[str, Tensor]:
        self.refresh()
        return super().whole_weights()

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def refresh(self) -> None:
        if self.zero:
            self.zero.refresh()
