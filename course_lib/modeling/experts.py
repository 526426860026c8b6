"""Expert parallelism of transformers' models: each rank keeps some experts of every layer, and all else whole.

The ranks that share experts are data parallel ranks, each with rows of its own; see :mod:`course_lib.parallel.experts`
for who sends what to whom. Here the model is changed, and what a rank keeps is told to those who sum gradients, clip
and write checkpoints.
"""

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from course_lib.errors import ConfigError
from course_lib.modeling.mixtures import spread_experts
from course_lib.parallel.experts import ExpertGroups
from course_lib.parallel.sharding import Shard


class ExpertParallel:
    """A model of transformers of which this rank keeps a part of the experts; changed in place.

    The experts of a layer are one tensor, the first dimension of which counts them. A rank keeps neighbours of them: of
    the flattened tensor one run, as checkpoints store it.

    Args:
        model: OLMoE or Mixtral, whole, the same on every rank.
        groups: of this rank, from :func:`course_lib.parallel.experts.expert_groups`.

    Attributes:
        layers: that replace the model's blocks of experts, in the model's order.
        shapes: of the whole tensors, by the names of the parameters that are spread.
        groups: as given.
        place: of this rank among those that share the experts: it keeps the place-th part.

    Raises:
        ConfigError: the ranks cannot share the experts evenly.
        ModelError: the model has no block of experts that can be spread.
    """

    def __init__(self, model: PreTrainedModel, groups: ExpertGroups):
        ranks, self.place = dist.get_world_size(groups.sharing), dist.get_rank(groups.sharing)
        experts: int = getattr(model.config, "num_experts", 0) or getattr(model.config, "num_local_experts", 0)
        if experts % ranks:
            raise ConfigError(
                f"{experts} experts in each layer cannot be shared by {ranks} ranks",
                f"use an expert_parallel_size that divides {experts}",
            )
        whole = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.model, self.groups = model, groups
        self.layers = spread_experts(model, groups.sharing)
        inside = {id(parameter) for layer in self.layers for parameter in layer.experts.parameters()}
        self.shapes = {name: whole[name] for name, parameter in model.named_parameters() if id(parameter) in inside}

    def summed_over(self) -> dict[nn.Parameter, dist.ProcessGroup]:
        """The ranks over which an expert's gradient is summed, by parameter: those that hold the same experts."""
        group = self.groups.same
        assert group is not None
        return {self.model.get_parameter(name): group for name in self.shapes}

    def in_whole(self, name: str, shard: Shard) -> Shard:
        """A shard of what this rank keeps of a parameter as a run of the whole; of others, as it is.

        Args:
            name: of a parameter.
            shard: a run of the elements of the rank's own tensor.
        """
        if name not in self.shapes:
            return shard
        first = self.place * self.shapes[name].numel() // dist.get_world_size(self.groups.sharing)
        return Shard(self.shapes[name], first + shard.start, shard.data)
