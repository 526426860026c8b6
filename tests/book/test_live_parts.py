"""The live parts: what the browser gets is all that they need, and says what the library says."""

import io
import json
import random
import re
import subprocess
import sys
import zipfile

import nbformat
import pytest

from book import live_exercises, live_parts
from book.live import exercises, memory, planner, schedule
from course_lib import cli
from course_lib.errors import ConfigError
from course_lib.grading.check import examine
from course_lib.parallel.pipeline import csv_form
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.parallel.pipeline.validation import check
from course_lib.planning.memory import zero_model_states

TABLE = {"name": "1f1b", "ranks": 4, "microbatches": 8, "stages": 2, "message": 0}
TABLE |= {"forward": 1, "input": 1, "weight": 1}
PLAN = {"model": "facebook/opt-6.7b", "gpu": "A100-80", "gpus": "8", "tokens": "100B", "global_batch": ""}
STATES = {"model": "meta-llama/Llama-2-7b-hf", "gpus": 8, "precision": "bf16", "optimizer": "adamw", "offload": "none"}


def asked(**changes):
    return json.dumps(TABLE | changes)


@pytest.mark.parametrize("name", json.loads(schedule.names()))
def test_a_table_is_the_librarys(name):
    shown = json.loads(schedule.made(asked(name=name)))
    assert [[one["name"] for one in row] for row in shown["rows"]] == [
        line.split(",") for line in shown["table"].strip().splitlines()
    ]
    assert len(shown["rows"]) == 4 and 0 <= shown["bubble"] < 0.5


def test_its_times_are_the_simulators():
    shown, line = json.loads(schedule.made(asked(weight=2))), simulate(make("1f1b", 4, 8), Costs(1, 1, 2))
    assert shown["step"] == line.makespan and shown["bubble"] == pytest.approx(float(line.bubble))
    assert shown["held"] == list(check(make("1f1b", 4, 8)))


def test_a_move_that_cannot_run_has_the_validators_sentence_and_one_that_can_is_costed():
    table = json.loads(schedule.made(asked()))["table"]
    last = len(table.splitlines()[3].split(",")) - 1
    wrong = json.loads(schedule.moved(table, asked(), 3, 0, 1))  # the backward of micro-batch 0 before its forward
    rows = [line.split(",") for line in table.strip().splitlines()]
    rows[3].insert(1, rows[3].pop(0))
    with pytest.raises(ConfigError) as said:
        check(csv_form.parse("\n".join(map(",".join, rows)), "1f1b"))
    assert wrong["error"] == str(said.value) and "3B0" in wrong["error"]
    later = json.loads(schedule.moved(table, asked(), 0, 0, 1))  # micro-batch 1 first: the others wait for 0
    assert later["step"] > json.loads(schedule.made(asked()))["step"] and last == 15


def test_numbers_that_a_schedule_cannot_take_are_refused_in_a_sentence():
    assert "equal groups" in json.loads(schedule.made(asked(name="interleaved", microbatches=9)))["error"]


def test_a_plan_is_what_the_command_line_prints(capsys):
    shown = json.loads(planner.planned(json.dumps(PLAN)))
    words = shown["asked"].split()
    assert words[:2] == ["course", "plan"] and cli.main([*words[1:], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    del printed["error"]  # is said in words
    assert {name: shown[name] for name in printed} == printed
    assert re.sub(r" \\\n +", " ", shown["command"]) == printed["launch"]
    assert [sum(bar["bytes"].values()) - bar["bytes"]["runtime"] for bar in shown["bars"]] == [
        pytest.approx(bar["total"]) for bar in shown["bars"]
    ]
    assert cli.main([*words[1:], "--what_if", shown["what_if"][0], "--json"]) == 0
    assert json.loads(planner.varied(json.dumps(PLAN), shown["what_if"][0])) == json.loads(capsys.readouterr().out)


def test_what_cannot_be_planned_is_refused_in_the_command_lines_sentence(capsys):
    wanted = {"model": "meta-llama/Llama-2-70b-hf", "gpu": "T4", "gpus": "8"}
    refused = json.loads(planner.planned(json.dumps(wanted)))
    assert cli.main(["plan", *(f"--{name}={value}" for name, value in wanted.items())]) == 2
    assert refused["error"] in capsys.readouterr().err and "it fits with --gpus 24" in refused["error"]
    assert "--gpus" in json.loads(planner.planned(json.dumps(PLAN | {"gpus": "many"})))["error"]


def rows(**changes):
    return {row["strategy"]: row for row in json.loads(memory.counted(json.dumps(STATES | changes)))["rows"]}


def test_states_are_those_of_zeros_paper_and_the_formula_gives_the_bytes():
    counted = rows()
    for stage in (1, 2, 3):
        states = sum(counted[f"ZeRO-{stage}"]["bytes"][kind] for kind in ("parameters", "gradients", "optimizer"))
        assert states == pytest.approx(zero_model_states(6_738_415_616, 8, stage))
    for row in [*counted.values(), *rows(optimizer="sgd", precision="fp32", gpus=64).values()]:
        lines = re.findall(r"^(\w+) +([\d.]+) × ([\d.e]+)(?: / (\d+))? = ([\d.]+) GiB$", row["formula"], re.MULTILINE)
        assert [line[0] for line in lines] == ["parameters", "gradients", "optimizer"]
        for kind, each, count, shared, gib in lines:
            assert float(each) * float(count) / int(shared or 1) == pytest.approx(row["bytes"][kind], rel=1e-3)
            assert float(gib) == pytest.approx(row["bytes"][kind] / 2**30, abs=0.006)


def test_what_is_offloaded_is_told_and_what_cannot_be_is_refused():
    offloaded = rows(offload="optimizer")
    assert offloaded["ZeRO-2"]["bytes"]["optimizer"] == 0 and "GiB in host memory" in offloaded["ZeRO-2"]["formula"]
    assert offloaded["ZeRO-2"]["host"] == pytest.approx((2 + 12) * 6_738_415_616 / 8)
    assert "offload parameters" in offloaded["FSDP2"]["error"]
    assert "is not in engine torch with ddp" in offloaded["DDP"]["error"]


def solutions():
    """The course's own answer to each exercise of the page, by its id in the notebook."""
    cells = [
        cell
        for name in ("07_pipeline_schedules", "09_plan_and_simulate")
        for cell in nbformat.read(live_parts.ROOT / "solutions" / f"{name}.ipynb", as_version=4).cells
    ]
    return {cell.metadata.get("nbgrader", {}).get("grade_id"): cell.source for cell in cells}


def test_the_courses_answers_earn_all_points_and_what_the_page_begins_with_none():
    answers = solutions()
    for name, task in exercises.TASKS.items():
        right = json.loads(exercises.checked(name, answers[task.grade_id]))
        begun = json.loads(exercises.checked(name, live_exercises.of_notebook(task)[1]))
        assert right["points"] == right["of"] == sum(task.points.values()), right["report"]
        assert begun["points"] == 0 and "NotImplementedError: write your answer here" in begun["report"]
    assert len(exercises.TASKS) == 9


def test_a_report_is_what_check_prints():
    task = exercises.TASKS["pipeline.balance"]
    wrong = "def split(costs, stages):\n    print('cuts')\n    return list(range(1, stages))\n"
    shown = json.loads(exercises.checked(task.name, wrong))
    scope = {}
    exec(wrong, scope)
    assert shown["report"] == str(examine(task, scope["split"], task.cases(random.Random(0))))
    assert shown["printed"] == "cuts\n" * 8 and "a dearest stage of" in shown["report"]


def test_an_answer_that_cannot_run_is_told_with_its_line():
    said = [
        json.loads(exercises.checked("plan.memory", text))["error"]
        for text in ("def memory_of(:\n", "x = 1\ny = x / 0\n", "x = 1\n")
    ]
    assert "line 1 of yours, `def memory_of(:`" in said[0] and "line 2 of yours, `y = x / 0`" in said[1]
    assert said[2] == "the answer defines no `memory_of`: keep that name"


ALONE = """
import sys; sys.path.insert(0, sys.argv[1])
from book.live import exercises, memory, planner, schedule
table, plan, states = sys.argv[2:]
print(schedule.made(table), planner.choices(), planner.planned(plan), planner.varied(plan, "gpus=4"), memory.choices(),
      memory.counted(states), *(exercises.checked(name, "def {}(*args): return 1".format(task.function))
                                for name, task in exercises.TASKS.items()), sep="\\n")
"""


def test_the_archive_holds_all_that_the_parts_import(tmp_path):
    """A Python with its standard library alone imports it, as the browser's does: no torch, numpy, yaml, rich."""
    with zipfile.ZipFile(io.BytesIO(live_parts.modules())) as archive:
        archive.extractall(tmp_path)
    given = [json.dumps(one) for one in (TABLE, PLAN, STATES)]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE, str(tmp_path), *given], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    wrong = [exercises.checked(name, f"def {task.function}(*args): return 1") for name, task in exercises.TASKS.items()]
    assert done.stdout.splitlines() == [
        schedule.made(given[0]),
        planner.choices(),
        planner.planned(given[1]),
        planner.varied(given[1], "gpus=4"),
        memory.choices(),
        memory.counted(given[2]),
        *wrong,
    ]
    assert live_parts.modules() == live_parts.modules()


def test_what_the_browser_gets_loads_no_package_has_a_version_and_tells_its_size(tmp_path):
    for name in live_parts.PYTHON:
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / live_parts.LOCK).write_text('{"info": {"abi": 1}, "packages": {"numpy": {}}}')
    found = live_parts.files(tmp_path)
    assert json.loads(found["_static/live/pyodide/pyodide-lock.json"]) == {"info": {"abi": 1}, "packages": {}}
    assert re.search(rb'"live-[0-9a-f]{12}"', found["_extra/live-cache.js"])
    sizes = json.loads(re.fullmatch(r"live\.comes\((.*)\);\n", found["_static/live/files.js"].decode())[1])
    assert sizes == {
        name.removeprefix("_static/live/"): len(data)
        for name, data in found.items()
        if name.endswith((".gz", ".zip", ".json", ".mjs"))
    }
    names = zipfile.ZipFile(io.BytesIO(found["_static/live/modules.zip"])).namelist()
    assert "course_lib/parallel/pipeline/validation.py" in names and len(names) == len(set(names))
