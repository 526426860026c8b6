"""Two hundred honest answers, none of which loses a point."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits
from course_lib.grading.submissions import read_submissions
from course_lib.grading.task import Case
from tests.grading import honest
from tests.grading.toys import toy_tasks

HIDDEN = [Case(1, {"values": [5, 6, 7, 8, 9, 10]})]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)], ids=["every seventh", "all"])
def test_no_honest_answer_loses_a_point(sandbox, tmp_path, every):
    for name, data in honest.files().items():
        (tmp_path / name).write_bytes(data)
    submissions = read_submissions([tmp_path], {"toy.total": toy_tasks.TOTAL})
    assert len(submissions) == 200 and [each.problems for each in submissions if each.problems] == []
    answers = {each.learner: each.answers["toy.total"] for each in submissions[::every]}  # of each body and style some

    def grade(source):
        return grade_source(toy_tasks.TOTAL, source, hidden=HIDDEN, limits=Limits(), sandbox=sandbox)

    with ThreadPoolExecutor(2) as pool:
        verdicts = dict(zip(answers, pool.map(grade, answers.values()), strict=True))
    assert {name: verdict for name, verdict in verdicts.items() if verdict.points != verdict.maximum} == {}
