"""Measurements of lesson 15: gradients by groups, and load, capacity and remedies over many steps.

The lesson's own model has `moe`, a layer with `router`, a linear one, and `experts`, a list of modules with `gate_up`
and `down`. A batch is (inputs, targets) of all ranks, of which each takes its part.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, OlmoeConfig

from course_lib.missing_extra import require
from course_lib.parallel.expert_router import Routing, TopKRouter, balance_loss, z_loss
from course_lib.parallel.experts import (
    ExpertGroups,
    Experts,
    MoELayer,
    average_gradients,
    expert_groups,
    keep_own_experts,
)

require("transformers", "5.19", "lesson 15, where transformers spreads the experts of a model,")

Build = Callable[[], Any]
Batch = Callable[[int], tuple[Tensor, Tensor]]
ADDED: dict[str | None, Callable[[Routing], Tensor | int]] = {
    None: lambda routing: 0,
    "bias": lambda routing: 0,
    "auxiliary loss": lambda routing: 0.1 * balance_loss(routing),
    "z-loss": lambda routing: 0.01 * z_loss(routing),
}
SPEED = 0.01
"""By which a bias moves per step."""
LAST = 10
"""Steps at the end of a training over which a mean is taken."""


def mine(whole: Tensor) -> Tensor:
    """This rank's tokens, of those of all ranks."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def mean_of_ranks(loss: Tensor) -> float:
    """The mean of the ranks' losses."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def gradients(model: nn.Module, experts: nn.Module) -> tuple[Tensor, Tensor]:
    """Of all but the experts, as one row; and (own experts, numbers of one) of this rank's experts.

    Args:
        model: after a backward.
        experts: modules with ``gate_up`` and ``down``, or the library's :class:`Experts`.
    """
    of_experts = list(experts.parameters())
    others = [
        weight.grad.flatten()
        for weight in model.parameters()
        if weight.grad is not None and not any(weight is one for one in of_experts)
    ]
    kinds = [weight.grad for weight in of_experts if weight.grad is not None]
    if kinds[0].dim() == 2:  # gate_up and down in turn
        kinds = [torch.stack(kinds[::2]), torch.stack(kinds[1::2])]
    return torch.cat(others).cpu(), torch.cat([kind.flatten(1) for kind in kinds], 1).cpu()


def together(by_rank: Sequence[dict[str, tuple]]) -> dict[str, tuple[list[float], Tensor, Tensor]]:
    """Losses, gradients of all but the experts, and those of all experts, by what was trained."""
    return {way: (*by_rank[0][way][:2], torch.cat([of_rank[way][2] for of_rank in by_rank])) for way in by_rank[0]}


def tiny_olmoe(experts: int, k: int) -> Any:
    """An OLMoE of two layers over ASCII, with the same weights wherever it is built."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        OlmoeConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_experts=experts,
            num_experts_per_tok=k,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        dtype=torch.float32,
    )


def train_on_rows(model: Any, rows: Callable[[int], Tensor], steps: int, average: Callable[[Any], None]) -> list[float]:
    """The ranks' mean loss by step.

    Args:
        model: gives a ``loss`` for ``input_ids`` and ``labels``; trained in place.
        rows: (rows of all ranks, tokens) int64 of a step.
        steps: of the optimizer.
        average: makes gradients those of all ranks.
    """
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        ids = mine(rows(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of_ranks(loss))
    return losses


def with_library(
    model: Any, groups: ExpertGroups, k: int, capacity_factor: float | None = None, with_bias: bool = False
) -> None:
    """Put the library's layer, with the same weights, in the place of the lesson's; each rank keeps its experts."""
    theirs, device = model.moe, model.moe.router.weight.device
    (experts, width), inner = theirs.router.weight.shape, theirs.experts[0].down.in_features
    router = TopKRouter(width, experts, k, normalized=True, with_bias=with_bias).to(device)
    router.weight, of_all = theirs.router.weight, Experts(experts, width, inner).to(device)
    of_all.gate_up_proj.data = torch.stack([expert.gate_up.weight.data for expert in theirs.experts])
    of_all.down_proj.data = torch.stack([expert.down.weight.data for expert in theirs.experts])
    model.moe = MoELayer(router, keep_own_experts(of_all, groups.sharing), groups.sharing, capacity_factor)


def times_too_large(build: Build, batch: Batch, k: int, sizes: Sequence[int]) -> dict[int, float]:
    """Factor of an expert's gradient by a mean over the ranks that hold it, over the right one, by ranks that share."""
    times = {}
    for size in sizes:
        model, groups = build().to(Accelerator().device), expert_groups(size)
        with_library(model, groups, k)
        inputs, targets = map(mine, batch(0))
        F.cross_entropy(model(inputs), targets).backward()
        held = [weight.grad.clone() for weight in model.moe.experts.parameters()]
        average_gradients(model, groups)
        right = torch.cat([weight.grad.flatten() for weight in model.moe.experts.parameters()])
        for gradient in held:
            dist.all_reduce(gradient, group=groups.same)
            gradient /= dist.get_world_size(groups.same)
        wrong = torch.cat([gradient.flatten() for gradient in held])
        times[size] = float(wrong @ right / (right @ right))
    return times


def long_training(
    build: Build, batch: Batch, k: int, steps: int, remedy: str | None = None, capacity_factor: float | None = None
) -> Tensor:
    """Train with the library's layer on all ranks.

    Args:
        build: makes the lesson's model.
        batch: (inputs, targets) of all ranks, of a step.
        k: experts that a token goes to.
        steps: of the optimizer.
        remedy: None, ``bias``, ``auxiliary loss`` or ``z-loss``.
        capacity_factor: None drops nothing.
    Returns:
        (steps, 4 + experts) float64 of this rank: loss, mean squared log of the sum of exponentials, copies that its
        experts worked on, its copies that were dropped, and how often its tokens chose each expert.
    """
    model, groups, history = build().to(Accelerator().device), expert_groups(dist.get_world_size()), []
    with_library(model, groups, k, capacity_factor, with_bias=remedy == "bias")
    layer, optimizer = model.moe, torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        inputs, targets = (mine(whole).to(model.head.weight.device) for whole in batch(step))
        loss = F.cross_entropy(model(inputs), targets)
        # What is added comes as this rank's share of a sum, where the loss is a mean.
        (loss + dist.get_world_size() * ADDED[remedy](layer.routing)).backward()
        average_gradients(model, groups)
        optimizer.step()
        optimizer.zero_grad()
        if remedy == "bias":
            layer.gate.move_bias(layer.routing.counts, SPEED)
        z = layer.routing.logits.logsumexp(-1).square().mean()
        history.append(
            [loss.item(), z.item(), sum(layer.load.per_expert), layer.load.dropped, *layer.routing.counts.tolist()]
        )
    return torch.tensor(history, dtype=torch.float64)


class Trained(NamedTuple):
    """A long training, of all ranks; what is one number is the mean of the last steps.

    Attributes:
        loss: in nats.
        z: what the z-loss makes small.
        dropped: share of all copies.
        busiest: choices of the busiest expert over the mean, by step.
        chosen: (steps, experts) choices.
        worked: (steps, ranks) copies that the experts of each rank worked on.
    """

    loss: float
    z: float
    dropped: float
    busiest: list[float]
    chosen: Tensor
    worked: Tensor

    @classmethod
    def of(cls, by_rank: Sequence[Tensor]) -> "Trained":
        """From what :func:`long_training` gave on each rank."""
        loss, z, worked, dropped, choices = torch.stack(list(by_rank)).tensor_split((1, 2, 3, 4), -1)
        chosen = choices.sum(0)
        return cls(
            loss[:, -LAST:].mean().item(),
            z[:, -LAST:].mean().item(),
            (dropped[:, -LAST:].sum() / choices[:, -LAST:].sum()).item(),
            (chosen.amax(1) / chosen.mean(1)).tolist(),
            chosen,
            worked.squeeze(-1).T,
        )

    @property
    def busiest_expert(self) -> float:
        """Its choices over the mean."""
        return over_mean(self.chosen)

    @property
    def busiest_rank(self) -> float:
        """The copies that it worked on over the mean."""
        return over_mean(self.worked)

    @property
    def longest(self) -> float:
        """Copies that the busiest rank worked on."""
        return self.worked[-LAST:].amax(1).mean().item()

    def if_shared_by(self, ranks: int) -> float:
        """Value of :attr:`busiest_rank`, by the same choices, if so many ranks shared the experts."""
        return over_mean(self.chosen.unflatten(1, (ranks, -1)).sum(2))


def over_mean(numbers: Tensor) -> float:
    """The largest over the mean, of (steps, …): the mean of the last steps."""
    return (numbers[-LAST:].amax(1) / numbers[-LAST:].mean(1)).mean().item()


def long_trainings(
    launch: Callable[..., list],
    build: Callable[..., Any],
    batch: Callable[..., Any],
    k: int,
    steps: int,
    options: Sequence[tuple],
    seeds: Sequence[int],
) -> list[list[Trained]]:
    """One after the other in one launch, with each seed: of every (remedy, capacity factor), a training per seed."""
    by_rank = launch(
        lambda: [
            long_training(partial(build, seed=seed), partial(batch, seed=seed), k, steps, *option)
            for option in options
            for seed in seeds
        ]
    )
    runs = [Trained.of(of_one) for of_one in zip(*by_rank, strict=True)]
    return [runs[at : at + len(seeds)] for at in range(0, len(runs), len(seeds))]
