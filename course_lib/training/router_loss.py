"""The auxiliary loss of a model's routers, over the tokens of all ranks, with padding and filler left out."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.errors import ConfigError
from course_lib.modeling.context import ContextParallel
from course_lib.modeling.inputs import WholeSequences
from course_lib.modeling.mixtures import routed, routers_of, trains
from course_lib.parallel.expert_router import balance_share
from course_lib.training.loss import IGNORE
from course_lib.training.ranks import Ranks


class RouterLoss:
    """Watches the routers of a model, and makes a loss of what they did; see ``expert_router.balance_loss``.

    Each layer's loss is a product of two means, of choices and of probabilities, and the mean of the ranks' own losses
    is another number: the choices are summed over the ranks first.

    Args:
        model: its routers are transformers' own or the textbook's.
        coefficient: that the loss is multiplied by.
    Raises:
        ConfigError: the model has no router of a known kind.
    """

    def __init__(self, model: nn.Module, coefficient: float):
        self.coefficient = coefficient
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._told: list[Tensor] = []
        routers = routers_of(model)
        if not routers:
            raise ConfigError(
                f"router_aux_loss_coef {coefficient:g}: {type(model).__name__} has no router of OLMoE's "
                "or Mixtral's kind",
                "leave it out",
            )
        for router in routers.values():
            router.register_forward_hook(self._see)

    def _see(self, module: nn.Module, _: Any, output: Any) -> None:
        if trains(module):
            self._seen.append(routed(output))

    def share(self, batch: Mapping[str, Tensor], sequences: WholeSequences | ContextParallel, ranks: Ranks) -> Tensor:
        """This rank's share of the loss of the forward that was just made; the shares of all ranks add up to it.

        A collective call of all ranks.

        Args:
            batch: with ``attention_mask`` (rows, tokens) and ``labels``. Padding does not count, nor do rows without
                any target, which only even out a micro-batch.
            sequences: which tokens of the batch this rank computes.
            ranks: that sum.
        """
        seen, self._seen = self._seen, []
        in_use = (batch["labels"] != IGNORE).view(len(batch["labels"]), -1).any(1)
        inputs, _ = sequences.cut(batch)  # the tokens that this rank's routers have seen
        real = (inputs.get("attention_mask", batch["attention_mask"]).bool() & in_use[:, None]).flatten()
        logits = [of_layer[real] for of_layer, _ in seen]
        counts = [torch.bincount(experts[real].flatten(), minlength=of_layer.shape[1]) for of_layer, experts in seen]
        numbers = torch.cat([real.sum()[None], *counts])
        tokens, *summed = ranks.sum(ranks.own_part(numbers)).split([1, *map(len, counts)])
        tokens = tokens[0].clamp(min=1)  # where all rows of a micro-batch are such
        own = torch.stack(
            [
                balance_share(of_layer if of_layer.dtype == torch.float64 else of_layer.float(), all_counts, tokens)
                for of_layer, all_counts in zip(logits, summed, strict=True)
            ]
        )
        own = own.mean()
        self._told.append(ranks.own_part(own.detach()))
        return self.coefficient * own

    def take(self) -> float:
        """The mean over the micro-batches since the last call of this rank's share, without the coefficient."""
        told, self._told = self._told, []
        return float(torch.stack(told).mean()) if told else 0.0
