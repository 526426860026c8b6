"""What trainings do besides: clipping, frozen and tied weights, checkpointing.

Each right, without an alarm, and with a mistake that is known of it, which is named. Accumulation, bf16 and uneven
tokens are drawn in test_programs.py.
"""

import functools

import pytest
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.audit import Layout, audit
from tests.audit.subjects import averaged, mean_loss, part_of, reduce_all, sgd, small
from tests.audit.upstream import squares_of_all_ranks
from tests.long_cases import some

DP = Layout(dp=3)


def verdict_of(make):
    return audit(make, [DP], timeout=160).verdicts[0]


def made(layout, model, reduce=averaged, before=None, after=None):
    """Data parallel by hand; ``before`` and ``after`` take the model ahead of the reduction and behind it."""
    optimizer = sgd(model)

    def before_step(*_):
        for step in (before, functools.partial(reduce_all, reduce=reduce) if layout.ranks > 1 else None, after):
            if step is not None:
                step(model)

    optimizer.register_step_pre_hook(before_step)
    return model, optimizer, mean_loss, part_of(layout, dist.get_rank())


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clipping(layout, wrong=False):
    """Wrong: each rank clips what it has, before the sum."""
    return made(layout, small(), **{"before" if wrong and layout.ranks > 1 else "after": clip})


def frozen(layout, wrong=False):
    """Wrong: what is frozen has a gradient on more than one rank, because a buffer of zeros is made for it."""
    model = small()
    model.embedding.weight.requires_grad_(wrong and layout.ranks > 1)
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

    return made(layout, Tied(), reduce)


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


CONDITIONS = {  # what is wrong in the planted one, and of how many parameters
    clipping: ("unrelated", None, (), 9),
    frozen: ("unrelated", None, (), 1),
    tied: ("factor", 3.0, ("dp",), 1),
    checkpointed: ("unrelated", None, (), None),
}


@pytest.mark.parametrize("make", some(CONDITIONS, tied), ids=lambda make: make.__name__)
def test_right_without_an_alarm_and_wrong_with_its_finding(make):
    clean = verdict_of(make)
    assert clean.clean, clean.wrong or clean.weights
    kind, factor, axes, count = CONDITIONS[make]
    wrong = verdict_of(functools.partial(make, wrong=True)).wrong
    assert {(finding.kind, finding.axes) for finding in wrong} == {(kind, axes)}, [f.sentence for f in wrong]
    assert count in (None, len(wrong))
    if factor:
        assert [finding.factor for finding in wrong] == pytest.approx([factor] * count)


def test_a_norm_that_counts_every_rank_is_a_root_of_the_ranks():
    wrong = verdict_of(squares_of_all_ranks).wrong
    assert [finding.factor for finding in wrong] == pytest.approx([3**-0.5] * 9)
    assert "0.5774 times the reference, the root of the size of dp" in wrong[0].sentence
