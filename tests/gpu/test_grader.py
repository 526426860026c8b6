"""Where there are GPUs, master solutions earn all their points, in `course check` and in the grader's sandbox."""

import pytest
import torch

from course_lib.grading import selftest
from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits, Sandbox
from course_lib.grading.tasks import TASKS


def graded(lesson):
    """Answers that did not go as they should, and how many there are, in a process that has trained already."""
    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()
    rows = selftest.table([task for task in TASKS.values() if task.lesson == lesson])
    return [row for row in rows if not row.holds], len(rows)


@pytest.mark.long
@pytest.mark.parametrize("lesson", sorted({task.lesson for task in TASKS.values()}))
def test_every_answer_goes_as_it_should(gpus, lesson):
    """Of each exercise: stub, solution and planted wrong answers."""
    strayed, rows = gpus.run(graded, lesson)
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
    task, sandbox = TASKS["ddp.overlap"], Sandbox(isolated=isolated)
    source = LOOKS.format(name=task.function)
    assert torch.cuda.device_count() == 2
    return grade_source(task, source, hidden=None, limits=Limits(), sandbox=sandbox).error


def test_a_graded_answer_sees_no_gpu(gpus):
    assert "RuntimeError: sees 0 GPUs, '', [] (in line" in gpus.run(looked, True)
    assert "sees 0 GPUs, ''" in gpus.run(looked, False)
