"""`course watch` over a stranger's script: who, which collective over which axis, file and line; exit codes."""

import time
import zipfile

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_lib.errors import EXIT_HUNG
from course_lib.hangs import job_watch
from course_lib.hangs.watchdog import Watchdog, read_reports
from tests.attach.commands import TORCHRUN, course

SCRIPT = """
import os
import sys
import time
import torch
import torch.distributed as dist

if sys.argv[1] == "absent" and os.environ["RANK"] == "1":
    time.sleep(599)
dist.init_process_group("gloo")
for step in range(4):
    if step == 2 and dist.get_rank() == 1:
        if sys.argv[1] == "hang":
            time.sleep(600)
        raise ValueError("a bad batch")
    dist.all_reduce(torch.ones(4))
"""
LINES = {text.strip(): number for number, text in enumerate(SCRIPT.splitlines(), start=1)}


def watch(folder, fault, seconds):
    (folder / "train.py").write_text(SCRIPT)
    return course(folder, f"watch --seconds {seconds} -- {TORCHRUN} train.py {fault}")


def last_word(done):
    """Of the command itself."""
    return done.stderr[done.stderr.rindex("course watch: ") :]


def test_a_hang_is_named_by_rank_collective_file_and_line(tmp_path):
    done = watch(tmp_path, "hang", 2)
    assert done.returncode == EXIT_HUNG, done.stderr
    said = last_word(done)
    sleeping, reducing = LINES["time.sleep(600)"], LINES["dist.all_reduce(torch.ones(4))"]
    assert f"rank 1 is not in a collective; it is at train.py:{sleeping};" in said
    assert f"rank 0 waits for it in all_reduce #3 of float32 (4,) at train.py:{reducing}" in said
    with zipfile.ZipFile(tmp_path / "course-watch.zip") as bundle:
        assert {"hang-rank0.txt", "hang-rank0.json", "hang-rank1.txt"} <= set(bundle.namelist())
        assert "time.sleep(600)" in bundle.read("hang-rank0.txt").decode()  # the other rank's stack


def test_a_rank_that_never_comes_to_its_process_group_is_named(tmp_path):
    done = watch(tmp_path, "absent", 2)
    sleeping, joining = LINES["time.sleep(599)"], LINES['dist.init_process_group("gloo")']
    assert done.returncode == EXIT_HUNG and last_word(done).startswith(
        f"course watch: rank 1 has not come to init_process_group; it is at train.py:{sleeping}; rank 0 waits for it "
        f"at train.py:{joining}"
    ), done.stderr
    with zipfile.ZipFile(tmp_path / "course-watch.zip") as bundle:
        assert "time.sleep(599)" in bundle.read("hang-rank0.txt").decode()
    assert {path.name for path in tmp_path.iterdir()} == {"course-watch", "course-watch.zip", "train.py"}


def test_a_rank_that_fails_is_named_and_the_exit_code_is_the_launchers(tmp_path):
    done = watch(tmp_path, "raise", 100)
    assert done.returncode == 1, done.stderr
    assert "rank 1 has left the training with ValueError: a bad batch at train.py:" in last_word(done)
    assert "Traceback" in done.stderr and 'raise ValueError("a bad batch")' in done.stderr  # as ever


def one_of_four_stays_away(folder):
    """Rank 3 does not come to tp's second all-reduce before there is a report; steps are counted by the optimizer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["tp"].get_group()
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    # On a busy machine the other ranks must be at the second all-reduce before this is over.
    tool = job_watch.begin({"seconds": 5.0, "folder": str(folder)})
    tool.watchdog.ends = False
    for step in range(2):
        if step == 1 and dist.get_rank() == 3:
            while not all((folder / f"hang-rank{rank}.json").exists() for rank in (2, 3)):
                time.sleep(0.05)
        dist.all_reduce(torch.ones(4), group=group)
        weight.grad = torch.ones(4)
        optimizer.step()
    tool.end(None)


def test_the_axis_of_a_mesh_is_named_and_the_steps_of_the_optimizer_are_counted(ranks, tmp_path):
    ranks(4, join=True)(one_of_four_stays_away, tmp_path)
    (culprit,) = next(report for report in read_reports(tmp_path) if report.rank == 2).verdicts  # who waits for it
    assert culprit.rank == 3
    assert "in step 1; rank 2 waits for it in all_reduce #2 over tp (ranks 2, 3) of float32 (4,) " in culprit.sentence


@pytest.mark.parametrize(("module", "reports"), [("__main__", 1), ("pdb", 0)])
def test_who_looks_at_a_rank_in_a_debugger_may_take_their_time(tmp_path, module, reports):
    stand = {"__name__": module}
    exec(compile("import time\ndef stand(seconds): time.sleep(seconds)", "stand.py", "exec"), stand)
    with Watchdog(0.5, tmp_path, ends=False) as dog:
        for _ in range(300):  # the rank that hangs until it is reported; the other one for thirty times the seconds
            stand["stand"](0.05)
            if dog._reported.is_set():
                break
    assert len(read_reports(tmp_path)) == reports
