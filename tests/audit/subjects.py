"""Trainings for the audit: right ones, and such as people have written wrong, with the issues that told of them.

A small model in float64: an embedding, a block of a norm and two linear layers, a head. The batch is the same in every
layout, and dealt to the ranks of the data axes.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from course_lib.audit import Subject, gathered_shards
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.zero import Zero1, Zero2
from course_lib.parallel.zero3 import Zero3

ROWS, TOKENS, WORDS, WIDTH = 12, 4, 16, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.head(self.blocks[0](self.embedding(ids)))


def data():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(WORDS, (ROWS, TOKENS), generator=generator) for _ in range(2))


def small():
    torch.manual_seed(0)
    return Small().double()


def mean_loss(model, batch):
    ids, targets = batch
    return cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def told_as(loss, value):
    """A loss with another value than the one whose gradient it has."""
    return loss + (value - loss).detach()


def halves(batch):
    """Two micro-batches."""
    return list(zip(*(tensor.chunk(2) for tensor in batch), strict=True))


def part_of(layout, rank, uneven=False):
    """This rank's rows: by its place on the data axes."""
    place = layout.place(rank)
    parts, mine = layout.dp * layout.shard, place["dp"] * layout.shard + place["shard"]
    if uneven:  # the first has one row, the last all that are left
        bounds = [*range(parts), ROWS]
        return tuple(tensor[bounds[mine] : bounds[mine + 1]] for tensor in data())
    return tuple(tensor.chunk(parts)[mine] for tensor in data())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# --- right ---

ENGINES = {"ddp": DataParallel, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3, "fsdp": FullyShardedDataParallel}


def ours(name, layout):
    """An engine of this course over all ranks."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = part_of(layout, dist.get_rank())
    if name == "ddp":
        return DataParallel(model), optimizer, mean_loss, batch
    engine = ENGINES[name](model, optimizer)

    def whole(gradients):
        return lambda: gathered_shards(engine.shards(), gradients)

    return Subject(engine, optimizer, mean_loss, batch, whole(gradients=True), whole(gradients=False))


def torchs_ddp(layout):
    model = small()
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.optim.AdamW(model.parameters(), lr=0.01), mean_loss, part_of(layout, dist.get_rank())


def torchs_fsdp(layout):
    model = small()
    mesh = layout.mesh()[("dp", "shard")] if layout.dp > 1 and layout.shard > 1 else None
    for module in (model.blocks[0], model):
        fully_shard(module, **({"mesh": mesh} if mesh is not None else {}))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), mean_loss, part_of(layout, dist.get_rank())


# --- wrong ---


def by_hand(layout, reduce, optimizer=sgd, loss=mean_loss, uneven=False):
    """Data parallel by hand: ``reduce(name, gradient)`` is called for each before the step, and changes it."""
    model = small()
    made = optimizer(model)
    if dist.get_world_size() > 1:
        made.register_step_pre_hook(functools.partial(reduce_all, model, reduce))
    return model, made, loss, part_of(layout, dist.get_rank(), uneven)


def reduce_all(model, reduce, *_):
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            reduce(name, parameter.grad)


def averaged(name, gradient):
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def right(layout):
    return by_hand(layout, averaged)


def summed(layout):
    return by_hand(layout, lambda name, gradient: dist.all_reduce(gradient))


def summed_under_adam(layout):
    adam = functools.partial(torch.optim.Adam, lr=0.01, eps=1e-30)
    return by_hand(layout, lambda name, gradient: dist.all_reduce(gradient), lambda model: adam(model.parameters()))


def changed(layout, change, of=None):
    """Right, and then ``change(gradient, own)`` on more than one rank, of one parameter or all; own: its own before."""

    def reduce(name, gradient):
        own = gradient.clone()
        averaged(name, gradient)
        if of in (name, None):
            change(gradient, own)

    return by_hand(layout, reduce)


def own_on_the_last(gradient, own):
    if dist.get_rank() == dist.get_world_size() - 1:
        gradient.copy_(own)


def last_shard_lost(gradient, own):
    """A reduce-scatter whose last shard nobody brings back."""
    gradient.chunk(dist.get_world_size())[-1].zero_()


divided_twice = functools.partial(changed, change=lambda gradient, own: gradient.div_(dist.get_world_size()))
one_left_out = functools.partial(changed, change=torch.Tensor.copy_, of="blocks.0.norm.bias")
last_rank_has_its_own = functools.partial(changed, change=own_on_the_last, of="blocks.0.up.weight")
half_of_a_shard = functools.partial(changed, change=last_shard_lost, of="blocks.0.down.weight")


def swapped(layout):
    """Buckets that are unpacked in another order than they were packed in."""
    last = {}

    def reduce(name, gradient):
        averaged(name, gradient)
        last[name] = gradient
        if name == "blocks.0.norm.bias":
            weight = last["blocks.0.norm.weight"]
            kept = weight.clone()
            weight.copy_(gradient)
            gradient.copy_(kept)

    return by_hand(layout, reduce)


def frozen_by_mistake(layout):
    model, optimizer, loss, batch = by_hand(layout, averaged)
    if dist.get_world_size() > 1:
        model.head.bias.requires_grad_(False)
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(functools.partial(reduce_all, model, averaged))
    return model, optimizer, loss, batch


def uneven_rows(layout):
    """A mean of the ranks' means, where their numbers of rows differ."""
    return by_hand(layout, averaged, uneven=dist.get_world_size() > 1)


class CopyToRanks(torch.autograd.Function):
    """Megatron's f; ``sums`` False: its backward's all-reduce is left out."""

    @staticmethod
    def forward(ctx, x, group, sums):
        ctx.group, ctx.sums = group, sums
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.sums:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def tensor_parallel(layout, sums=True, bias_once=True):
    """The MLP split over tp, its rows dealt to dp; gradients brought together for the audit."""
    model, mesh = small(), layout.mesh()
    block = model.blocks[0]
    tp, dp, place = mesh.get_group("tp"), mesh.get_group("dp"), layout.place(dist.get_rank())["tp"]
    rows = slice(place * 24 // layout.tp, (place + 1) * 24 // layout.tp)

    def forward(ids):
        hidden = model.embedding(ids)
        x = CopyToRanks.apply(block.norm(hidden), tp, sums)
        inside = torch.tanh(x @ block.up.weight[rows].T + block.up.bias[rows])
        out = SumOverRanks.apply(inside @ block.down.weight[:, rows].T, tp) + block.down.bias
        return model.head(hidden + out)

    def loss(_, batch):
        return mean_loss(forward, batch)

    def reduce(*_):
        for name, p in model.named_parameters():
            if name.startswith("blocks.0.up.") or name == "blocks.0.down.weight":
                dist.all_reduce(p.grad, group=tp)  # each rank has the gradient of its own rows, and zeros
            if not bias_once and name == "blocks.0.down.bias":
                dist.all_reduce(p.grad, group=tp)
            dist.all_reduce(p.grad, group=dp)
            p.grad /= layout.dp

    optimizer = sgd(model)
    optimizer.register_step_pre_hook(reduce)
    return model, optimizer, loss, part_of(layout, dist.get_rank())
