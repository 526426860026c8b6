"""Where there are GPUs, master solutions earn all their points, in `course check` and in the grader's sandbox."""

import random

import pytest

from course_lib.grading.tasks import TASKS


def graded(lessons, planted):
    """Answers that did not go as they should, and how many did, in a process that has trained already."""
    import torch

    from course_lib.grading import masters, selftest
    from course_lib.grading.check import CheckJob, Report, observe
    from course_lib.grading.hidden import solutions_folder
    from course_lib.grading.tasks import TASKS

    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()
    chosen = [task for task in TASKS.values() if task.lesson in lessons or not lessons]
    if planted:
        rows = selftest.table(chosen)
        return [row for row in rows if not row.holds], len(rows)
    jobs = []
    for task in chosen:
        source = masters.answers(solutions_folder() / f"{task.lesson}.ipynb")[task.name]
        jobs += [CheckJob(task, selftest.function_of(task, source), case) for case in task.cases(random.Random(0))]
    reports = [
        Report(job.task, tuple(job.task.judge(job.case, seen))) for job, seen in zip(jobs, observe(jobs), strict=True)
    ]
    return [str(report) for report in reports if report.failed], len(jobs)


@pytest.mark.long
def test_solutions_of_lesson_02_earn_all_points(gpus):
    missed, judged = gpus.run(graded, ["02_data_parallel"], False, timeout=1200)
    assert missed == [] and judged >= 10


@pytest.mark.long
@pytest.mark.parametrize("lesson", sorted({task.lesson for task in TASKS.values()}))
def test_every_answer_goes_as_it_should(gpus, lesson):
    """Of each exercise: stub, solution and planted wrong answers."""
    strayed, rows = gpus.run(graded, [lesson], True, timeout=2200)
    assert strayed == [] and rows > 3 * sum(task.lesson == lesson for task in TASKS.values())


LOOKS = """
def {name}(*args, **options):
    import os, torch
    torch.ones(1, requires_grad=True).sum().backward()
    gpus = [each for each in os.listdir("/dev") if each.startswith(("nvidia", "kfd", "dri"))]
    raise RuntimeError(f"sees {{torch.cuda.device_count()}} GPUs, {{os.environ['CUDA_VISIBLE_DEVICES']!r}}, {{gpus}}")
"""


def looked(isolated):
    """What an answer raises that looks for GPUs, where the grader has some."""
    import torch

    from course_lib.grading.runner import grade_source
    from course_lib.grading.sandbox import Limits, Sandbox
    from course_lib.grading.tasks import TASKS

    assert torch.cuda.device_count() == 2
    task = TASKS["ddp.overlap"]
    return grade_source(
        task, LOOKS.format(name=task.function), hidden=None, limits=Limits(), sandbox=Sandbox(isolated=isolated)
    ).error


def test_a_graded_answer_sees_no_gpu(gpus):
    assert "RuntimeError: sees 0 GPUs, '', [] (in line" in gpus.run(looked, True, timeout=800)
    assert "sees 0 GPUs, ''" in gpus.run(looked, False, timeout=800)
