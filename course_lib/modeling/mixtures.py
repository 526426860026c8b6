"""Mixtures of experts in transformers' models: their blocks replaced by the textbook's, and who got how many tokens."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock, OlmoeTopKRouter

from course_lib.errors import ModelError
from course_lib.parallel.expert_router import TopKRouter
from course_lib.parallel.experts import Experts, MoELayer, keep_own_experts
from course_lib.parallel.tp_collectives import Group

BLOCKS = (OlmoeSparseMoeBlock, MixtralSparseMoeBlock)
ROUTERS = (OlmoeTopKRouter, MixtralTopKRouter)


def spread_experts(model: PreTrainedModel, group: Group = None) -> list[MoELayer]:
    """Replace each block of experts of an OLMoE or Mixtral model by :class:`MoELayer`, with the same weights, in place.

    Names of parameters stay as they are; of the experts each rank keeps its own N-th along the first dimension.

    Args:
        model: with all experts, the same on every rank.
        group: ranks that share the experts.
    Returns:
        The layers, in the model's order.
    Raises:
        ModelError: the model has no such block, or its loss includes the router's (``output_router_logits``), for which
            transformers records its own routers: use `balance_loss`.
    """
    if getattr(model.config, "output_router_logits", False):
        raise ModelError(
            "output_router_logits records transformers' routers, which are replaced",
            "set it to False, and add course_lib.parallel.expert_router.balance_loss to the loss",
        )
    layers = []
    for name, block in list(model.named_modules()):
        if isinstance(block, BLOCKS):
            layers.append(_own(block, model.config, group))
            model.set_submodule(name, layers[-1])
    if not layers:
        raise ModelError(
            f"model type {model.config.model_type} has no block of experts that can be spread", "use OLMoE or Mixtral"
        )
    return layers


def _own(block: Any, config: Any, group: Group) -> MoELayer:
    theirs, router = block.experts, block.gate
    experts, width = router.weight.shape
    normalized = isinstance(router, MixtralTopKRouter) or router.norm_topk_prob
    ours = TopKRouter(width, experts, router.top_k, normalized=normalized).to(router.weight.device)
    ours.weight = router.weight
    own = Experts(1, 1, 1, activation=ACT2FN[config.hidden_act])
    own.gate_up_proj, own.down_proj = theirs.gate_up_proj, theirs.down_proj
    return MoELayer(ours, keep_own_experts(own, group), group, shared=None).train(block.training)


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The routers of a model by name, transformers' own or the textbook's; none in a dense one."""
    return {name: module for name, module in model.named_modules() if isinstance(module, (*ROUTERS, TopKRouter))}


def routed(output: Any) -> tuple[Tensor, Tensor]:
    """Of what a router's forward gives: its logits (tokens, experts), and the chosen experts (tokens, k) int64."""
    return (output[0], output[2]) if isinstance(output, tuple) else (output.logits, output.experts)


def trains(module: nn.Module) -> bool:
    """Whether this is a training step's forward, and not what activation checkpointing computes again in backward."""
    return module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


class ExpertCounts:
    """Counts, per layer, how often each expert was chosen on this rank while a model trains.

    Args:
        model: any; one without routers of a known kind has none to count.

    Attributes:
        names: of the routers that are watched; transformers' own or the textbook's.
    """

    def __init__(self, model: nn.Module):
        routers = routers_of(model)
        self.names = list(routers)
        self._chosen: dict[str, Tensor] = {}
        self._dropped = torch.zeros((), dtype=torch.long)
        self._hooks = list(self._watch(routers))
        self._hooks += [
            module.register_forward_hook(self._drop) for module in model.modules() if isinstance(module, MoELayer)
        ]

    def _watch(self, routers: dict[str, nn.Module]) -> Iterator[torch.utils.hooks.RemovableHandle]:
        for name, router in routers.items():

            def count(module: Any, _: Any, output: Any, name: str = name) -> None:
                if trains(module):
                    counts = torch.bincount(routed(output)[1].flatten(), minlength=len(module.weight))
                    self._chosen[name] = self._chosen[name] + counts if name in self._chosen else counts

            yield router.register_forward_hook(count)

    def _drop(self, module: Any, *_: Any) -> None:
        if trains(module):
            self._dropped += module.load.dropped

    def take(self) -> tuple[Tensor, int]:
        """(layers, experts) int64 since the last call, and copies that were dropped; no rows without routers."""
        chosen = (
            torch.stack([self._chosen[name] for name in self.names])
            if self._chosen
            else torch.zeros(0, 0, dtype=torch.long)
        )
        dropped = int(self._dropped)
        self._chosen, self._dropped = {}, torch.zeros((), dtype=torch.long)
        return chosen, dropped

    def close(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
