"""Model and optimizer of a pipeline's stages, as a run's files hold them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.parallel.sharding import Shard
from course_lib.parallel.zero import Zero1
from course_lib.training.checkpoints.sharded_state import ShardedState, whole_pieces
from course_lib.training.optimization import parameter_groups


class StagesState(ShardedState):
    """State of the stages of this rank: their parameters whole, or shards of them, and empty pieces of the others'.

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

    def pieces(self) -> dict[str, Shard]:
        """A piece of every parameter of the model: whole for this rank's stages, empty for the others'."""
        device, local = self.ranks.device, self.own_pieces()
        pieces = {name: Shard(shape, 0, torch.empty(0, device=device)) for name, shape in self.all_shapes.items()}
        return pieces | {self.names[self.model.get_parameter(name)]: piece for name, piece in local.items()}

    def own_pieces(self) -> dict[str, Shard]:
        """Pieces of this rank's stages, by their names there."""
        return self.zero.pieces() if self.zero else whole_pieces(self.model)

    def parameters(self) -> dict[str, Tensor]:
        return {self.names[parameter]: parameter for parameter in self.model.parameters()}

    def stored(self, pieces: Mapping[str, Shard], keep_shape: bool = False) -> dict[str, Shard]:
        """Of some pieces, by ``name`` or ``name/state``, those that this rank stores: every element has one owner.

        With ``keep_shape``, an empty piece stands for each of the others.
        """
        elsewhere = set(self.all_shapes) if not self.shards_pieces and self.ranks.place.dp > 0 else self.copies
        kept = {}
        for key, piece in pieces.items():
            if key not in elsewhere and key.rpartition("/")[0] not in elsewhere:
                kept[key] = piece
            elif keep_shape:
                kept[key] = Shard(piece.shape, 0, piece.data[:0])
        return kept

    def whole_weights(self) -> dict[str, Tensor]:
        self.refresh()
        return super().whole_weights()

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def refresh(self) -> None:
        if self.zero:
            self.zero.refresh()
