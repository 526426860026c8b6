"""The live parts: what the browser gets is all that they need, and says what the library says."""

import io
import json
import re
import subprocess
import sys
import zipfile

import pytest

from book import live_parts
from book.live import bench
from course_lib.errors import ConfigError
from course_lib.parallel.pipeline import csv_form
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.parallel.pipeline.validation import check

ASKED = {"name": "1f1b", "ranks": 4, "microbatches": 8, "stages": 2, "forward": 1, "input": 1, "weight": 1,
         "message": 0}


def asked(**changes):
    return json.dumps(ASKED | changes)


@pytest.mark.parametrize("name", json.loads(bench.names()))
def test_a_table_is_the_librarys(name):
    shown = json.loads(bench.made(asked(name=name)))
    assert [[one["name"] for one in row] for row in shown["rows"]] == [
        line.split(",") for line in shown["table"].strip().splitlines()]
    assert len(shown["rows"]) == 4 and 0 <= shown["bubble"] < 0.5


def test_its_times_are_the_simulators():
    shown, line = json.loads(bench.made(asked(weight=2))), simulate(make("1f1b", 4, 8), Costs(1, 1, 2))
    assert shown["step"] == line.makespan and shown["bubble"] == pytest.approx(float(line.bubble))
    assert shown["held"] == list(check(make("1f1b", 4, 8)))


def test_a_move_that_cannot_run_has_the_validators_sentence_and_one_that_can_is_costed():
    table = json.loads(bench.made(asked()))["table"]
    last = len(table.splitlines()[3].split(",")) - 1
    wrong = json.loads(bench.moved(table, asked(), 3, 0, 1))  # the backward of micro-batch 0 before its forward
    rows = [line.split(",") for line in table.strip().splitlines()]
    rows[3].insert(1, rows[3].pop(0))
    with pytest.raises(ConfigError) as said:
        check(csv_form.parse("\n".join(map(",".join, rows)), "1f1b"))
    assert wrong["error"] == str(said.value) and "3B0" in wrong["error"]
    later = json.loads(bench.moved(table, asked(), 0, 0, 1))  # micro-batch 1 first: the others wait for 0
    assert later["step"] > json.loads(bench.made(asked()))["step"] and last == 15


def test_numbers_that_a_schedule_cannot_take_are_refused_in_a_sentence():
    assert "equal groups" in json.loads(bench.made(asked(name="interleaved", microbatches=9)))["error"]


def test_the_archive_holds_all_that_the_bench_imports(tmp_path):
    """A Python with its standard library alone imports it, as the browser's does."""
    (tmp_path / "modules.zip").write_bytes(live_parts.modules())
    code = (f"import sys; sys.path.insert(0, {str(tmp_path / 'modules.zip')!r}); from book.live import bench; "
            f"print(bench.made({asked()!r}))")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(bench.made(asked()))
    assert live_parts.modules() == live_parts.modules()


def test_what_the_browser_gets_loads_no_package_and_has_a_version(tmp_path):
    for name in (*live_parts.PYTHON, live_parts.PACKED):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / live_parts.LOCK).write_text('{"info": {"abi": 1}, "packages": {"numpy": {}}}')
    found = live_parts.files(tmp_path)
    assert json.loads(found["_static/live/pyodide/pyodide-lock.json"]) == {"info": {"abi": 1}, "packages": {}}
    assert re.search(rb'"live-[0-9a-f]{12}"', found["_extra/live-cache.js"])
    names = zipfile.ZipFile(io.BytesIO(found["_static/live/modules.zip"])).namelist()
    assert "course_lib/parallel/pipeline/validation.py" in names and len(names) == len(set(names))
