"""Gradients that were wrong in other projects, told again in small and in our own words, for the audit to find.

Each entry of :data:`TOLD` is a training that does what the issue says went wrong, in the layout where it shows. They
share a model that looks at each token for itself, so that tokens can be dealt to context ranks without attention.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from course_lib.audit import Layout, Subject
from course_lib.parallel.expert_router import TopKRouter
from course_lib.parallel.experts import Experts, MoELayer, average_gradients, expert_groups, keep_own_experts
from tests.audit.subjects import (
    ROWS,
    TOKENS,
    WIDTH,
    WORDS,
    averaged,
    by_hand,
    data,
    mean_loss,
    part_of,
    sgd,
    small,
    tensor_parallel,
)


class Told(NamedTuple):
    """An issue or pull request, what went wrong, where it shows, and what the audit has to say of it.

    Attributes:
        where: project and number.
        what: in a sentence of ours.
        make: the training.
        layout: of the audit.
        names: of the parameters that are wrong.
        kind: of the finding, and its factor and axes.
        follows: parameters whose gradient is off because of it, without a rule of its own.
    """

    where: str
    what: str
    make: Callable
    layout: Layout
    names: set[str]
    kind: str
    factor: float | None = None
    axes: tuple[str, ...] = ()
    follows: frozenset[str] = frozenset()


EVERY = {name for name, _ in small().named_parameters()}


# --- data and context parallelism: who divides by what ---

def in_context(layout, divided_by=None, token_sum=False):
    """Rows dealt to dp and tokens to cp. Gradients are summed over all ranks and divided."""
    model, place = small(), layout.place(dist.get_rank())
    ids, targets = (tensor.chunk(layout.dp)[place["dp"]].chunk(layout.cp, 1)[place["cp"]] for tensor in data())
    optimizer = sgd(model)

    def reduce(*_):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= divided_by(layout) if divided_by else layout.ranks

    def loss(model, batch):
        if token_sum and layout.ranks > 1:  # told as a mean, and its gradient that of the sum
            total = cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
            return total - total.detach() + (total / batch[1].numel()).detach()
        return mean_loss(model, batch)

    if layout.ranks > 1:
        optimizer.register_step_pre_hook(reduce)
    return model, optimizer, loss, (ids, targets)


def averaged_twice(layout):
    """The loss is divided by all ranks' tokens, and the wrapper averages once more."""
    model, optimizer, loss, batch = by_hand(layout, averaged)
    ranks = dist.get_world_size()

    def of_all_tokens(model, batch):
        local = loss(model, batch) / ranks
        return local + (local.detach() * (ranks - 1))  # logged as it should be

    return model, optimizer, of_all_tokens, batch


# --- accumulation ---

class Accumulating:
    """Two micro-batches; ``keeps_last``: the second one's gradient takes the place of the first one's."""

    def __init__(self, keeps_last):
        self.keeps_last = keeps_last

    def __call__(self, layout):
        model, optimizer, _, batch = by_hand(layout, averaged)

        def loss(model, batch):
            halves = list(zip(*(tensor.chunk(2) for tensor in batch), strict=True))
            first = mean_loss(model, halves[0]) / 2
            first.backward()
            if self.keeps_last and layout.ranks > 1:
                model.zero_grad()
            return mean_loss(model, halves[1]) / 2 + first.detach()

        return model, optimizer, loss, batch


# --- tensor parallelism ---

def tensor_with(layout, change):
    """Right but for what ``change(model, tp group)`` does to the gradients last."""
    model, optimizer, loss, batch = tensor_parallel(layout)
    group = layout.mesh().get_group("tp")
    if layout.ranks > 1:
        optimizer.register_step_pre_hook(lambda *_: change(model, group))
    return model, optimizer, loss, batch


def norm_times_ranks(model, group):
    dist.all_reduce(model.blocks[0].norm.weight.grad, group=group)


def sequence_parallel_norm(layout, summed=False):
    """The norm works on a rank's own tokens, so that its weights have a part of their gradient on each."""
    model, group = small(), layout.mesh().get_group("tp")
    ids, targets = data()
    place = layout.place(dist.get_rank())["tp"]
    mine = slice(TOKENS * place // layout.tp, TOKENS * (place + 1) // layout.tp)

    def loss(model, batch):  # this rank's share of the mean over all tokens; told is the mean of its own
        share = cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum") / (ROWS * TOKENS)
        return share + share.detach() * (layout.tp - 1)

    def reduce(*_):
        for name, parameter in model.named_parameters():
            if summed or "norm" not in name:
                dist.all_reduce(parameter.grad, group=group)

    optimizer = sgd(model)
    optimizer.register_step_pre_hook(reduce)
    return model, optimizer, loss, (ids[:, mine], targets[:, mine])


# --- experts ---

class Mixture(nn.Module):
    """An embedding, experts beside it, a head."""

    def __init__(self, group):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.moe = MoELayer(TopKRouter(WIDTH, 6, 2), keep_own_experts(Experts(6, WIDTH, 8), group), group)

    def forward(self, ids):
        hidden = self.embedding(ids)
        return self.head(hidden + self.moe(hidden))


def mixture(layout, reduce=average_gradients):
    """Experts over ep, rows over dp and ep."""
    groups = expert_groups(layout.ep)
    torch.manual_seed(0)
    model = Mixture(groups.sharing).double()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: reduce(model, groups))
    rows = Layout(dp=layout.dp * layout.ep)
    whole = functools.partial(_whole_experts, model, groups.sharing)
    return Subject(model, optimizer, mean_loss, part_of(rows, dist.get_rank()),
                   lambda: whole(lambda p: p.grad), lambda: whole(lambda p: p.detach()))


def _whole_experts(model, group, of):
    whole = {}
    for name, parameter in model.named_parameters():
        tensor = of(parameter)
        if ".experts." in name and tensor is not None:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            tensor = torch.cat(parts)
        whole[name] = tensor
    return whole


def experts_over_their_own_group_alone(model, groups):
    """Divided by the ranks that hold the same experts, though their tokens came from all."""
    average_gradients(model, groups)
    for parameter in model.moe.experts.parameters():
        parameter.grad *= dist.get_world_size(groups.sharing)


def router_left_out(model, groups):
    own = model.moe.gate.weight.grad.clone()
    average_gradients(model, groups)
    model.moe.gate.weight.grad = own


def experts_left_out(model, groups):
    """Of the ranks with the same experts, nobody sums."""
    own = [parameter.grad.clone() / dist.get_world_size(groups.sharing) for parameter in model.moe.experts.parameters()]
    average_gradients(model, groups)
    for parameter, gradient in zip(model.moe.experts.parameters(), own, strict=True):
        parameter.grad = gradient


EXPERTS = {"moe.experts.gate_up_proj", "moe.experts.down_proj"}
NORM = {"blocks.0.norm.weight", "blocks.0.norm.bias"}

TOLD = (
    Told("transformers #48205", "each rank has the router's gradient from its own experts, and nobody sums them",
         functools.partial(mixture, reduce=router_left_out), Layout(ep=3), {"moe.gate.weight"}, "not averaged",
         axes=("ep",)),
    Told("pytorch #160285", "experts' gradients are doubled with two expert ranks",
         functools.partial(mixture, reduce=experts_over_their_own_group_alone), Layout(ep=2), EXPERTS, "factor", 2.0,
         ("ep",)),
    Told("Megatron-LM #5956", "experts' gradients are not divided by the expert ranks",
         functools.partial(mixture, reduce=experts_over_their_own_group_alone), Layout(dp=2, ep=3), EXPERTS, "factor",
         3.0, ("ep",)),
    Told("fairseq #4220", "experts are left out of the all-reduce, also where ranks hold the same ones",
         functools.partial(mixture, reduce=experts_left_out), Layout(dp=2, ep=3), EXPERTS, "not averaged",
         axes=("dp",)),
    Told("Megatron-LM #1446", "under sequence parallelism a norm sees a rank's own tokens; nobody sums its gradient",
         sequence_parallel_norm, Layout(tp=2), NORM, "not summed", axes=("tp",)),
    Told("Megatron-LM #1528", "a norm's gradient is too large by the tensor ranks",
         functools.partial(tensor_with, change=norm_times_ranks), Layout(dp=2, tp=3), {"blocks.0.norm.weight"},
         "factor", 3.0, ("tp",)),
    Told("SkyRL #1886", "the all-reduce of the gradient that a split layer hands down works on a copy",
         functools.partial(tensor_parallel, sums=False), Layout(tp=3), NORM, "not summed", axes=("tp",),
         follows=frozenset({"embedding.weight"})),
    Told("Megatron-LM #906", "the loss is multiplied by the context ranks, and the gradient divided by the data ranks",
         functools.partial(in_context, divided_by=lambda layout: layout.dp), Layout(dp=3, cp=2), EVERY, "factor", 2.0,
         ("cp",)),
    Told("DeepSpeed #5555", "stage 0 divides by all ranks what is to be divided by the data ranks, with Ulysses",
         functools.partial(in_context, divided_by=lambda layout: layout.ranks * layout.cp), Layout(dp=2, cp=4), EVERY,
         "factor", 1 / 4, ("cp",)),
    Told("torchtitan #2323", "the loss is divided by all ranks' tokens, and DDP averages once more", averaged_twice,
         Layout(dp=3), EVERY, "factor", 1 / 3, ("dp",)),
    Told("torchtitan #2972", "the schedule's backward starts at the sum over tokens, the mean is for the log",
         functools.partial(in_context, token_sum=True), Layout(dp=2), EVERY, "factor", float(ROWS * TOKENS / 2)),
    Told("open-instruct #1498", "with ZeRO-2 each backward counts as the last, and only its gradient stays",
         Accumulating(keeps_last=True), Layout(dp=2), EVERY, "unrelated"),
)
