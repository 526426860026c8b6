"""Somebody else's script, as it is, under `course meter`: its output, its exit code, and what it moved."""

import json
import os
import re
import subprocess
import sys

import pytest

from course_lib import cli
from course_lib.attach import command, inside
from course_lib.errors import ConfigError
from tests.attach.commands import BIN, ROOT, TORCHRUN, course

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(32, 32, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"trained by {dist.get_world_size()}\\n", end="", flush=True)  # in one piece: ranks share the pipe
if "group" not in sys.argv:  # else the process ends as many do, without destroying it
    dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
"""
STEPS, BYTES = 3, 32 * 32 * 4
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)


def reduced(folder):
    """The row of the all-reduces, and what is said of the ranks."""
    tables = json.loads((folder / "tables.json").read_text())
    (row,) = [row for row in tables["collectives"] if row["collective"] == "all_reduce"]
    return row, tables["ranks"]


def test_torchrun_under_the_meter_and_the_watchdog(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("import os\nos.environ['OWN'] = 'ran'\n")
    (tmp_path / "train.py").write_text("import os\nassert os.environ['OWN'] == 'ran'\n" + SCRIPT)
    meter = f"{sys.executable} -m course_lib meter --json tables.json -- {TORCHRUN} train.py 0"
    done = course(tmp_path, f"watch --seconds 100 -- {meter}", PYTHONPATH=f"{tmp_path}/own:{ROOT}")
    assert done.returncode == 0 and "course watch" not in done.stderr, done.stderr
    assert not (tmp_path / "course-watch").exists()  # a report, of a job that does not hang
    assert done.stdout.count("trained by 2") == 2
    row, ranks = reduced(tmp_path)
    assert (row["axis"], row["groups"], row["calls"]) == ("world", [[0, 1]], STEPS)
    assert row["bytes"] == row["sent"] == STEPS * BYTES  # 2 (N - 1) / N of it
    assert re.search(rf"^world +0,1 +all_reduce +float32 +{STEPS} +12.0 KiB +12.0 KiB", done.stdout, re.M)
    assert [rank["held"] for rank in ranks] == [{"parameters": BYTES, "gradients": BYTES, "optimizer states": 0}] * 2
    assert all(rank["ended"] and rank["steps"] == STEPS for rank in ranks)
    events = json.loads((tmp_path / "course-meter.trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["name"] == "all_reduce" for event in events) == 2 * STEPS


def test_plain_python_and_its_exit_code(tmp_path, script):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank1.jsonl").write_text("of an earlier job\n")
    words = f"meter --folder logs --json tables.json -- {sys.executable} train.py 7 group"
    done = course(tmp_path, words, **ALONE)
    assert done.returncode == 7, done.stderr
    row, (rank,) = reduced(tmp_path)
    assert row["calls"] == STEPS and rank["ended"] and len(list((tmp_path / "logs").iterdir())) == 1


def test_a_window_of_steps_bounds_what_is_written(tmp_path, script):
    words = f"meter --steps 1:2 --folder logs --json tables.json -- {sys.executable} train.py 0"
    done = course(tmp_path, words, **ALONE)
    assert done.returncode == 0, done.stderr
    row, (rank,) = reduced(tmp_path)
    assert (row["calls"], rank["steps"], rank["held"]["parameters"]) == (1, 1, BYTES)
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text().count('["call","all_reduce"') == 1


@pytest.mark.parametrize("window", ["3", "5:5", "a:b", "-1:4"])
def test_what_is_no_window_of_steps(window):
    with pytest.raises(ConfigError, match="is no window of steps: give the first one and the one after the last"):
        cli.parse(["meter", f"--steps={window}", "--", "x"])


@pytest.mark.long
def test_accelerate_launch_under_the_meter(tmp_path, script):
    configured = f"{BIN}/accelerate launch --config_file {ROOT}/configs/accelerate/cpu2.yaml"
    words = f"meter --json tables.json -- {configured} train.py 0"
    done = course(tmp_path, words, ACCELERATE_USE_CPU="true", TMPDIR=str(tmp_path))
    assert done.returncode == 0 and reduced(tmp_path)[0]["calls"] == STEPS, done.stderr


def test_a_process_that_is_no_rank_says_so_and_imports_no_torch(tmp_path):
    code = "import sys; assert 'course_lib' in sys.modules and 'torch' not in sys.modules; sys.exit(3)"
    done = course(tmp_path, f'meter -- {sys.executable} -c "{code}"')
    assert done.returncode == 3 and "no process of the command made a process group" in done.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["meter"], "nothing to run: give the command line after `--`"),
        (["meter", "--", "no-such-program"], "cannot start `no-such-program`: No such file or directory"),
    ],
)
def test_what_cannot_be_started(argv, said):
    args = cli.parse(argv)
    with pytest.raises(ConfigError, match=re.escape(said)):
        args.run(args)


def test_options_of_the_other_command_are_its_own():
    args = cli.parse(["meter", "--trace", "t.json", "--", "torchrun", "--nproc-per-node", "2", "a.py", "--", "--x-y"])
    assert args.command_line == ["torchrun", "--nproc-per-node", "2", "a.py", "--", "--x-y"]
    assert str(args.trace) == "t.json"


def test_the_lines_of_shell_say_the_same(tmp_path):
    lines = command.exports({"meter": "it's here"})
    shown = subprocess.run(["sh", "-c", f'{lines}\nprintf "%s" "$COURSE_ATTACH"'], capture_output=True, text=True)
    assert json.loads(shown.stdout) == {"meter": "it's here"} and str(command.SITE) in lines


def test_tools_are_added_to_those_of_an_outer_command():
    once = command.environment_of({"meter": "m"}, {"PYTHONPATH": "mine"})
    twice = command.environment_of({"watch": {"seconds": 1}}, once)
    assert json.loads(twice[inside.VARIABLE]) == {"meter": "m", "watch": {"seconds": 1}}
    assert twice["PYTHONPATH"] == f"{command.SITE}{os.pathsep}mine"
