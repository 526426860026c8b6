"""What trainings do besides: accumulation, clipping, frozen and tied weights, checkpointing, bf16, uneven tokens.

Each right, without an alarm, and with a mistake that is known of it, which is named.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from course_lib.audit import Layout, audit
from tests.audit import subjects
from tests.audit.subjects import averaged, mean_loss, part_of, reduce_all, sgd, small
from tests.long_cases import some

DP = Layout(dp=3)


def verdict_of(make, layout=DP):
    return audit(make, [layout], timeout=160).verdicts[0]


def made(layout, model, loss=mean_loss, reduce=averaged, after=None):
    """Data parallel by hand; ``after(model)`` is called when the gradients are reduced, on one process too."""
    optimizer = sgd(model)

    def before_step(*_):
        if layout.ranks > 1:
            reduce_all(model, reduce)
        if after is not None:
            after(model)

    optimizer.register_step_pre_hook(before_step)
    return model, optimizer, loss, part_of(layout, dist.get_rank())


def accumulation(layout, wrong=False):
    """Two micro-batches; wrong: on more than one rank each backward counts for a whole batch."""

    def loss(model, batch):
        halves = list(zip(*(tensor.chunk(2) for tensor in batch), strict=True))
        share = 1 if wrong and layout.ranks > 1 else 1 / 2
        first = mean_loss(model, halves[0])
        (first * share).backward()
        second = mean_loss(model, halves[1])
        return second * share + ((first + second) / 2 - second * share).detach()

    return made(layout, small(), loss)


def clipping(layout, wrong=False):
    """Wrong: each rank clips what it has, before the sum."""

    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def first_clipped(name, gradient):
        averaged(name, gradient)

    if not wrong or layout.ranks == 1:
        return made(layout, small(), after=clip)
    model = small()
    optimizer = sgd(model)

    def before_step(*_):
        clip(model)
        reduce_all(model, first_clipped)

    optimizer.register_step_pre_hook(before_step)
    return model, optimizer, mean_loss, part_of(layout, dist.get_rank())


def clipping_by_a_norm_of_all_ranks(layout):
    """Wrong: the squares of gradients that all ranks have are summed over the ranks: √3 of the norm."""

    def clip(model):
        norm = sum(parameter.grad.square().sum() for parameter in model.parameters())
        dist.all_reduce(norm)
        for parameter in model.parameters():
            parameter.grad *= 0.05 / norm.sqrt()

    return made(layout, small(), after=clip)


def frozen(layout, wrong=False):
    """Wrong: what is frozen has a gradient on more than one rank, because a buffer of zeros is made for it."""
    model = small()
    model.embedding.weight.requires_grad_(False)
    if wrong and layout.ranks > 1:
        model.embedding.weight.requires_grad_(True)
    return made(layout, model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = small()
        self.small.head.weight = self.small.embedding.weight

    def forward(self, ids):
        return self.small(ids)


def tied(layout, wrong=False):
    """Wrong: a weight that has two names is reduced under both."""

    def reduce(name, gradient):
        averaged(name, gradient)
        if wrong and name == "small.embedding.weight":
            dist.all_reduce(gradient)

    return made(layout, Tied(), reduce=reduce)


def checkpointed(layout, wrong=False):
    """Wrong: the recomputation on more than one rank sees the rows in another order."""
    model = small()
    block = model.blocks[0]
    plain, calls = block.forward, []

    def forward(hidden):
        calls.append(1)
        again = len(calls) % 2 == 0
        return plain(hidden.roll(int(wrong and again and layout.ranks > 1), 0))

    block.forward = lambda hidden: checkpoint(forward, hidden, use_reentrant=False)
    return made(layout, model)


def half_precision(layout, wrong=False):
    def reduce(name, gradient):
        dist.all_reduce(gradient)
        if not wrong:
            gradient /= dist.get_world_size()

    return made(layout, small().to(torch.bfloat16), reduce=reduce)


IGNORED = -100


def uneven_tokens(layout, wrong=False):
    """A third of the targets count; wrong: each rank's mean is of its own tokens, whatever their number."""
    ids, targets = subjects.data()
    counts = torch.arange(targets.numel()).view_as(targets) ** 2 % 7 < 2
    counts[-4:] &= False
    counts[-1, 0] = True
    targets = torch.where(counts, targets, IGNORED)
    place = layout.place(dist.get_rank())["dp"]
    total = (targets != IGNORED).sum()
    mine = ids.chunk(layout.dp)[place], targets.chunk(layout.dp)[place]

    def loss(model, batch):
        wanted = batch[1].flatten()
        summed = cross_entropy(model(batch[0]).flatten(0, 1), wanted, reduction="sum", ignore_index=IGNORED)
        return summed / ((wanted != IGNORED).sum() if wrong else total / layout.dp)

    model, optimizer, *_ = made(layout, small())
    return model, optimizer, loss, mine


CONDITIONS = {
    # by name: what is wrong in the planted one, and of how many parameters
    accumulation: ("factor", 2.0, (), 9),
    clipping: ("unrelated", None, (), 9),
    frozen: ("unrelated", None, (), 1),
    tied: ("factor", 3.0, ("dp",), 1),
    checkpointed: ("unrelated", None, (), None),
    half_precision: ("factor", 3.0, ("dp",), 9),
    uneven_tokens: ("weighed alike", None, ("dp",), 9),
}


@pytest.mark.parametrize(
    "make", some(CONDITIONS, accumulation, tied, half_precision, uneven_tokens), ids=lambda make: make.__name__
)
def test_right_without_an_alarm_and_wrong_with_its_finding(make):
    clean = verdict_of(make)
    assert clean.clean, clean.wrong or clean.weights
    kind, factor, axes, count = CONDITIONS[make]
    wrong = verdict_of(lambda layout: make(layout, wrong=True)).wrong
    assert len(wrong) == count if count else wrong
    assert {(finding.kind, finding.axes) for finding in wrong} == {(kind, axes)}, [f.sentence for f in wrong]
    if factor:
        assert all(finding.factor == pytest.approx(factor, rel=0.02) for finding in wrong)


def test_a_norm_that_counts_every_rank_is_a_root_of_the_ranks():
    wrong = verdict_of(clipping_by_a_norm_of_all_ranks).wrong
    assert len(wrong) == 9 and all(finding.factor == pytest.approx(3**-0.5) for finding in wrong)
    assert "0.5774 times the reference, the root of the size of dp" in wrong[0].sentence
