"""A hundred hostile answers and files: each works on a grader without defences, and gains nothing here."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits
from course_lib.grading.task import Case
from tests.grading import hostile, naive
from tests.grading.toys import toy_tasks

NAIVE = Path(naive.__file__)
LIMITS = Limits(seconds=2.0, memory=600 << 20, processes=24, file_size=32 << 20, disk=32 << 20, output=4 << 20)
ORPHAN = "COURSE_TEST_ORPHAN"
HIDDEN = [271828, 314159, 141421]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the hidden checks, as the naive grader has them and as ours must not show them."""
    folder = tmp_path_factory.mktemp("place")
    public = [case.inputs["values"] for case in toy_tasks.TOTAL.cases(random.Random(0))]
    answers = {str(values): naive.expected(values) for values in [*naive.PUBLIC, *public, HIDDEN]}
    (folder / "solutions").mkdir()
    (folder / "solutions" / "hidden.json").write_text(json.dumps({"hidden": [HIDDEN], "answers": answers}))
    return folder


@pytest.fixture(scope="module")
def listener():
    """Somebody who listens outside, and counts who calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def source_of(attack: hostile.Hostile, place: Path, marker: Path, port: int) -> str:
    names = {"HIDDEN": str(place / "solutions" / "hidden.json"), "MARKER": str(marker), "PORT": port}
    return "".join(f"{name} = {value!r}\n" for name, value in names.items()) + attack.source


def works_on_the_naive(attack: hostile.Hostile, place: Path, port: int) -> bool:
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


@pytest.mark.long
def test_each_works_where_nothing_is_in_its_way(place, listener):
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(3) as pool:
        worked = list(pool.map(lambda attack: works_on_the_naive(attack, place, port), hostile.ALL))
    assert [attack.name for attack, did in zip(hostile.ALL, worked, strict=True) if not did] == []


@pytest.mark.parametrize(
    "attacks", [hostile.ALL[::2], pytest.param(hostile.ALL, marks=pytest.mark.long)], ids=["every second", "all"]
)
def test_none_gains_a_point_or_leaves_a_trace(sandbox, place, listener, tmp_path, attacks):
    with contextlib.suppress(BlockingIOError):
        while True:  # the controls' calls
            listener.accept()[0].close()
    port = listener.getsockname()[1]
    sandbox.require()
    before = set(psutil.Process().children(recursive=True))

    def grade(attack):
        source = source_of(attack, place, tmp_path / attack.family / attack.name, port)
        return grade_source(
            toy_tasks.TOTAL, source, hidden=[Case(1, {"values": HIDDEN})], limits=LIMITS, sandbox=sandbox
        )

    for attack in attacks:
        (tmp_path / attack.family).mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(grade, attacks))

    gained = {attack.name: verdict for attack, verdict in zip(attacks, verdicts, strict=True) if verdict.points}
    assert gained == {}
    assert all(verdict.maximum == 4 for verdict in verdicts)
    told = json.dumps([verdict.to_json() for verdict in verdicts])
    secrets = [str(value) for value in (*HIDDEN, naive.expected(HIDDEN))]
    assert [secret for secret in secrets if secret in told] == []
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert set(psutil.Process().children(recursive=True)) <= before
    with pytest.raises(BlockingIOError):
        listener.accept()
    hung = {a.name: verdict.error for a, verdict in zip(attacks, verdicts, strict=True) if a.works == "hangs"}
    assert hung == dict.fromkeys(hung, "timeout")
    assert not [path for path in os.listdir("/dev/shm") if path.startswith("hostile-answer")]
