"""Expert parallelism: a layer with many feed-forward networks, of which each token uses k, spread over ranks.

The ranks share the experts and not the tokens: each has tokens of its own, as in data parallelism, and the rest of the
model whole. With W ranks, of which N each share the experts, there are W / N ranks with the same ones::

    W = 4, N = 2    rank 0         rank 1         rank 2         rank 3
    experts         0 1            2 3            0 1            2 3        all-to-all within (0 1) and (2 3)
    gradients       experts: the mean over (0 2) and (1 3); router and all else: the mean over (0 1 2 3)

An expert's gradient on rank 0 has come from the tokens of ranks 0 and 1. Where the loss is the mean of the ranks', it
is therefore N times too large: what is summed over W / N ranks is divided by W, as for all other parameters. A mean
over the W / N ranks is the mistake that no loss shows before the first step.

Sources: Shazeer et al., "Outrageously Large Neural Networks" (arXiv 1701.06538), section 3.1; Lepikhin et al., "GShard"
(arXiv 2006.16668); Rajbhandari et al., "DeepSpeed-MoE" (arXiv 2201.05596), section 5, for the groups; Dai et al.,
"DeepSeekMoE" (arXiv 2401.06066), section 3.2, for shared experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.errors import ConfigError
from course_lib.parallel.expert_dispatch import plan
from course_lib.parallel.expert_router import Routing, TopKRouter
from course_lib.parallel.groups import meet
from course_lib.parallel.tp_collectives import Group


@dataclass(frozen=True)
class ExpertGroups:
    """The two groups of a rank.

    Attributes:
        sharing: ranks that share the experts: tokens go between them.
        same: ranks that hold the same experts: gradients are summed over them (expert data parallelism).
    """

    sharing: Group
    same: Group


def expert_groups(size: int, lines: Sequence[Sequence[int]] | None = None) -> ExpertGroups:
    """Groups of ``size`` neighbours that share the experts, and those across; a collective call of all ranks.

    Args:
        size: ranks that share the experts.
        lines: the data parallel ranks, as ``RankGrid.lines("dp")`` gives them: groups are formed within each. By
            default all ranks are one line.
    Raises:
        ConfigError: the size does not divide the number of data parallel ranks.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    lines = lines or [range(ranks)]
    ranks = len(lines[0])
    if size < 1 or ranks % size:
        raise ConfigError(
            f"{ranks} ranks cannot form groups of {size} that share the experts", f"use a size that divides {ranks}"
        )
    sharing = [list(line[first : first + size]) for line in lines for first in range(0, ranks, size)]
    same = [list(line[place::size]) for line in lines for place in range(size)]
    # A rank makes the groups that it is not in, too: dist.new_group is a call of all ranks, in one order.
    made = [[(line, dist.new_group(line)) for line in lines_of] for lines_of in (sharing, same)]
    own = [next(group for line, group in groups if rank in line) for groups in made]
    for group in own:
        meet(group)
    return ExpertGroups(*own)


class Experts(nn.Module):
    """Some feed-forward networks with a gate, down(activation(gate x) * up x), as in Mixtral, OLMoE and DeepSeek.

    Attributes:
        gate_up_proj: (experts, 2 inner, width): gate and up, one below the other.
        down_proj: (experts, width, inner).
    """

    def __init__(self, experts: int, width: int, inner: int, activation: Callable[[Tensor], Tensor] = F.silu):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, width) * width**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, width, inner) * inner**-0.5)
        self.activation = activation

    def forward(self, tokens: Tensor, per_expert: list[int]) -> Tensor:
        """(copies, width), one expert after the other -> the same; an expert without tokens gets a gradient of 0."""
        outputs = []
        for part, gate_up, down in zip(tokens.split(per_expert), self.gate_up_proj, self.down_proj, strict=True):
            gate, up = F.linear(part, gate_up).chunk(2, -1)
            outputs.append(F.linear(self.activation(gate) * up, down))
        return torch.cat(outputs)


@dataclass(frozen=True)
class Load:
    """Work of one forward, by expert.

    Attributes:
        chosen: (experts,) int64: how often this rank's tokens chose each expert.
        per_expert: copies that each of this rank's own experts worked on.
        away: copies and outputs that this rank sent to others.
        dropped: this rank's copies that no expert took.
    """

    chosen: Tensor
    per_expert: list[int]
    away: int
    dropped: int

    @property
    def imbalance(self) -> float:
        """Tokens of the expert that was chosen most, by the mean; 1 is even."""
        return float(self.chosen.max() * len(self.chosen) / self.chosen.sum())


class MoELayer(nn.Module):
    """Router, the experts of this rank, and the all-to-all between the ranks that share them.

    Args:
        router: for all experts; the same on every rank.
        experts: this rank's, the rank-th N-th of them.
        group: ranks that share the experts.
        capacity_factor: as in :func:`course_lib.parallel.expert_dispatch.plan`; None drops no token.
        shared: a network that every token goes through beside its experts, on its own rank.

    Attributes:
        gate: the router; ``gate`` and ``experts`` are their names in transformers too, so that weights fit as they are.
        routing: of the last forward, with its graph: for the losses of the router.
        load: of the last forward.

    Raises:
        ConfigError: the ranks' experts are not as many as the router chooses from.
    """

    routing: Routing
    load: Load

    def __init__(
        self,
        router: TopKRouter,
        experts: Experts,
        group: Group = None,
        capacity_factor: float | None = None,
        shared: nn.Module | None = None,
    ):
        super().__init__()
        ranks, here, all_experts = dist.get_world_size(group), len(experts.gate_up_proj), len(router.weight)
        if here * ranks != all_experts:
            raise ConfigError(
                f"{ranks} ranks with {here} experts each do not hold the router's {all_experts}",
                "use a number of experts that the ranks share evenly",
            )
        self.gate, self.experts, self.shared = router, experts, shared
        self.group, self.capacity_factor = group, capacity_factor

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, tokens, width) -> the same."""
        tokens = hidden.flatten(0, -2)
        self.routing = routing = self.gate(tokens)
        dispatch = plan(routing.experts, len(self.gate.weight), self.capacity_factor, self.group)
        outputs = self.experts(dispatch.to_experts(tokens), dispatch.per_expert)
        result = dispatch.to_tokens(outputs, routing.weights)
        self.load = Load(routing.counts, dispatch.per_expert, dispatch.away, dispatch.dropped)
        if self.shared is not None:
            result = result + self.shared(tokens)
        return result.view_as(hidden)


def keep_own_experts(experts: Experts, group: Group) -> Experts:
    """This rank's N-th of all experts, copied."""
    here, rank = len(experts.gate_up_proj) // dist.get_world_size(group), dist.get_rank(group)
    own = slice(rank * here, (rank + 1) * here)
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, nn.Parameter(getattr(experts, name).detach()[own].clone()))
    return experts


def average_gradients(model: nn.Module, groups: ExpertGroups) -> None:
    """Make every gradient that of the mean of all ranks' losses: experts over their own group, all else over all.

    Both are divided by the number of all ranks. A parameter without a gradient gets 0, so that the ranks agree on what
    they sum: one whose tokens chose nobody here takes part all the same.
    """
    ranks = dist.get_world_size()
    of_experts = {
        id(parameter) for module in model.modules() if isinstance(module, Experts) for parameter in module.parameters()
    }
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=groups.same if id(parameter) in of_experts else None)
            parameter.grad /= ranks
