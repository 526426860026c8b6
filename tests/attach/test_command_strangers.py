"""Ten scripts in the shapes of public ones, three faults each, under `course watch`: rank and line are named."""

import re
from pathlib import Path

import pytest

from course_lib.errors import EXIT_HUNG
from tests.attach.commands import TORCHRUN, course

HERE = Path(__file__).with_name("strangers")
SCRIPTS = sorted(path.stem for path in HERE.glob("*.py") if path.stem != "fault")
LINES = {text.strip(): number for number, text in enumerate((HERE / "fault.py").read_text().splitlines(), start=1)}
FAULTS = {
    "sleeps": rf"rank 1 is not in a collective; it is at \S*fault.py:{LINES['time.sleep(600)']}",
    "dies": r"rank 1 is gone: process \d+ on \S+ has ended",
    # Alone against one other rank, either may be the odd one, and then both are named.
    "odd one": rf"rank 1 (issued|waits for rank 0 in) all_reduce #\d+ of float32 \(7, 5\) "
    rf"at \S*fault.py:{LINES['dist.all_reduce(torch.ones(7, 5))']}",
}


def watched(script, folder, fault, seconds=4):
    """What the command said last, and its exit code."""
    words = f"watch --seconds {seconds} -- {TORCHRUN} {HERE}/{script}.py"
    done = course(folder, words, FAULT=fault, ACCELERATE_USE_CPU="true", DS_ACCELERATOR="cpu")
    said = done.stderr[done.stderr.rfind("course watch: ") :] if "course watch: " in done.stderr else ""
    return said, done


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_rank_and_its_line_are_named(script, fault, tmp_path):
    said, done = watched(script, tmp_path, fault)
    assert re.search(FAULTS[fault], said), said or done.stderr[-3000:]
    assert done.returncode == (1 if fault == "dies" else EXIT_HUNG)


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_healthy_one_is_left_alone(script, tmp_path):
    said, done = watched(script, tmp_path, "")
    assert not said and done.returncode == 0, said or done.stderr[-3000:]
