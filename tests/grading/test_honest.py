"""Two hundred honest answers, none of which loses a point."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits, Sandbox
from course_lib.grading.submissions import read_submissions
from course_lib.grading.task import Case
from tests.grading import honest
from tests.grading.toys import toy_tasks

HIDDEN = [Case(1, {"values": [5, 6, 7, 8, 9, 10]})]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)], ids=["every seventh", "all"])
def test_no_honest_answer_loses_a_point(tmp_path, every):
    for name, data in honest.files().items():
        (tmp_path / name).write_bytes(data)
    submissions = read_submissions([tmp_path], {"toy.total": toy_tasks.TOTAL})
    assert len(submissions) == 200 and not [submission.problems for submission in submissions if submission.problems]
    submissions = submissions[::every]  # by name: of each body and each style some
    sandbox = Sandbox(tasks="toy_tasks", folders=(Path(toy_tasks.__file__).parent,))

    def grade(submission):
        return grade_source(
            toy_tasks.TOTAL, submission.answers.get("toy.total"), hidden=HIDDEN, limits=Limits(), sandbox=sandbox
        )

    with ThreadPoolExecutor(2) as pool:
        verdicts = dict(zip([s.learner for s in submissions], pool.map(grade, submissions), strict=True))
    assert {name: verdict for name, verdict in verdicts.items() if verdict.points != verdict.maximum} == {}
