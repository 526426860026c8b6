"""The exercises' table, their masters, and rules that no observation can bring down or deceive by its form alone."""

import itertools
import random
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from course_lib.errors import DataError
from course_lib.grading import masters
from course_lib.grading.check import CheckJob, observe
from course_lib.grading.hidden import hidden_cases
from course_lib.grading.selftest import function_of, planted
from course_lib.grading.serialize import pack, unpack
from course_lib.grading.task import Case, Finding, earned, plain
from course_lib.grading.tasks import TASKS, block, planning
from course_lib.planning import memory, models
from course_lib.planning.plan import Plan
from tests.grading.conftest import same

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS, EXERCISES = ROOT / "solutions", ROOT / "exercises"
JUNK = [
    *(None, True, 7, -1.5, float("nan"), 10**400, "", "all_reduce", "x" * 1000),
    *([], [[]], [{}], [None], [["0F0"]], [["9" * 5000]], ["all_reduce " + "9" * 5000], ["all_reduce -1"], [" "], {}),
    *({"a": []}, np.zeros(0), np.zeros((2, 3, 4)), np.full((3, 3), np.inf), np.array(["text"]), np.array(5)),
    *([[[0, 0, 10**9]]], [[[True, 0, 1]]], [1e308, -1e308]),
]


@pytest.fixture(autouse=True)
def one_thread():
    """The oracles' tensors are tiny: threads that wait for each other would be all that they cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_an_exercise_is_known_by_its_function_and_its_cell_and_the_pages_count_all():
    assert len({task.function for task in TASKS.values()}) == len(TASKS), "a .py file names them by function"
    assert len({task.grade_id for task in TASKS.values()}) == len(TASKS)
    assert {task.lesson for task in TASKS.values()} == {path.stem for path in masters.masters(SOLUTIONS)}
    for page in ("README.md", "exercises/README.md"):
        assert f"{len(TASKS)} exercises" in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_cases_are_plain_and_repeat_with_the_generator(task):
    def packed(cases):
        return [(case.world_size, pack(case.inputs)) for case in cases]

    first = task.cases(random.Random(0))
    assert packed(first) == packed(task.cases(random.Random(0)))
    for case in first:
        assert same(unpack(pack(case.inputs)), case.inputs), "they cross a process border as they are"
    assert len({case.world_size for case in first}) > 1 or not task.needs_ranks
    one, other = (packed(hidden_cases(task, random.Random(seed), SOLUTIONS)) for seed in (1, 2))
    assert one != other, "hidden cases follow the seed"


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_no_observation_breaks_a_rule_or_earns_by_its_form(task):
    """Every key that the rules ask for, filled with junk: findings come, and the task is not earned."""

    class Asked(dict):
        """Notes what it is asked for."""

        keys_asked: set[str] = set()

        def get(self, key, default=None):
            self.keys_asked.add(key)
            return super().get(key, default)

    for case in task.cases(random.Random(0))[1:2]:
        Asked.keys_asked = set()
        everything = [Asked() for _ in range(case.world_size)]
        assert earned(task, task.judge(case, everything)) == 0
        for junk in JUNK:
            alone = [{name: junk if name == key else None for name in Asked.keys_asked} for key in Asked.keys_asked]
            for each in [dict.fromkeys(Asked.keys_asked, junk), *alone]:
                findings = task.judge(case, [each] * case.world_size)
                assert [finding.property for finding in findings] == list(task.points)
                assert not all(finding.holds for finding in findings), each
        for broken in (
            [{"error": "ValueError: no"}] * case.world_size,
            [],
            [None] * case.world_size,
            [{}] * (case.world_size + 1),
        ):
            assert not any(finding.holds for finding in task.judge(case, broken))


def test_the_point_of_an_exercise_is_named_where_its_parts_are_none_by_themselves():
    parts = "loop.warmup zero.bytes pipeline.bubble tensor.grid plan.memory plan.all_reduce cloud.request cloud.cost"
    assert {name for name, task in TASKS.items() if not task.essential} == set(parts.split())


def test_points_want_every_finding_of_a_property():
    task = TASKS["ddp.average"]
    good = [Finding(name, True, None, "", "") for name in task.points]
    assert earned(task, good * 2) == sum(task.points.values())
    assert earned(task, [*good, Finding("bytes", False, 0, "a", "b")]) == sum(task.points.values()) - 1
    assert earned(task, good[:-1]) == sum(task.points.values()) - 1, "nothing found is nothing earned"
    assert task.essential == ("mean gradient",)
    assert earned(task, good[1:]) == sum(task.points.values()) // 3 == 1, "the rest without the point of it"
    assert earned(task, []) == 0


def test_what_a_function_returns_becomes_plain():
    value = plain({"a": (torch.ones(2, requires_grad=True), np.float32(1), None), 3: [torch.tensor(2)]})
    assert same(value, {"a": [np.ones(2, np.float32), 1.0, None], "3": [np.array(2)]})
    with pytest.raises(TypeError, match="returned a object"):
        plain([object()])


@pytest.mark.parametrize("path", masters.masters(SOLUTIONS), ids=lambda path: path.stem)
def test_every_task_stands_in_its_master_as_the_table_has_it(path):
    notebook = nbformat.read(path, as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    cells = {cell.metadata["nbgrader"]["grade_id"]: cell for cell in notebook.cells if "nbgrader" in cell.metadata}
    mine = [task for task in TASKS.values() if task.lesson == path.stem]
    assert list(masters.answers(path)) == [task.name for task in mine]
    for task in mine:
        total = sum(task.points.values())
        points = ", ".join(f"{name} ({number})" for name, number in task.points.items())
        assert task.title in prose and f"{task.minutes} minutes · {total} points: {points}" in prose
        assert f"{'●' * task.difficulty}{'○' * (5 - task.difficulty)} · importance {'●' * task.importance}" in prose
        assert re.search(rf"^(def|class) {task.function}\(?", cells[task.grade_id].source, re.MULTILINE)
        check = cells[f"{task.grade_id}-check"]
        assert check.metadata["nbgrader"]["points"] == total
        assert check.source.startswith(f'check("{task.name}", {task.function})')
        assert f'grade("{task.name}", {task.function})' in check.source


def test_exercises_are_what_the_masters_make():
    written = sorted(path.name for path in EXERCISES.glob("*.ipynb"))
    assert written == [path.name for path in masters.masters(SOLUTIONS)]
    for name in written:
        text = masters.released(SOLUTIONS / name)
        assert (EXERCISES / name).read_text(encoding="utf-8") == text, f"{name}: make it anew from its master"
        assert not re.search(r"hidden|HIDDEN|BEGIN SOLUTION|\b(solutions|DRAW|Planted)\b", text)
        assert not any(cell.get("outputs") for cell in nbformat.reads(text, as_version=4).cells)


def test_a_planted_answer_wants_a_text_that_is_there_once():
    wrong = planted(SOLUTIONS)
    assert len({(answer.task, answer.name) for answer in wrong}) == len(wrong)
    with pytest.raises(DataError, match="stands 0 times"):
        wrong[0].source("nothing of it")
    with pytest.raises(DataError, match="stands 2 times"):
        wrong[0].source(wrong[0].old * 2)


def test_each_exhibit_shows_the_code_as_it_was_released_and_that_code_is_rejected():
    """The code in the text is a planted wrong answer: the self-test shows that it does not pass."""
    exhibits = {name for name in TASKS if name.startswith("museum.")}
    released = {answer.task: answer for answer in planted(SOLUTIONS) if answer.name == "as it was released"}
    assert set(released) == exhibits
    cells = nbformat.read(SOLUTIONS / "16_gradient_audit.ipynb", as_version=4).cells
    texts = {
        cell.metadata.nbgrader.grade_id.replace("-", ".", 1): before.source
        for before, cell in itertools.pairwise(cells)
        if cell.metadata.get("nbgrader", {}).get("solution")
    }
    assert set(texts) == exhibits
    for name, text in texts.items():
        assert f"```python\n{released[name].new.strip()}\n```" in text and re.search(r"^After .*#\d+", text, re.M)
        assert released[name].loses in TASKS[name].essential


def test_learners_do_not_carry_hidden_cases(tmp_path):
    with pytest.raises(DataError):
        hidden_cases(TASKS["ddp.ring"], random.Random(0), tmp_path)


def test_the_memory_that_is_asked_for_is_what_the_planner_counts():
    llama = models.load("llama-8b")
    sizes = {"layers": llama.layers, "width": llama.hidden, "intermediate": llama.ffn, "vocabulary": llama.vocab}
    sizes |= {"heads": llama.heads, "kv_heads": llama.kv_heads}
    asked = planning.memory(
        Case(1, {"sizes": sizes, "gpus": 64, "stage": 3, "micro_batch": 1, "sequence": 2048, "checkpointing": False})
    )
    counted = memory.estimate(llama, Plan(2048, engine="fsdp", stage=3, data=64))
    assert asked["count"] == llama.parameters
    assert asked["activations"] == pytest.approx(counted.activations, rel=1e-12)
    assert asked["logits"] == pytest.approx(counted.logits, rel=1e-12)


def test_rounding_shows_in_no_draw_of_a_block():
    """In float32 and in float64 its gradients agree to a tenth of what a check lets pass, also after a step."""
    for seed in range(40):
        for case in block.BLOCK.draw(random.Random(seed), (2, 4)):
            exact = {
                name: value.astype(np.float64) if isinstance(value, np.ndarray) else value
                for name, value in case.inputs.items()
            }
            wide = block.by_one(Case(case.world_size, exact))
            for name, value in block.by_one(case).items():
                assert np.abs(value - wide[name]).max() <= 1e-5 * max(1.0, np.abs(wide[name]).max()), (seed, name)


@pytest.mark.long
@pytest.mark.parametrize("name", TASKS)
def test_the_solution_has_all_points_whatever_is_drawn(name):
    """20 draws of the hidden cases: none is one in which a right answer loses a point."""
    task = TASKS[name]
    function = function_of(task, masters.answers(SOLUTIONS / f"{task.lesson}.ipynb")[name])
    cases = [case for seed in range(20) for case in hidden_cases(task, random.Random(f"{seed} {name}"))]
    for start in range(0, len(cases), 60):
        part = cases[start : start + 60]
        for case, seen in zip(part, observe([CheckJob(task, function, case) for case in part]), strict=True):
            assert [finding for finding in task.judge(case, seen) if not finding.holds] == []
