"""One step of a training loop, audited in the job that runs it."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from course_lib.audit import GradientDiffers, Layout, Reference, step
from course_lib.errors import CourseError
from course_lib.launching.launch import launch
from tests.audit import subjects
from tests.torch_versions import FSDP2_ON_CPUS, has

REFERENCE = Reference(subjects.small, subjects.mean_loss)

on_ranks = functools.partial(launch, device="cpu", timeout=160, stream=False)


def loop(wrap, reference=REFERENCE, average=True, clip=None):
    """Somebody's loop: two steps, the second one audited."""
    dist.init_process_group("gloo")
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


def test_a_right_step_raises_no_alarm_and_a_sum_for_a_mean_is_named():
    for wrap in (DistributedDataParallel, fully_shard) if has(FSDP2_ON_CPUS) else (DistributedDataParallel,):
        verdicts = on_ranks(loop, wrap, num_processes=3)
        assert all(verdict.clean and len(verdict.gradients) == 9 for verdict in verdicts)
    verdict = on_ranks(loop, DistributedDataParallel, REFERENCE, False, num_processes=3)[1]
    assert {(f.kind, round(f.factor, 9), f.axes) for f in verdict.wrong} == {("factor", 3, ("dp",))}
    assert verdict.losses_agree


def test_a_clipped_gradient_is_compared_with_a_clipped_one():
    clipped = Reference(subjects.small, subjects.mean_loss, clip=0.01)
    for reference, clean in ((clipped, True), (REFERENCE, False)):
        verdict = on_ranks(loop, DistributedDataParallel, reference, True, 0.01, num_processes=2)[0]
        assert verdict.clean is clean


def test_it_raises_what_it_found_and_refuses_what_it_cannot_judge():
    """In a process without ranks too."""
    model, batch = subjects.small(), subjects.data()
    with (
        pytest.raises(
            GradientDiffers,
            match="one process: `embedding.weight`, .* and 6 more: 2 times the reference, the size of no axis",
        ),
        step(model, REFERENCE, batch=batch),
    ):
        (2 * subjects.mean_loss(model, batch)).backward()
    model.zero_grad()
    with step(model, REFERENCE, batch=batch):
        subjects.mean_loss(model, batch).backward()
    model.zero_grad()
    with (
        pytest.raises(CourseError, match="no parameter of the model has a gradient"),
        step(model, REFERENCE, batch=batch),
    ):
        pass
    with (
        pytest.raises(CourseError, match="has 3 ranks, and the job 1"),
        step(model, REFERENCE, batch=batch, layout=Layout(tp=3)),
    ):
        pass
    model.zero_grad()
    with (
        pytest.raises(CourseError, match="the loss reaches no weight"),
        step(model, Reference(subjects.small, lambda model, batch: 0 * subjects.mean_loss(model, batch)), batch=batch),
    ):
        subjects.mean_loss(model, batch).backward()


def test_what_draws_in_the_step_is_refused_and_not_called_wrong():
    model, batch, drop = subjects.small(), subjects.data(), torch.nn.functional.dropout

    def dropped(model, batch):
        return torch.nn.functional.cross_entropy(drop(model(batch[0])).flatten(0, 1), batch[1].flatten())

    reference = Reference(subjects.small, dropped)
    with pytest.raises(CourseError, match="random numbers were drawn in the step"), step(model, reference, batch=batch):
        dropped(model, batch).backward()


def test_ranks_that_are_weighed_alike_are_told_in_the_job():
    """What the batches' own gradients explain, in a job of two ranks with one row and eleven."""
    (message,) = set(on_ranks(of_uneven_rows, num_processes=2))
    assert "weigh alike, and in one process 0.0833, 0.917" in message


def test_a_loss_that_takes_no_part_of_a_batch_leaves_that_cause_untried_and_says_so():
    (message,) = set(on_ranks(of_uneven_rows, Reference(subjects.small, of_twelve_rows), num_processes=2))
    assert (
        "`embedding.weight`" in message
        and "what the ranks' own batches explain was not tried, since one process "
        "does not take them: ValueError: twelve rows, not 1"
        in message
    )


def of_twelve_rows(model, batch):
    """A loss that is for whole batches alone."""
    if len(batch[0]) != 12:
        raise ValueError(f"twelve rows, not {len(batch[0])}")
    return subjects.mean_loss(model, batch)


def of_uneven_rows(reference=REFERENCE):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(subjects.small())
    batch = subjects.part_of(Layout(dp=2), dist.get_rank(), uneven=True)
    try:
        with step(model, reference, batch=batch):
            subjects.mean_loss(model, batch).backward()
    except GradientDiffers as error:
        return str(error)
