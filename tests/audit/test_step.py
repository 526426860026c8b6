"""One step of a training loop, audited in the job that runs it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from course_lib.audit import GradientDiffers, Layout, Reference, step
from course_lib.errors import CourseError
from tests.audit import subjects
from tests.ranks import on_ranks
from tests.torch_versions import FSDP2_ON_CPUS, needs

REFERENCE = Reference(subjects.small, subjects.mean_loss)


def loop(wrap, reference=REFERENCE, average=True, clip=None):
    """Somebody's loop: two steps, the second one audited."""
    layout = Layout(dp=dist.get_world_size())
    model = wrap(subjects.small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = subjects.part_of(layout, dist.get_rank())

    def train():
        loss = subjects.mean_loss(model, batch)
        loss.backward()
        if not average:
            for parameter in model.parameters():
                parameter.grad *= dist.get_world_size()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train()
    with step(model, reference, batch=batch, strict=False) as audited:
        audited.loss = train()
    return audited.verdict


@pytest.mark.parametrize("wrap", [DistributedDataParallel, pytest.param(fully_shard, marks=needs(FSDP2_ON_CPUS))])
@on_ranks(3)
def test_a_right_step_raises_no_alarm(wrap):
    verdict = loop(wrap)
    assert verdict.clean and len(verdict.gradients) == 9


@on_ranks(3)
def test_a_sum_for_a_mean_is_named():
    verdict = loop(DistributedDataParallel, average=False)
    assert {(f.kind, round(f.factor, 9), f.axes) for f in verdict.wrong} == {("factor", 3, ("dp",))}
    assert verdict.losses_agree


@on_ranks(2)
def test_a_clipped_gradient_is_compared_with_a_clipped_one():
    clipped = Reference(subjects.small, subjects.mean_loss, clip=0.01)
    assert loop(DistributedDataParallel, clipped, clip=0.01).clean
    assert not loop(DistributedDataParallel, REFERENCE, clip=0.01).clean


def test_it_raises_what_it_found_and_refuses_what_it_cannot_judge():
    """In a process without ranks too."""
    model, batch = subjects.small(), subjects.data()

    def refused(error, match, loss=None, reference=REFERENCE, **options):
        model.zero_grad()
        with pytest.raises(error, match=match), step(model, reference, batch=batch, **options):
            if loss is not None:
                loss(model, batch).backward()

    with step(model, REFERENCE, batch=batch):
        subjects.mean_loss(model, batch).backward()
    told = "one process: `embedding.weight`, .* and 6 more: 2 times the reference, the size of no axis"
    refused(GradientDiffers, told, lambda *step: 2 * subjects.mean_loss(*step))
    refused(CourseError, "no parameter of the model has a gradient")
    refused(CourseError, "has 3 ranks, and the job 1", layout=Layout(tp=3))
    nothing = Reference(subjects.small, lambda *step: 0 * subjects.mean_loss(*step))
    refused(CourseError, "the loss reaches no weight", subjects.mean_loss, nothing)


def test_what_draws_in_the_step_is_refused_and_not_called_wrong():
    model, batch, drop = subjects.small(), subjects.data(), torch.nn.functional.dropout

    def dropped(model, batch):
        return torch.nn.functional.cross_entropy(drop(model(batch[0])).flatten(0, 1), batch[1].flatten())

    reference = Reference(subjects.small, dropped)
    with pytest.raises(CourseError, match="random numbers were drawn in the step"), step(model, reference, batch=batch):
        dropped(model, batch).backward()


def of_twelve_rows(model, batch):
    """A loss that is for whole batches alone."""
    if len(batch[0]) != 12:
        raise ValueError(f"twelve rows, not {len(batch[0])}")
    return subjects.mean_loss(model, batch)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (subjects.mean_loss, "weigh alike, and in one process 0.0833, 0.917"),
        (
            of_twelve_rows,
            "`embedding.weight`.*what the ranks' own batches explain was not tried, since one process does not take "
            "them: ValueError: twelve rows, not 1",
        ),
    ],
)
@on_ranks(2)
def test_ranks_that_are_weighed_alike_are_told_in_the_job_unless_the_loss_takes_no_part_of_a_batch(loss, said):
    """What the batches' own gradients explain, in a job of two ranks with one row and eleven."""
    model = DistributedDataParallel(subjects.small())
    batch = subjects.part_of(Layout(dp=2), dist.get_rank(), uneven=True)
    with (
        pytest.raises(GradientDiffers, match=said),
        step(model, Reference(subjects.small, loss), batch=batch),
    ):
        subjects.mean_loss(model, batch).backward()
