"""Mutants: what is changed in a solution, and that the checks reject all that are not known to be as good."""

import pytest

from benchmarks.mutants import accepted
from course_lib.grading import masters, mutants
from course_lib.grading.hidden import load, solutions_folder
from course_lib.grading.tasks import TASKS

SOURCE = '''def mean(values, start=1):
    """Not changed."""
    total = 0.5
    for value in values:
        total += value * 2
    if start <= 3 and not values:
        print(total, flush=True)
    return total / len(values) if values else -total
'''


def test_what_is_changed():
    made = mutants.mutants("x", SOURCE)
    changes = {(mutant.line, mutant.change) for mutant in made}
    assert changes >= {
        (3, "0.5 -> 1.5"),
        (4, "for value in values: -> "),
        (5, "total += value * 2 -> "),
        (5, "value * 2 -> value / 2"),
        (5, "total += value * 2 -> total -= value * 2"),
        (6, "start <= 3 -> start < 3"),
        (6, "start <= 3 and (not values) -> start <= 3 or not values"),
        (6, "not values -> values"),
        (7, "flush=True -> "),
        (7, "print(total, flush=True) -> "),
        (7, "flush=True -> flush=False"),
        (5, "value * 2 -> value * 3"),
        (8, "total / len(values) -> total * len(values)"),
        (8, "-total -> total"),
    }
    assert not any("Not changed" in mutant.change for mutant in made)
    assert len({mutant.source for mutant in made} - {SOURCE}) == len(made)
    for mutant in made:
        compile(mutant.source, "mutant", "exec")


def test_mutants_of_a_solution_are_rejected_and_one_that_is_as_good_is_not(monkeypatch):
    task = {"pipeline.bubble": TASKS["pipeline.bubble"]}
    rows = mutants.run(task)
    assert len(rows) >= 8 and all(row.holds for row in rows) and all(row.failed for row in rows)
    solution = masters.answers(solutions_folder() / "07_pipeline_schedules.ipynb")["pipeline.bubble"]
    same = mutants.Mutant("pipeline.bubble", 1, "1 -> 1.0", solution)
    monkeypatch.setattr(mutants, "mutants", lambda name, solution: [same])
    (row,) = mutants.run(task)
    assert not row.failed and not row.holds
    assert list(accepted([row])) == [("pipeline.bubble", 1, "`1 -> 1.0`", "NOT LISTED")]


@pytest.mark.long
@pytest.mark.parametrize("lesson", sorted({task.lesson for task in TASKS.values()}))
def test_every_mutant_is_rejected_or_as_good_for_a_reason(lesson):
    tasks = {name: task for name, task in TASKS.items() if task.lesson == lesson}
    rows = mutants.run(tasks)
    assert {row.mutant.task for row in rows} == set(tasks)
    assert [(row.mutant.task, row.mutant.line, row.mutant.change) for row in rows if not row.holds] == []
    reasons = {key for key in load(solutions_folder() / "equivalent.py").EQUIVALENT if key[0] in tasks}
    assert reasons == {(row.mutant.task, row.mutant.change) for row in rows if row.equivalent}
