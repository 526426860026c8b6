"""What lesson 07 claims, measured anew: bubbles, memory, refusals, a split backward, gradients, a training."""

import re
import statistics
import textwrap
from fractions import Fraction

import pytest

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.lessons.pipeline.explorer import explorer, view
from course_lib.parallel.pipeline import csv_form
from course_lib.parallel.pipeline.actions import Schedule
from course_lib.parallel.pipeline.fitted.search import search
from course_lib.parallel.pipeline.passes import split_backward
from course_lib.parallel.pipeline.schedules import alternate, make
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.parallel.pipeline.validation import check
from tests.notebooks.conftest import assert_quoted, page, says, stored

MEASURED = ("naive", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev", "only_split")


PARAMETERS = {"device": "auto", "world_size": 2, "ranks": 4, "microbatches": 8, "steps": 3, "tries": 1}


def test_it_says_how_long_its_ranks_waited(lesson):
    """tests/lessons/pipeline/test_lab.py compares the same runs with the formulas, in virtual time."""
    bubble = {name: lesson[f"bubble_{name}"] for name in MEASURED}
    assert all(0 < share < 1 for share in bubble.values()), bubble
    assert {name: lesson["bubbles_of_all_tries"][name] for name in MEASURED} == {n: [b] for n, b in bubble.items()}
    shown = stored("07_pipeline_schedules")
    for name in MEASURED:
        assert shown[f"bubble_{name}"] == statistics.median(shown["bubbles_of_all_tries"][name])
    assert says(lesson, f"was {bubble['naive']:.0%} with one at a time, and {bubble['gpipe']:.0%} with GPipe")
    assert says(
        lesson,
        f"{bubble['1f1b']:.0%} (1F1B), {bubble['only_split']:.0%} (split alone), "
        f"{bubble['zb_h1']:.0%} (ZB-H1) and {bubble['zbv']:.0%} (ZB-V)",
    )
    assert lesson["own_wait"] == pytest.approx({"1f1b": 3 / 11, "zb_h1": 1 / 9, "zb_h2": 0, "zbv": 0})


def test_the_pipelines_on_the_page(lesson):
    """By hand and by torch's two classes: one process's losses, in each step. And one that hangs, one that learns."""
    assert lesson["my_line_is_that_of_1f1b"] and lesson["first_stage_has_no_gradient"]
    assert lesson["joined_differs_by"] < 1e-6 and lesson["tiny_1f1b_differs_by"] < 1e-6
    assert max(lesson["ScheduleGPipe_differs_by"], lesson["Schedule1F1B_differs_by"]) < 1e-6
    assert says(lesson, "the first rank held 8 micro-batches with GPipe and 2 with 1F1B")
    for rank in range(2):
        assert lesson[f"rank_{rank}_was_in"] == "send, called by exchange, called by step", "both, and none receives"
    assert lesson["losses_when_not_divided"] == "nearly the same", "AdamW"


def test_the_cells_to_try_run_as_they_are_written(capsys):
    lesson = page("07_pipeline_schedules")
    imports = [cell.source for cell in lesson.cells if cell.cell_type == "code"][1:3]
    exercises = lesson.prose.partition("## Exercises")[2]
    for typed in re.findall(r"```python\n(.*?)```", exercises, re.S):
        exec("\n".join([*imports, textwrap.dedent(typed)]), {})
    said = capsys.readouterr().out.splitlines()
    first, second = ({name: float(step) for name, step, _ in map(str.split, said[i : i + 4])} for i in (0, 4))
    assert second["1f1b"] - second["zb_h1"] > first["1f1b"] - first["zb_h1"], "its lead grows"
    assert second["zb_auto"] == second["zb_h1"] and {"zbv 34.5 0.072", "zbv 25.5 0.059"} <= set(said)
    assert "zb_h1 48.0 0.375 [48.0, 24.0, 24.0, 24.0]" in said, "as long as what its first rank computes"


def test_what_is_said_of_zb_h2_is_so():
    table = make("zb_h2", 4, 8)
    forwards = [next(place for place, action in enumerate(row) if action.kind != "F") for row in table.rows]
    assert forwards == [2 * (4 - 1 - rank) + 1 for rank in range(4)] and check(table)[0] == 2 * 4 - 1
    assert simulate(table).stage_bubble == 0 < simulate(table).bubble


def test_why_the_lag_of_rank_r_is_r():
    """Each W that is put off makes the step one W shorter, up to r on rank r; one more wins nothing and holds more."""
    ranks, microbatches = 4, 8
    parts = [[(rank, microbatch) for microbatch in range(microbatches)] for rank in range(ranks)]
    steps, held = [], []
    for lags in ([0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3], [1, 2, 3, 4]):
        rows = tuple(alternate(parts[r], parts[r], ranks - 1 - r, lag) for r, lag in enumerate(lags))
        table = Schedule("lagging", tuple(range(ranks)), microbatches, rows)
        steps.append(simulate(table).makespan)
        held.append(max(check(table)))
    assert steps == [24 + 6, 24 + 5, 24 + 4, 24 + 3, 24 + 3] and held == [4, 4, 4, 4, 5]
    assert simulate(make("1f1b", ranks, microbatches)).makespan == 24 + 9


def test_broken_tables_are_refused_each_for_its_fault(lesson):
    assert lesson["refused_hangs"].startswith("mine waits for itself")
    assert lesson["refused_lacks_an_action"].startswith("mine lacks 0I1")
    assert lesson["refused_wrong_order"].startswith("rank 0 of mine has 0B1 before 0F1")
    assert lesson["refused_half_a_backward"].startswith("mine lacks 0W0")


def test_choosing(lesson):
    assert 0 < lesson["fit"] < lesson["looked_at"]
    assert sorted(lesson["best"]) == ["zb_auto with 16 micro-batches", "zb_h1 with 16 micro-batches"], "a tie is told"
    assert sorted(lesson["least_bubble"]) == ["interleaved_zero_bubble", "zbv"]


def test_what_is_said_of_the_choice_is_so():
    """ZB-V: less bubble and a longer step than ZB-H1, by the overhead of twice as many actions; B split: 3/11, 1/5."""
    work = Costs(64, 64, 64, activation=64)
    found = search(4, [8, 16, 24, 32], work, 24, names=["zbv", "zb_h1"], measured_at=1, overhead=1)
    best = {c.name: c.timeline for c in reversed([c for c in found if not c.problem])}
    assert best["zbv"].bubble < best["zb_h1"].bubble and best["zbv"].makespan > best["zb_h1"].makespan
    free = search(4, [16], work, 24, names=["zbv", "zb_h1"], measured_at=1, overhead=0)
    assert next(c.name for c in free if not c.problem) == "zbv", "without overhead it is the shorter one"
    one = make("1f1b", 4, 8)
    assert [simulate(table).bubble for table in (one, split_backward(one))] == [Fraction(3, 11), Fraction(1, 5)]


def test_what_is_stored_is_what_the_tables_are_now(lesson):
    said = stored("07_pipeline_schedules")
    for name in ("simulated", "held", "own_wait", "least_bubble", "looked_at", "fit", "best"):
        assert said[name] == lesson[name], f"{name}: run `python tools/notebooks.py`"


def test_gradients_and_weights_of_the_whole_model(lesson):
    assert lesson["torch_differs_from_the_whole"] < 1e-6 and lesson["torch_differs_from_ours"] < 1e-6
    assert max(lesson["share_of_parameters"]) < 0.6
    assert max(lesson["loss_difference"], lesson["training_differs_by"]) < 5e-6 and lesson["weights_differ_by"] < 5e-6


def test_the_explorer_says_what_its_sliders_say():
    text, figure = view("zb_h1", 4, 8, 2, 1, 1, 1, 0)
    assert "bubble 11.11% (1/9)" in text and "3F0,3I0" in text and "11.1% idle" in figure.get_suptitle()
    box = explorer(name="dualpipev", ranks=4)
    controls, said, picture = list(box.controls.values()), box.said, box.picture
    before = bytes(picture.value)
    assert before.startswith(b"\x89PNG") and "parts in flight: 9, 9, 9, 9" in said.value
    controls[2].value = 2
    assert "it takes at least as many as stages, 8" in said.value and picture.layout.display == "none"
    controls[2].value = 12
    after = bytes(picture.value)
    assert picture.layout.display == "" and after.startswith(b"\x89PNG") and after != before


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: check(csv_form.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "mine")),
        lambda: make("dualpipev", 4, 2),
        lambda: build({"training_type": "pipeline", "batch_size": 3, "pipeline_chunks": 4}),
    ],
    ids=["a cycle", "too few", "cut too often"],
)
def test_what_goes_wrong_says_what_the_lesson_says(attempt):
    with pytest.raises(ConfigError) as error:
        attempt()
    assert_quoted("07_pipeline_schedules", str(error.value))
