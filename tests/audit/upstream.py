"""Gradients that were wrong in other projects, told again in small and in our own words, for the audit to find.

Each entry of :data:`TOLD` is a training that does what the issue says went wrong, in the layout where it shows. They
share a model that looks at each token for itself, so that tokens can be dealt to context ranks without attention.
"""

import functools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.nn.functional import cross_entropy

from course_lib.audit import Layout, Subject
from course_lib.parallel.expert_router import TopKRouter
from course_lib.parallel.experts import Experts, MoELayer, average_gradients, expert_groups, keep_own_experts
from tests.audit import subjects
from tests.audit.subjects import averaged, by_hand, changed, halves, mean_loss, sgd, small, tensor_parallel, told_as

ROWS, TOKENS, WORDS, WIDTH = subjects.ROWS, subjects.TOKENS, subjects.WORDS, subjects.WIDTH


def then(made, change):
    """A training, and ``change(model)`` between what it does with its gradients and the step."""
    model, optimizer, *_ = made
    optimizer.register_step_pre_hook(lambda *_: change(model))
    return made


def in_context(layout, divided_by=None, token_sum=False):
    """Rows dealt to dp and tokens to cp. Gradients are summed over all ranks and divided."""
    model, place = small(), layout.place(dist.get_rank())
    ids, targets = (tensor.chunk(layout.dp)[place["dp"]].chunk(layout.cp, 1)[place["cp"]] for tensor in subjects.data())
    optimizer = sgd(model)

    def reduce(*_):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= divided_by(layout) if divided_by else layout.ranks

    def loss(model, batch):
        if token_sum and layout.ranks > 1:  # told as a mean, and its gradient that of the sum
            total = cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
            return told_as(total, total / batch[1].numel())
        return mean_loss(model, batch)

    if layout.ranks > 1:
        optimizer.register_step_pre_hook(reduce)
    return model, optimizer, loss, (ids, targets)


def loss_times(layout, factor):
    """Told is the mean, and its gradient is that of a multiple."""
    by = factor(layout)
    return by_hand(layout, averaged, loss=lambda *args: told_as(by * mean_loss(*args), mean_loss(*args)))


def accumulating(layout, keeps_last=False):
    """Two micro-batches; ``keeps_last``: the second one's gradient takes the place of the first one's."""

    def loss(model, batch):
        first, second = halves(batch)
        half = mean_loss(model, first) / 2
        half.backward()
        if keeps_last and layout.ranks > 1:
            model.zero_grad()
        return mean_loss(model, second) / 2 + half.detach()

    return by_hand(layout, averaged, loss=loss)


def tensor_with(layout, change):
    """Right except for what ``change(model, tp group)`` does to the gradients last."""
    made, group = tensor_parallel(layout), layout.mesh().get_group("tp")
    return then(made, lambda model: change(model, group)) if layout.ranks > 1 else made


def norm_times_ranks(model, group):
    dist.all_reduce(model.blocks[0].norm.weight.grad, group=group)


def sequence_parallel_norm(layout, summed=False):
    """The norm works on a rank's own tokens, so that its weights have a part of their gradient on each."""
    model, group = small(), layout.mesh().get_group("tp")
    ids, targets = subjects.data()
    place = layout.place(dist.get_rank())["tp"]
    mine = slice(TOKENS * place // layout.tp, TOKENS * (place + 1) // layout.tp)

    def loss(model, batch):  # this rank's share of the mean over all tokens; told is the mean of its own
        share = cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum") / (
            subjects.ROWS * TOKENS
        )
        return share + share.detach() * (layout.tp - 1)

    def reduce(*_):
        for name, parameter in model.named_parameters():
            if summed or "norm" not in name:
                dist.all_reduce(parameter.grad, group=group)

    optimizer = sgd(model)
    optimizer.register_step_pre_hook(reduce)
    return model, optimizer, loss, (ids[:, mine], targets[:, mine])


class Mixture(nn.Module):
    """An embedding, experts beside it, a head."""

    def __init__(self, group):
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, WORDS),
        )
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

    def whole(of):
        gathered = {name: of(parameter) for name, parameter in model.named_parameters()}
        for name, tensor in gathered.items():
            if ".experts." in name and tensor is not None:
                parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(groups.sharing))]
                dist.all_gather(parts, tensor.contiguous(), group=groups.sharing)
                gathered[name] = torch.cat(parts)
        return gathered

    mine = subjects.part_of(rows, dist.get_rank())
    gradients, weights = (lambda: whole(lambda p: p.grad)), (lambda: whole(lambda p: p.detach()))
    return Subject(model, optimizer, mean_loss, mine, gradients, weights)


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


bucket_of_one = functools.partial(changed, change=torch.Tensor.copy_, of="blocks.0.up.weight")
"""A parameter that fills a bucket to the last element is sent with none."""
negated = functools.partial(changed, change=lambda gradient, own: gradient.neg_())
"""The difference of old and new weights, taken the wrong way round, is handed to the outer optimizer."""


def batches_and_ranks_left_in(layout):
    """Two micro-batches: each one's own mean, times the data ranks, and added up; told is the mean."""

    def loss(model, batch):
        total = sum(mean_loss(model, half) for half in halves(batch))
        return told_as(total * layout.dp if layout.ranks > 1 else total / 2, total / 2)

    return by_hand(layout, averaged, loss=loss)


MOST = 0.05
"""Norm to which gradients are clipped; theirs is larger."""


def clipped(model, square):
    for parameter in model.parameters():
        parameter.grad *= MOST / square.sqrt()


def squares_of_all_ranks(layout):
    """Whole parameters, and the squares of their gradients are added up over the ranks, as if they were shards."""

    def clip(model):
        square = sum(parameter.grad.square().sum() for parameter in model.parameters())
        dist.all_reduce(square)
        clipped(model, square)

    return then(by_hand(layout, averaged), clip)


def replicated_squares_of_all_ranks(layout):
    """Of a model whose MLP is split: the squares of what is whole on each tensor rank are counted on each."""

    def clip(model):
        square = 0
        for name, parameter in model.named_parameters():
            split = name in ("blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.weight")
            square += parameter.grad.square().sum() * (1 if split else layout.tp)
        clipped(model, square)

    return then(tensor_parallel(layout), clip)


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
    return model, optimizer, loss, subjects.part_of(layout, dist.get_rank())


def second_use_left_out(layout, left_out=True):
    """A block is used twice in a step, and its gradient is sent when that of one use is there."""

    def loss(model, batch):
        hidden = model.blocks[0](model.embedding(batch[0]))
        own = dict(model.blocks[0].named_parameters())
        if left_out and layout.ranks > 1:
            own = {name: parameter.detach() for name, parameter in own.items()}
        hidden = torch.func.functional_call(model.blocks[0], own, (hidden,))
        return cross_entropy(model.head(hidden).flatten(0, 1), batch[1].flatten())

    return by_hand(layout, averaged, loss=loss)


MAKE = {
    "transformers #48205": functools.partial(mixture, reduce=router_left_out),
    "pytorch #160285": functools.partial(mixture, reduce=experts_over_their_own_group_alone),
    "Megatron-LM #5956": functools.partial(mixture, reduce=experts_over_their_own_group_alone),
    "fairseq #4220": functools.partial(mixture, reduce=experts_left_out),
    "Megatron-LM #1446": sequence_parallel_norm,
    "Megatron-LM #1528": functools.partial(tensor_with, change=norm_times_ranks),
    "SkyRL #1886": functools.partial(tensor_parallel, sums=False),
    "Megatron-LM #906": functools.partial(in_context, divided_by=lambda layout: layout.dp),
    "DeepSpeed #5555": functools.partial(in_context, divided_by=lambda layout: layout.ranks * layout.cp),
    "torchtitan #2323": functools.partial(loss_times, factor=lambda layout: 1 / layout.dp),
    "torchtitan #2972": functools.partial(in_context, token_sum=True),
    "open-instruct #1498": functools.partial(accumulating, keeps_last=True),
    "torchtitan #4332": functools.partial(tensor_with, change=bias_divided),
    "NeMo-RL #3788": replicated_squares_of_all_ranks,
    "hyper-parallel #279": squares_of_all_ranks,
    "sparseml #135": functools.partial(loss_times, factor=lambda layout: layout.dp),
    "NeMo Automodel #3830": batches_and_ranks_left_in,
    "piper #13": tied_ends,
    "DeepSpeed #8224": second_use_left_out,
    "DeepSpeed #4321": bucket_of_one,
    "torchft #233": negated,
}


class Told(NamedTuple):
    """An issue or pull request, as told.yaml has it; ``where`` is project and number."""

    where: str
    what: str
    make: Callable
    layout: Layout
    names: set[str]
    kind: str
    factor: float | None
    axes: tuple[str, ...]
    follows: set[str]


def told(where, what, says):
    names = set(says.get("names") or dict(small().named_parameters()))
    factor = float(Fraction(says["factor"])) if "factor" in says else None
    axes, follows = tuple(says.get("axes", ())), set(says.get("follows", ()))
    return Told(where, what, MAKE[where], Layout(**says["layout"]), names, says["kind"], factor, axes, follows)


TOLD = tuple(
    told(where, **row) for where, row in yaml.safe_load(Path(__file__).with_name("told.yaml").read_text()).items()
)
