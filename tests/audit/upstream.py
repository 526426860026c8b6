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
    """Right except for what ``change(model, tp group)`` does to the gradients last."""
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
    return Subject(
        model,
        optimizer,
        mean_loss,
        part_of(rows, dist.get_rank()),
        lambda: whole(lambda p: p.grad),
        lambda: whole(lambda p: p.detach()),
    )


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


# --- one parameter, one norm, one use ---


def bucket_of_one(layout):
    """A parameter that fills a bucket to the last element is sent with none."""
    full = small().blocks[0].up.weight.numel()

    def reduce(name, gradient):
        if gradient.numel() != full or name != "blocks.0.up.weight":
            averaged(name, gradient)

    return by_hand(layout, reduce)


def negated(layout):
    """The difference of old and new weights, taken the wrong way round, is handed to the outer optimizer."""

    def reduce(name, gradient):
        averaged(name, gradient)
        gradient.neg_()

    return by_hand(layout, reduce)


def loss_times_ranks(layout):
    """A mean is multiplied by the ranks, as if the wrapper added up; told is the mean."""
    model, optimizer, loss, batch = by_hand(layout, averaged)

    def scaled(model, batch):
        local = loss(model, batch)
        return local * layout.dp + (local * (1 - layout.dp)).detach()

    return model, optimizer, scaled, batch


def batches_and_ranks_left_in(layout):
    """Two micro-batches: each one's own mean, times the data ranks, and added up; told is the mean."""
    model, optimizer, _, batch = by_hand(layout, averaged)

    def loss(model, batch):
        means = [mean_loss(model, half) for half in zip(*(tensor.chunk(2) for tensor in batch), strict=True)]
        right = sum(means) / 2
        wrong = sum(means) * layout.dp if layout.ranks > 1 else right
        return wrong + (right - wrong).detach()

    return model, optimizer, loss, batch


MOST = 0.05
"""Norm to which gradients are clipped; theirs is larger."""


def clipped(model, square):
    for parameter in model.parameters():
        parameter.grad *= MOST / square.sqrt()


def squares_of_all_ranks(layout):
    """Whole parameters, and the squares of their gradients are added up over the ranks, as if they were shards."""
    model, optimizer, loss, batch = by_hand(layout, averaged)

    def clip(*_):
        square = sum(parameter.grad.square().sum() for parameter in model.parameters())
        dist.all_reduce(square)
        clipped(model, square)

    optimizer.register_step_pre_hook(clip)
    return model, optimizer, loss, batch


def replicated_squares_of_all_ranks(layout):
    """Of a model whose MLP is split: the squares of what is whole on each tensor rank are counted on each."""
    model, optimizer, loss, batch = tensor_parallel(layout)

    def clip(*_):
        split = {"blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.weight"}
        clipped(
            model,
            sum(
                parameter.grad.square().sum() * (1 if name in split else layout.tp)
                for name, parameter in model.named_parameters()
            ),
        )

    optimizer.register_step_pre_hook(clip)
    return model, optimizer, loss, batch


def bias_divided(model, group):
    """Divided by the ranks in the forward, so that the sum over them has it once; and so divided in the backward."""
    model.blocks[0].down.bias.grad /= dist.get_world_size(group)


class TiedEnds(nn.Module):
    """An embedding that is the head too."""

    def __init__(self):
        super().__init__()
        whole = small()
        self.embedding, self.block = whole.embedding, whole.blocks[0]

    def forward(self, ids, first=None, last=None):
        into, out = (self.embedding.weight if use is None else use for use in (first, last))
        return self.block(into[ids]) @ out.T


def tied_ends(layout, summed=False):
    """Two stages have a copy each, with the gradient of their own use of it."""
    torch.manual_seed(0)
    model, place, mesh = TiedEnds(), layout.place(dist.get_rank()), layout.mesh()
    optimizer = sgd(model)

    def loss(model, batch):
        copy = model.embedding.weight.detach()
        uses = {} if layout.pp == 1 else {"last": copy} if place["pp"] == 0 else {"first": copy}
        return cross_entropy(model(batch[0], **uses).flatten(0, 1), batch[1].flatten())

    def reduce(*_):
        for name, parameter in model.named_parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
            parameter.grad /= layout.dp
            if summed and name == "embedding.weight":
                dist.all_reduce(parameter.grad, group=mesh.get_group("pp"))

    optimizer.register_step_pre_hook(reduce)
    return model, optimizer, loss, part_of(layout, dist.get_rank())


def second_use_left_out(layout, left_out=True):
    """A block is used twice in a step, and its gradient is sent when that of one use is there."""
    model, optimizer, _, batch = by_hand(layout, averaged)

    def loss(model, batch):
        hidden = model.blocks[0](model.embedding(batch[0]))
        own = dict(model.blocks[0].named_parameters())
        if left_out and layout.ranks > 1:
            own = {name: parameter.detach() for name, parameter in own.items()}
        hidden = torch.func.functional_call(model.blocks[0], own, (hidden,))
        return cross_entropy(model.head(hidden).flatten(0, 1), batch[1].flatten())

    return model, optimizer, loss, batch


EXPERTS = {"moe.experts.gate_up_proj", "moe.experts.down_proj"}
NORM = {"blocks.0.norm.weight", "blocks.0.norm.bias"}

TOLD = (
    Told(
        "transformers #48205",
        "each rank has the router's gradient from its own experts, and nobody sums them",
        functools.partial(mixture, reduce=router_left_out),
        Layout(ep=3),
        {"moe.gate.weight"},
        "not averaged",
        axes=("ep",),
    ),
    Told(
        "pytorch #160285",
        "experts' gradients are doubled with two expert ranks",
        functools.partial(mixture, reduce=experts_over_their_own_group_alone),
        Layout(ep=2),
        EXPERTS,
        "factor",
        2.0,
        ("ep",),
    ),
    Told(
        "Megatron-LM #5956",
        "experts' gradients are not divided by the expert ranks",
        functools.partial(mixture, reduce=experts_over_their_own_group_alone),
        Layout(dp=2, ep=3),
        EXPERTS,
        "factor",
        3.0,
        ("ep",),
    ),
    Told(
        "fairseq #4220",
        "experts are left out of the all-reduce, also where ranks hold the same ones",
        functools.partial(mixture, reduce=experts_left_out),
        Layout(dp=2, ep=3),
        EXPERTS,
        "not averaged",
        axes=("dp",),
    ),
    Told(
        "Megatron-LM #1446",
        "under sequence parallelism a norm sees a rank's own tokens; nobody sums its gradient",
        sequence_parallel_norm,
        Layout(tp=2),
        NORM,
        "not summed",
        axes=("tp",),
    ),
    Told(
        "Megatron-LM #1528",
        "a norm's gradient is too large by the tensor ranks",
        functools.partial(tensor_with, change=norm_times_ranks),
        Layout(dp=2, tp=3),
        {"blocks.0.norm.weight"},
        "factor",
        3.0,
        ("tp",),
    ),
    Told(
        "SkyRL #1886",
        "the all-reduce of the gradient that a split layer hands down works on a copy",
        functools.partial(tensor_parallel, sums=False),
        Layout(tp=3),
        NORM,
        "not summed",
        axes=("tp",),
        follows=frozenset({"embedding.weight"}),
    ),
    Told(
        "Megatron-LM #906",
        "the loss is multiplied by the context ranks, and the gradient divided by the data ranks",
        functools.partial(in_context, divided_by=lambda layout: layout.dp),
        Layout(dp=3, cp=2),
        EVERY,
        "factor",
        2.0,
        ("cp",),
    ),
    Told(
        "DeepSpeed #5555",
        "stage 0 divides by all ranks what is to be divided by the data ranks, with Ulysses",
        functools.partial(in_context, divided_by=lambda layout: layout.ranks * layout.cp),
        Layout(dp=2, cp=4),
        EVERY,
        "factor",
        1 / 4,
        ("cp",),
    ),
    Told(
        "torchtitan #2323",
        "the loss is divided by all ranks' tokens, and DDP averages once more",
        averaged_twice,
        Layout(dp=3),
        EVERY,
        "factor",
        1 / 3,
        ("dp",),
    ),
    Told(
        "torchtitan #2972",
        "the schedule's backward starts at the sum over tokens, the mean is for the log",
        functools.partial(in_context, token_sum=True),
        Layout(dp=2),
        EVERY,
        "factor",
        float(ROWS * TOKENS / 2),
    ),
    Told(
        "open-instruct #1498",
        "with ZeRO-2 each backward counts as the last, and only its gradient stays",
        Accumulating(keeps_last=True),
        Layout(dp=2),
        EVERY,
        "unrelated",
    ),
    Told(
        "torchtitan #4332",
        "a bias is divided by the tensor ranks before their sum, and so is its gradient",
        functools.partial(tensor_with, change=bias_divided),
        Layout(dp=2, tp=3),
        {"blocks.0.down.bias"},
        "factor",
        1 / 3,
        ("tp",),
    ),
    Told(
        "NeMo-RL #3788",
        "the norm that clips counts what is whole on each tensor rank once per rank",
        replicated_squares_of_all_ranks,
        Layout(tp=3),
        EVERY,
        "factor",
    ),
    Told(
        "hyper-parallel #279",
        "the norm that clips adds up the squares of whole gradients over the ranks",
        squares_of_all_ranks,
        Layout(dp=3),
        EVERY,
        "factor",
        3**-0.5,
        ("dp",),
    ),
    Told(
        "sparseml #135",
        "a mean is multiplied by the ranks, though DDP averages",
        loss_times_ranks,
        Layout(dp=3),
        EVERY,
        "factor",
        3.0,
        ("dp",),
    ),
    Told(
        "NeMo Automodel #3830",
        "means of micro-batches are added up, and multiplied by the data ranks",
        batches_and_ranks_left_in,
        Layout(dp=3),
        EVERY,
        "factor",
        6.0,
    ),
    Told(
        "piper #13",
        "two stages have a copy of the tied embedding, and nobody sums their gradients",
        tied_ends,
        Layout(pp=2, dp=3),
        {"embedding.weight"},
        "not summed",
        axes=("pp",),
    ),
    Told(
        "DeepSpeed #8224",
        "of a module that is used twice in a step one use's gradient is left out",
        second_use_left_out,
        Layout(dp=2),
        {f"blocks.0.{name}" for name, _ in small().blocks[0].named_parameters()},
        "unrelated",
    ),
    Told(
        "DeepSpeed #4321",
        "a parameter that is exactly as large as a bucket is not reduced",
        bucket_of_one,
        Layout(dp=3),
        {"blocks.0.up.weight"},
        "not averaged",
        axes=("dp",),
    ),
    Told("torchft #233", "the outer gradient has the wrong sign", negated, Layout(dp=3), EVERY, "sign", -1.0),
)
