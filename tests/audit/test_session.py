"""The audit on engines that are right, and on wrong ones: each named by parameter, factor and axis."""

import functools
import json

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib.audit import Layout, audit, layouts, report
from course_lib.errors import CourseError
from tests.audit import subjects


def verdicts(make, *chosen):
    return audit(make, chosen or [Layout(dp=2), Layout(dp=3)], timeout=240).verdicts


@pytest.mark.parametrize("name", subjects.ENGINES)
def test_no_alarm_over_our_engines(name):
    for verdict in verdicts(functools.partial(subjects.ours, name)):
        assert verdict.clean, verdict.wrong or verdict.weights


@pytest.mark.parametrize("make", [subjects.torchs_ddp, subjects.torchs_fsdp, subjects.right])
def test_no_alarm_over_torchs_engines_and_a_right_loop(make):
    for verdict in verdicts(make):
        assert verdict.clean, verdict.wrong or verdict.weights


def test_no_alarm_over_hybrid_sharding_and_tensor_parallelism():
    assert verdicts(subjects.torchs_fsdp, Layout(dp=2, shard=2))[0].clean
    for verdict in verdicts(subjects.tensor_parallel, Layout(tp=2), Layout(dp=2, tp=3)):
        assert verdict.clean, verdict.wrong


def test_a_sum_for_a_mean_is_the_size_of_its_axis_and_no_loss_shows_it_under_adam():
    for verdict, size in zip(verdicts(subjects.summed), (2, 3), strict=True):
        assert {(f.kind, round(f.factor, 9), f.axes) for f in verdict.wrong} == {("factor", size, ("dp",))}
        assert verdict.norm[0] == pytest.approx(size * verdict.norm[1]) and verdict.weights
    for verdict in verdicts(subjects.summed_under_adam):
        assert len(verdict.wrong) == 9 and verdict.losses_agree and not verdict.weights
        assert max(verdict.loss_apart, verdict.weights_apart) < 1e-9


def test_a_division_too_many():
    verdict = verdicts(subjects.divided_twice, Layout(dp=3))[0]
    assert {(f.kind, round(1 / f.factor, 9), f.axes) for f in verdict.wrong} == {("factor", 3, ("dp",))}
    assert "`embedding.weight`: 0.3333 times the reference, the size of dp: divided by it once too often" in (
        verdict.wrong[0].sentence
    )


@pytest.mark.parametrize(
    ("make", "name", "kind", "words"),
    [
        (subjects.one_left_out, "blocks.0.norm.bias", "not averaged", "average"),
        (subjects.sign, "head.weight", "sign", "the sign is wrong"),
        (
            subjects.last_rank_has_its_own,
            "blocks.0.up.weight",
            "not averaged",
            "right on 2 of 3 ranks; rank 2 has the gradient of its own batch alone: the reduction over dp is missing "
            "there",
        ),
        (
            subjects.half_of_a_shard,
            "blocks.0.down.weight",
            "shard",
            "right except for part 2 of 3 along its dimension 0",
        ),
        (subjects.frozen_by_mistake, "head.bias", "missing", "no rank has a gradient"),
    ],
)
def test_what_is_wrong_with_one_parameter(make, name, kind, words):
    verdict = verdicts(make, Layout(dp=3))[0]
    assert [(f.name, f.kind) for f in verdict.wrong] == [(name, kind)]
    assert words in verdict.wrong[0].sentence, verdict.wrong[0].sentence


def test_gradients_in_each_others_places():
    wrong = verdicts(subjects.swapped, Layout(dp=2))[0].wrong
    assert [f.sentence for f in wrong] == [
        "`blocks.0.norm.weight`: has the gradient of `blocks.0.norm.bias`",
        "`blocks.0.norm.bias`: has the gradient of `blocks.0.norm.weight`",
    ]


def test_a_mean_of_means_is_weights_and_one_sentence_over_all():
    verdict = verdicts(subjects.uneven_rows, Layout(dp=2))[0]
    assert {f.kind for f in verdict.wrong} == {"weighed alike"} and len(verdict.wrong) == 9
    (told,) = verdict.told
    assert told.startswith(
        "`embedding.weight`, `blocks.0.norm.weight`, `blocks.0.norm.bias` and 6 more: the ranks' "
        "batches weigh alike, and in one process 0.0833, 0.917"
    )
    assert verdict.loss_is == "weighed by their rows the ranks' losses are that of one process"


def shares(layout, times=1):
    """Each rank's loss is its share of the mean over all, and gradients are summed; ``times`` scales what is told."""

    def share(model, batch):
        mean = subjects.mean_loss(model, batch) / layout.dp
        return mean + (times - 1) * mean.detach()

    return subjects.by_hand(layout, lambda name, gradient: dist.all_reduce(gradient), loss=share)


def test_losses_that_are_shares_are_recognised_and_no_other_factor():
    for verdict in verdicts(shares):
        assert verdict.clean and verdict.loss_is == (
            "each rank's loss is a share: added up over dp they are the loss of one process"
        )
    (verdict,) = verdicts(lambda layout: shares(layout, times=5 if layout.ranks > 1 else 1), Layout(dp=2))
    assert not verdict.clean and not verdict.wrong and not verdict.loss_is
    assert "no mean or sum over the ranks is that of one process" in list(report.sentences(verdict))[-1]


def test_products_of_axes_are_told_from_one_of_two():
    def scaled(layout, by):
        def reduce(name, gradient):
            averaged = gradient / dist.get_world_size()
            dist.all_reduce(averaged)
            gradient.copy_(averaged * (by if layout.ranks > 1 else 1))

        return subjects.by_hand(layout, reduce)

    def all_are(layout):
        return {
            (f.axes, f.sentence.partition(": ")[2])
            for f in verdicts(functools.partial(scaled, by=4 if layout.dp * layout.shard == 4 else 2), layout)[0].wrong
        }

    ((axes, words),) = all_are(Layout(dp=2, shard=2))
    assert axes == ("dp", "shard") and words.startswith("4 times the reference, the size of dp and shard together: ")


class Dropping(subjects.Small):
    """With dropout of a module, or of a function."""

    def __init__(self, function):
        super().__init__()
        self.function, self.drop = function, torch.nn.Dropout(0.5)

    def forward(self, ids):
        hidden = self.blocks[0](self.embedding(ids))
        return self.head(torch.nn.functional.dropout(hidden, 0.5) if self.function else self.drop(hidden))


def dropping(layout, function=False):
    torch.manual_seed(0)
    model = Dropping(function).double()
    return (
        DistributedDataParallel(model),
        subjects.sgd(model),
        subjects.mean_loss,
        subjects.part_of(layout, dist.get_rank()),
    )


def test_dropout_is_switched_off_where_it_is_a_module_and_refused_elsewhere():
    """A right DDP program: each rank draws its own masks, and no rank those of one process."""
    audited = audit(dropping, [Layout(dp=2)])
    assert audited.clean and "dropout is switched off (modules: 1)" in next(report.lines(audited))
    with pytest.raises(
        CourseError,
        match="the step draws at random: with another seed one process has another "
        "gradient of `embedding.weight`: switch off what draws",
    ):
        audit(functools.partial(dropping, function=True), [Layout(dp=2)])


def test_a_loss_that_reaches_no_weight_or_is_not_finite_is_refused():
    def detached(layout, factor=0.0):
        return subjects.by_hand(
            layout, subjects.averaged, loss=lambda model, batch: factor * subjects.mean_loss(model, batch)
        )

    with pytest.raises(CourseError, match="the loss reaches no weight: all 9 gradients of one process are zero"):
        audit(detached, [Layout(dp=2)])
    with pytest.raises(CourseError, match="one process has a gradient of `embedding.weight` that is not finite"):
        audit(functools.partial(detached, factor=float("inf")), [Layout(dp=2)])
    ones = functools.partial(subjects.by_hand, reduce=lambda name, gradient: gradient.div_(gradient * 0))
    (verdict,) = verdicts(ones, Layout(dp=2))
    assert {f.kind for f in verdict.wrong} == {"not finite"} and verdict.weights and not verdict.clean
    assert verdict.told[0].endswith("ranks 0, 1 have one that is not finite, and one process does not")


def test_gradients_that_are_zero_are_called_so():
    """As by a zero_grad() before the step; the batches, none of which has a part in them, do not weigh alike."""
    (verdict,) = verdicts(
        functools.partial(subjects.by_hand, reduce=lambda name, gradient: gradient.zero_(), uneven=True), Layout(dp=2)
    )
    assert verdict.told == [
        "`embedding.weight`, `blocks.0.norm.weight`, `blocks.0.norm.bias` and 6 more: is zero on "
        "every rank, and in one process it is not"
    ]


def without_targets(layout):
    """Rank 0 has no target that counts: the mean of its own is no number, and its share is zero."""

    def loss(model, batch):
        ids, targets = batch
        summed = torch.nn.functional.cross_entropy(
            model(ids).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
        )
        return summed / (targets != -100).sum()

    model, optimizer, _, (ids, targets) = subjects.by_hand(
        layout,
        lambda name, gradient: gradient.copy_(torch.linspace(0, 1, gradient.numel()).view_as(gradient)),
        loss=loss,
    )
    ignored = torch.full_like(targets, -100) if layout.ranks > 1 and dist.get_rank() == 0 else targets
    return model, optimizer, lambda m, b: loss(m, b) if (b[1] != -100).any() else 0 * m(b[0]).sum(), (ids, ignored)


def test_a_batch_whose_own_gradient_is_none_explains_nothing_and_breaks_nothing():
    (verdict,) = verdicts(without_targets, Layout(dp=2))
    assert {f.kind for f in verdict.wrong} == {"unrelated"}


def test_json_is_json_where_something_is_infinite():
    audited = audit(
        functools.partial(subjects.by_hand, reduce=lambda name, gradient: gradient.div_(gradient * 0)), [Layout(dp=2)]
    )
    told = json.loads(report.as_json(audited), parse_constant=pytest.fail)
    assert {finding["apart"] for finding in told["verdicts"][0]["gradients"]} == {None}


def test_what_one_layout_raises_is_its_own_line():
    def breaks(layout):
        if layout.dp == 3:
            raise ValueError("not with three")
        return subjects.right(layout)

    audited = audit(breaks, layouts(4, ("dp",)))
    assert [v.layout.dp for v in audited.verdicts] == [2, 4] and all(v.clean for v in audited.verdicts)
    assert not audited.clean and "raised ValueError: not with three" in audited.failed[Layout(dp=3)]
    assert list(report.lines(audited))[3].startswith("dp3               failed: rank")


def test_the_axis_of_a_missing_sum_in_a_layout_of_two():
    """Megatron's f without its all-reduce: what lies below it has, on each tensor rank, its own part."""
    verdict = verdicts(functools.partial(subjects.tensor_parallel, sums=False), Layout(dp=2, tp=3))[0]
    assert {f.name: (f.kind, f.axes) for f in verdict.wrong if "norm" in f.name} == {
        "blocks.0.norm.weight": ("not summed", ("tp",)),
        "blocks.0.norm.bias": ("not summed", ("tp",)),
    }
    assert {f.name for f in verdict.wrong} == {"blocks.0.norm.weight", "blocks.0.norm.bias", "embedding.weight"}
    twice = verdicts(functools.partial(subjects.tensor_parallel, bias_once=False), Layout(dp=2, tp=3))[0]
    assert [(f.name, round(f.factor, 9), f.axes) for f in twice.wrong] == [("blocks.0.down.bias", 3, ("tp",))]
    assert twice.losses_agree is False, "the second step is made with what the first one did"


def test_a_loss_that_is_told_wrong_over_right_gradients_is_seen_in_any_dtype():
    def told(layout, dtype):
        model, optimizer, loss, batch = subjects.right(layout)
        off = 0.001 if dist.get_world_size() > 1 else 0.0
        return model.to(dtype), optimizer, lambda m, b: loss(m, b) + off, batch

    for dtype in (torch.float64, torch.float32):
        (verdict,) = verdicts(functools.partial(told, dtype=dtype), Layout(dp=2))
        assert not verdict.wrong and not verdict.losses_agree and not verdict.clean
        assert verdict.losses_apart == pytest.approx([0.001 / 2.9] * 2, rel=0.2)


def test_what_cannot_be_judged_is_refused_in_one_line():
    def draws(layout):
        torch.manual_seed(torch.seed() % 2**31)
        return subjects.right(layout)

    def drops(layout):
        model, optimizer, _, batch = subjects.right(layout)
        torch.seed()
        return model, optimizer, lambda m, b: subjects.mean_loss(m, b) * torch.rand(()).double(), batch

    def differs(layout):
        model, *rest = subjects.right(layout)
        if dist.get_rank():
            torch.nn.init.zeros_(model.head.bias)
        return model, *rest

    def nothing(layout):
        return 7

    def never(layout):
        raise NotImplementedError("only one process")

    def seeds_itself_anew(layout):
        model, optimizer, _, batch = subjects.right(layout)
        return model, optimizer, lambda m, b: torch.seed() * 0 + subjects.mean_loss(m, b) * torch.rand(()), batch

    with pytest.raises(CourseError, match="two runs of one process differ in the gradient of `embedding.weight`"):
        audit(seeds_itself_anew, [Layout(dp=2)])
    with pytest.raises(CourseError, match="the step draws at random"):
        audit(drops, [Layout(dp=2)])
    with pytest.raises(CourseError, match="`head.bias` begins with other values on rank 1 of dp2 than in one process"):
        audit(differs, [Layout(dp=2)])

    def hangs(layout):
        if dist.get_rank():
            dist.barrier()
        return subjects.right(layout)

    def breaks(layout):
        return subjects.right(layout)[:3] + ((torch.ones(2), torch.ones(3)),)

    where = r"one process: rank 0 raised RuntimeError.*subjects.py\", line \d+, in forward\)"
    with pytest.raises(CourseError, match=where):
        audit(breaks, [Layout(dp=2)])
    with pytest.raises(CourseError, match="dp2: 2 ranks were still running after 4 s and have been ended: call each"):
        audit(hangs, [Layout(dp=2)], timeout=4)
    with pytest.raises(CourseError, match="`make` gave int"):
        audit(nothing, [Layout(dp=2)])
    partly = audit(lambda layout: subjects.right(layout) if layout.ranks < 3 else never(layout), layouts(3, ("dp",)))
    assert partly.refused == {Layout(dp=3): "only one process"} and partly.clean
    assert audit(draws, [Layout(dp=2)]).clean, "the model is made from its own seed"


def test_layouts_whose_axes_differ_in_size_come_first():
    found = layouts(6, ("dp", "tp"))
    assert all(2 <= layout.ranks <= 6 for layout in found) and len(found) == len(set(found)) == 13
    both = [layout for layout in found if len(layout.used) == 2]
    assert both[-1] == Layout(dp=2, tp=2)
    assert {str(layout) for layout in both} == {"dp2 × tp2", "dp2 × tp3", "dp3 × tp2"}
    layout = Layout(dp=2, tp=3)
    assert layout.together(("tp",)) == [[0, 1, 2], [3, 4, 5]] and layout.together(("dp",)) == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(CourseError, match="unknown axis 'x'"):
        layouts(4, ("x",))
