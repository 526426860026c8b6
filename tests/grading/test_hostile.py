"""A hundred hostile answers and files: each works on a grader without defences, and gains nothing here."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits, Sandbox
from course_lib.grading.task import Case
from tests.grading import hostile, naive
from tests.grading.hostile import Hostile
from tests.grading.toys import toy_tasks

NAIVE = Path(naive.__file__)
TOYS = Path(toy_tasks.__file__).parent
LIMITS = Limits(seconds=2.0, memory=600 << 20, processes=24, file_size=32 << 20, disk=32 << 20, output=4 << 20)
ORPHAN = "COURSE_TEST_ORPHAN"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the hidden checks, as the naive grader has them and as ours must not show them."""
    folder = tmp_path_factory.mktemp("place")
    values = [case.inputs["values"] for case in hidden_cases()]
    answers = {str(v): naive.expected(v) for v in [*naive.PUBLIC, *values]}
    answers |= {
        str(case.inputs["values"]): toy_tasks.weighted(case.inputs["values"])
        for case in toy_tasks.TOTAL.cases(random.Random(0))
    }
    (folder / "solutions").mkdir()
    (folder / "solutions" / "hidden.json").write_text(json.dumps({"hidden": values, "answers": answers}))
    return folder


@pytest.fixture(scope="module")
def listener():
    """Somebody who listens outside, and counts who calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def hidden_cases():
    return [Case(1, {"values": [271828, 314159, 141421]})]


def source_of(attack: Hostile, place: Path, marker: Path, port: int) -> str:
    names = {"HIDDEN": str(place / "solutions" / "hidden.json"), "MARKER": str(marker), "PORT": port}
    return "".join(f"{name} = {value!r}\n" for name, value in names.items()) + attack.source


def works_on_the_naive(attack: Hostile, place: Path, port: int) -> bool:
    """Whether the attack does what it is for where nothing is in its way."""
    folder = place / "control" / attack.family.replace(" ", "_") / attack.name
    folder.mkdir(parents=True)
    marker = folder / "marker"
    (folder / "answer.py").write_text(source_of(attack, place, marker, port))
    command = [sys.executable, str(NAIVE), str(folder / "answer.py"), str(place / "solutions" / "hidden.json")]
    if attack.works == "unpickles":
        command.append("--unpickle")
    if attack.works == "kills":  # a caller of its own, or it would be this test that is killed
        caller = "import subprocess, sys; subprocess.run(sys.argv[1:]); print('ALIVE')"
        command = [sys.executable, "-c", caller, *command]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd=folder,
        env=os.environ | {ORPHAN: attack.name},
    )
    try:
        out, _ = process.communicate(timeout=1.5 if attack.works == "hangs" else 100)
    except subprocess.TimeoutExpired:
        return attack.works == "hangs"
    finally:
        end_marked(attack.name)
        process.wait()
    if attack.works == "kills":
        return "ALIVE" not in out
    return marker.exists() or marker.is_symlink() if attack.works in ("marks", "unpickles") else "PASS" in out.split()


def end_marked(value: str) -> None:
    """End every process that carries our mark in its environment."""
    marked = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(ORPHAN) == value:
                process.send_signal(signal.SIGKILL)
                marked.append(process)
        except psutil.Error:
            continue
    psutil.wait_procs(marked, timeout=240)


def test_there_are_a_hundred_in_ten_families():
    families = Counter(attack.family for attack in hostile.ALL)
    assert len(hostile.ALL) >= 100 and len(families) == 9  # the tenth, files, is in test_hostile_files.py
    assert min(families.values()) >= 10
    assert len({(attack.family, attack.name) for attack in hostile.ALL}) == len(hostile.ALL)


@pytest.mark.long
def test_each_works_where_nothing_is_in_its_way(place, listener):
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(3) as pool:
        worked = list(pool.map(lambda attack: works_on_the_naive(attack, place, port), hostile.ALL))
    assert [attack.name for attack, did in zip(hostile.ALL, worked, strict=True) if not did] == []


@pytest.mark.parametrize(
    "attacks", [hostile.ALL[::2], pytest.param(hostile.ALL, marks=pytest.mark.long)], ids=["every second", "all"]
)
def test_none_gains_a_point_or_leaves_a_trace(place, listener, tmp_path, attacks):
    while True:  # the controls' calls
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            break
    port = listener.getsockname()[1]
    sandbox = Sandbox(tasks="toy_tasks", folders=(TOYS,))
    sandbox.require()
    before = set(psutil.Process().children(recursive=True))

    def grade(attack):
        source = source_of(attack, place, tmp_path / attack.family / attack.name, port)
        return grade_source(toy_tasks.TOTAL, source, hidden=hidden_cases(), limits=LIMITS, sandbox=sandbox)

    for attack in attacks:
        (tmp_path / attack.family).mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(grade, attacks))

    gained = {attack.name: verdict for attack, verdict in zip(attacks, verdicts, strict=True) if verdict.points}
    assert gained == {}
    assert all(verdict.maximum == 4 for verdict in verdicts)
    told = json.dumps([verdict.to_json() for verdict in verdicts])
    assert not [
        secret
        for secret in ("271828", "314159", "141421", str(naive.expected([271828, 314159, 141421])))
        if secret in told
    ]
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert set(psutil.Process().children(recursive=True)) <= before
    with pytest.raises(BlockingIOError):
        listener.accept()
    errors = {attack.name: verdict.error for attack, verdict in zip(attacks, verdicts, strict=True)}
    for attack in [attack for attack in attacks if attack in hostile.HANGS]:
        assert errors[attack.name] == "timeout", attack.name
    assert not [path for path in os.listdir("/dev/shm") if path.startswith("hostile-answer")]
