"""The router of a mixture of experts: which k experts a token goes to, with which weights, and what keeps them even.

A router is one linear layer, from the token to a logit per expert. Left alone it soon sends most tokens to a few
experts: those get the gradients, become better, and get still more. Two remedies:

- an auxiliary loss, least when all experts get as many tokens (Fedus et al., "Switch Transformers", arXiv 2101.03961,
  equations 4 to 6): its gradient disturbs the model's own;
- a bias per expert, for the choice alone and not for the weights, raised after a step where the expert got fewer
  tokens than the mean and lowered where it got more (DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437, section 2.1.2).

Apart from them, the z-loss keeps logits small, so that their exponentials can be told apart in low precision (Zoph et
al., "ST-MoE", arXiv 2202.08906, section 2.2).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.errors import ConfigError
from course_lib.parallel.tp_collectives import Group

Scoring = Literal["before", "after", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """Router's choices for this rank's tokens.

    Attributes:
        logits: (tokens, experts), at least float32.
        experts: (tokens, k) int64, the chosen ones, best first.
        weights: (tokens, k), as ``logits``: of the chosen experts' outputs.
    """

    logits: Tensor
    experts: Tensor
    weights: Tensor

    @property
    def counts(self) -> Tensor:
        """(experts,) int64: how often this rank's tokens chose each expert."""
        return torch.bincount(self.experts.flatten(), minlength=self.logits.shape[1])


class TopKRouter(nn.Module):
    """Chooses k experts per token.

    Args:
        width: of a token.
        experts: to choose from, on all ranks together.
        k: that a token goes to.
        scoring: ``before`` takes the softmax over all experts and then the k largest (Switch, Mixtral, OLMoE);
            ``after`` takes the k largest logits and the softmax over those; ``sigmoid`` scores each expert for itself
            (DeepSeek-V3).
        normalized: the k weights are divided by their sum. With it, ``before`` and ``after`` are equal.
        with_bias: there is a bias for the choice, which :meth:`move_bias` moves.

    Attributes:
        weight: (experts, width); the same on every rank, so that its gradient is summed over all of them.
        bias: (experts,) float32, a buffer, or None: added to the scores for the choice alone.

    Raises:
        ConfigError: k is not between 1 and the number of experts.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        k: int,
        scoring: Scoring = "before",
        normalized: bool = False,
        with_bias: bool = False,
    ):
        super().__init__()
        if not 1 <= k <= experts:
            raise ConfigError(f"a token cannot go to {k} of {experts} experts", f"choose 1 to {experts}")
        self.k, self.scoring, self.normalized = k, scoring, normalized
        self.weight = nn.Parameter(torch.randn(experts, width) * width**-0.5)
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(experts) if with_bias else None)

    def forward(self, tokens: Tensor) -> Routing:
        """Route (tokens, width)."""
        logits = F.linear(tokens, self.weight)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        scores = {"before": lambda: logits.softmax(-1), "after": lambda: logits, "sigmoid": logits.sigmoid}[
            self.scoring
        ]()
        favoured = scores if self.bias is None else scores + self.bias  # for the choice; the weights are without it
        experts = favoured.topk(self.k, -1).indices
        weights = scores.gather(1, experts)
        if self.scoring == "after":
            weights = weights.softmax(-1)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(logits, experts, weights)

    @torch.no_grad()
    def move_bias(self, counts: Tensor, speed: float, group: Group = None) -> None:
        """Raise the bias of experts that got fewer tokens than the mean and lower that of the others, by ``speed``.

        Args:
            counts: (experts,) int64, of this rank's tokens since the last call; summed here over the group.
            speed: 0.001 in DeepSeek-V3.
            group: all ranks that have tokens.
        Raises:
            ConfigError: the router has no bias.
        """
        if self.bias is None:
            raise ConfigError("this router has no bias to move", "build it with with_bias=True")
        total = _summed(counts, group).float()
        self.bias += speed * torch.sign(total.mean() - total)


def balance_loss(routing: Routing, group: Group = None) -> Tensor:
    """This rank's share of the auxiliary loss of all ranks' tokens; the shares add up to it.

    It is experts × Σ over experts of (choices of it per token) × (its mean probability): k where all are equal. As in
    Mixtral's code, so k times Switch's where k is not 1. The choices are counted over all ranks; a product of two local
    means would be another loss.

    Args:
        routing: of this rank's tokens.
        group: all ranks that have tokens.
    """
    tokens = _summed(torch.tensor(len(routing.logits), device=routing.logits.device), group)
    return balance_share(routing.logits, _summed(routing.counts, group), tokens)


def balance_share(logits: Tensor, counts: Tensor, tokens: Tensor) -> Tensor:
    """This rank's share of the auxiliary loss, where the numbers of all ranks are known already.

    Args:
        logits: (own tokens, experts), the router's.
        counts: (experts,) int64, how often all ranks' tokens chose each expert.
        tokens: of all ranks, a scalar.
    """
    share = counts.to(logits.dtype) / tokens  # no gradient: a count has none
    return logits.shape[1] * (share * logits.softmax(-1).sum(0) / tokens).sum()


def z_loss(routing: Routing, group: Group = None) -> Tensor:
    """This rank's share of the mean over all ranks' tokens of the squared log of the sum of exponentials."""
    tokens = _summed(torch.tensor(len(routing.logits), device=routing.logits.device), group)
    return routing.logits.logsumexp(-1).square().sum() / tokens


def _summed(number: Tensor, group: Group) -> Tensor:
    total = number.clone()
    dist.all_reduce(total, group=group)
    return total
