"""The audit on engines that are right, and on wrong ones: each named by parameter, factor and axis."""

import functools
import json

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from course_lib.audit import Layout, audit, layouts, report
from course_lib.errors import CourseError
from tests.audit import subjects
from tests.audit.subjects import by_hand, mean_loss, right, tensor_parallel

DP2, DP3, TWO_AXES = Layout(dp=2), Layout(dp=3), Layout(dp=2, tp=3)
FIRST = "`embedding.weight`, `blocks.0.norm.weight`, `blocks.0.norm.bias` and 6 more: "


def verdict_of(make, layout=DP2, **options):
    (verdict,) = audit(functools.partial(make, **options) if options else make, [layout], timeout=240).verdicts
    return verdict


def claims(verdict):
    return {(finding.kind, finding.factor and round(finding.factor, 9), finding.axes) for finding in verdict.wrong}


ALL_RIGHT = [(functools.partial(subjects.ours, name), layout) for name in subjects.ENGINES for layout in (DP2, DP3)]
ALL_RIGHT += [(make, layout) for make in (subjects.torchs_ddp, subjects.torchs_fsdp, right) for layout in (DP2, DP3)]
ALL_RIGHT += [
    (subjects.torchs_fsdp, Layout(dp=2, shard=2)),
    (tensor_parallel, Layout(tp=2)),
    (tensor_parallel, TWO_AXES),
]


@pytest.mark.parametrize(("make", "layout"), ALL_RIGHT)
def test_no_alarm_over_right_engines(make, layout):
    verdict = verdict_of(make, layout)
    assert verdict.clean, verdict.wrong or verdict.weights


@pytest.mark.parametrize(("layout", "size"), [(DP2, 2), (DP3, 3)])
def test_a_sum_for_a_mean_is_the_size_of_its_axis_and_no_loss_shows_it_under_adam(layout, size):
    verdict = verdict_of(subjects.summed, layout)
    assert claims(verdict) == {("factor", size, ("dp",))} and verdict.weights
    assert verdict.norm[0] == pytest.approx(size * verdict.norm[1])
    under_adam = verdict_of(subjects.summed_under_adam, layout)
    assert len(under_adam.wrong) == 9 and under_adam.losses_agree and not under_adam.weights
    assert (under_adam.loss_apart, under_adam.weights_apart) == pytest.approx((0, 0), abs=1e-9)


def test_a_division_too_many():
    verdict = verdict_of(subjects.divided_twice, DP3)
    assert claims(verdict) == {("factor", round(1 / 3, 9), ("dp",))}
    said = "`embedding.weight`: 0.3333 times the reference, the size of dp: divided by it once too often"
    assert said in verdict.wrong[0].sentence


ONE_PARAMETER = {
    subjects.one_left_out: ("blocks.0.norm.bias", "not averaged", "average"),
    subjects.last_rank_has_its_own: (
        "blocks.0.up.weight",
        "not averaged",
        "right on 2 of 3 ranks; rank 2 has the gradient of its own batch alone: the reduction over dp is missing there",
    ),
    subjects.half_of_a_shard: ("blocks.0.down.weight", "shard", "right except for part 2 of 3 along its dimension 0"),
    subjects.frozen_by_mistake: ("head.bias", "missing", "no rank has a gradient"),
}


@pytest.mark.parametrize("make", ONE_PARAMETER)
def test_what_is_wrong_with_one_parameter(make):
    name, kind, words = ONE_PARAMETER[make]
    (finding,) = verdict_of(make, DP3).wrong
    assert (finding.name, finding.kind) == (name, kind) and words in finding.sentence


def test_gradients_in_each_others_places():
    assert [finding.sentence for finding in verdict_of(subjects.swapped).wrong] == [
        "`blocks.0.norm.weight`: has the gradient of `blocks.0.norm.bias`",
        "`blocks.0.norm.bias`: has the gradient of `blocks.0.norm.weight`",
    ]


def test_a_mean_of_means_is_weights_and_one_sentence_over_all():
    verdict = verdict_of(subjects.uneven_rows)
    assert claims(verdict) == {("weighed alike", None, ("dp",))} and len(verdict.wrong) == 9
    (told,) = verdict.told
    assert told.startswith(f"{FIRST}the ranks' batches weigh alike, and in one process 0.0833, 0.917")
    assert verdict.loss_is == "weighed by their rows the ranks' losses are that of one process"


def test_the_axis_of_a_missing_sum_in_a_layout_of_two():
    """Megatron's f without its all-reduce: what lies below it has, on each tensor rank, its own part."""
    kinds = {f.name: (f.kind, f.axes) for f in verdict_of(tensor_parallel, TWO_AXES, sums=False).wrong}
    assert kinds.pop("embedding.weight")
    assert kinds == dict.fromkeys(("blocks.0.norm.weight", "blocks.0.norm.bias"), ("not summed", ("tp",)))
    twice = verdict_of(tensor_parallel, TWO_AXES, bias_once=False)
    assert [finding.name for finding in twice.wrong] == ["blocks.0.down.bias"]
    assert claims(twice) == {("factor", 3, ("tp",))}
    assert twice.losses_agree is False, "the second step is made with what the first one did"


def test_products_of_axes_are_told_from_one_of_two():
    def four_times(gradient, own):
        gradient *= 4

    verdict = verdict_of(subjects.changed, Layout(dp=2, shard=2), change=four_times)
    assert claims(verdict) == {("factor", 4, ("dp", "shard"))}
    assert ": 4 times the reference, the size of dp and shard together: " in verdict.wrong[0].sentence


# --- losses ---


def shares(layout, times=1):
    """Each rank's loss is its share of the mean over all, and gradients are summed; ``times`` scales what is told."""

    def share(model, batch):
        mean = mean_loss(model, batch) / layout.dp
        return subjects.told_as(mean, mean * (times if layout.ranks > 1 else 1))

    return by_hand(layout, lambda name, gradient: dist.all_reduce(gradient), loss=share)


def test_losses_that_are_shares_are_recognised_and_no_other_factor():
    verdict = verdict_of(shares, DP3)
    assert verdict.clean
    assert verdict.loss_is == "each rank's loss is a share: added up over dp they are the loss of one process"
    verdict = verdict_of(shares, times=5)
    assert not verdict.clean and not verdict.wrong and not verdict.loss_is
    assert "no mean or sum over the ranks is that of one process" in list(report.sentences(verdict))[-1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loss_that_is_told_wrong_over_right_gradients_is_seen_in_any_dtype(dtype):
    def told(layout):
        model, optimizer, loss, batch = right(layout)
        off = 0.001 if dist.get_world_size() > 1 else 0.0
        return model.to(dtype), optimizer, lambda m, b: loss(m, b) + off, batch

    verdict = verdict_of(told)
    assert not verdict.wrong and not verdict.losses_agree and not verdict.clean
    assert verdict.losses_apart == pytest.approx([0.001 / 2.9] * 2, rel=0.2)


# --- gradients that are no numbers, or zero ---


def infinite(layout):
    return by_hand(layout, lambda name, gradient: gradient.div_(gradient * 0))


def test_what_is_not_finite_is_told_and_written_as_json():
    audited = audit(infinite, [DP2])
    (verdict,) = audited.verdicts
    assert {f.kind for f in verdict.wrong} == {"not finite"} and verdict.weights and not verdict.clean
    assert verdict.told[0].endswith("ranks 0, 1 have one that is not finite, and one process does not")
    told = json.loads(report.as_json(audited), parse_constant=pytest.fail)
    assert {finding["apart"] for finding in told["verdicts"][0]["gradients"]} == {None}


def test_gradients_that_are_zero_are_called_so():
    """As by a zero_grad() before the step; the batches, none of which has a part in them, do not weigh alike."""
    verdict = verdict_of(by_hand, reduce=lambda name, gradient: gradient.zero_(), uneven=True)
    assert verdict.told == [f"{FIRST}is zero on every rank, and in one process it is not"]


def without_targets(layout):
    """Rank 0 has no target that counts: the mean of its own is no number, and its share is zero."""

    def loss(model, batch):
        logits, targets = model(batch[0]).flatten(0, 1), batch[1].flatten()
        if (targets == -100).all():
            return 0 * logits.sum()
        return cross_entropy(logits, targets, reduction="sum", ignore_index=-100) / (targets != -100).sum()

    def reduce(name, gradient):
        gradient.copy_(torch.linspace(0, 1, gradient.numel()).view_as(gradient))

    model, optimizer, _, (ids, targets) = by_hand(layout, reduce)
    if layout.ranks > 1 and dist.get_rank() == 0:
        targets = torch.full_like(targets, -100)
    return model, optimizer, loss, (ids, targets)


def test_a_batch_whose_own_gradient_is_none_explains_nothing_and_breaks_nothing():
    assert {finding.kind for finding in verdict_of(without_targets).wrong} == {"unrelated"}


# --- what cannot be judged ---


def of_loss(layout, change):
    """``change(loss)`` is what is trained."""
    return by_hand(layout, subjects.averaged, loss=lambda model, batch: change(mean_loss(model, batch)))


def draws(loss):
    return loss * torch.rand(()).double()


def seeds_itself_anew(loss):
    torch.seed()
    return draws(loss)


def differs(layout):
    model, *rest = right(layout)
    if dist.get_rank():
        torch.nn.init.zeros_(model.head.bias)
    return model, *rest


def breaks(layout):
    return right(layout)[:3] + ((torch.ones(2), torch.ones(3)),)


def hangs(layout):
    if dist.get_rank():
        dist.barrier()
    return right(layout)


REFUSED = {
    functools.partial(of_loss, change=lambda loss: 0.0 * loss): "the loss reaches no weight: all 9 gradients of one",
    functools.partial(of_loss, change=lambda loss: loss * float("inf")): "gradient of `embedding.weight` that is not f",
    functools.partial(of_loss, change=seeds_itself_anew): "two runs of one process differ in the gradient of `embed",
    functools.partial(of_loss, change=draws): "the step draws at random: with another seed one process has another "
    "gradient of `embedding.weight`: switch off what draws",
    differs: "`head.bias` begins with other values on rank 1 of dp2 than in one process",
    breaks: r"one process: rank 0 raised RuntimeError.*subjects.py\", line \d+, in forward\)",
    hangs: "dp2: 2 ranks were still running after 4 s and have been ended: call each",
    lambda layout: 7: "`make` gave int",
}


@pytest.mark.parametrize("make", REFUSED)
def test_what_cannot_be_judged_is_refused_in_one_line(make):
    with pytest.raises(CourseError, match=REFUSED[make]):
        audit(make, [DP2], timeout=4 if make is hangs else 240)


def test_a_model_is_made_from_its_own_seed():
    def seeded(layout):
        torch.manual_seed(torch.seed() % 2**31)
        return right(layout)

    assert verdict_of(seeded).clean


def raising(error):
    """Right, except on three ranks."""

    def make(layout):
        if layout.dp == 3:
            raise error
        return right(layout)

    return audit(make, layouts(4, ("dp",)))


def test_what_one_layout_raises_is_its_own_line_and_what_it_does_not_do_no_failure():
    failed = raising(ValueError("not with three"))
    assert [v.layout.dp for v in failed.verdicts] == [2, 4] and all(v.clean for v in failed.verdicts)
    assert not failed.clean and "raised ValueError: not with three" in failed.failed[DP3]
    assert list(report.lines(failed))[3].startswith("dp3               failed: rank")
    refused = raising(NotImplementedError("only two or four"))
    assert refused.refused == {DP3: "only two or four"} and refused.clean


def test_layouts_whose_axes_differ_in_size_come_first():
    found = layouts(6, ("dp", "tp"))
    assert all(2 <= layout.ranks <= 6 for layout in found) and len(set(found)) == len(found) == 13
    both = [str(layout) for layout in found if len(layout.used) == 2]
    assert set(both[:-1]) == {"dp2 × tp3", "dp3 × tp2"} and both[-1] == "dp2 × tp2"
    assert TWO_AXES.together(("tp",)) == [[0, 1, 2], [3, 4, 5]]
    assert TWO_AXES.together(("dp",)) == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(CourseError, match="unknown axis 'x'"):
        layouts(4, ("x",))
