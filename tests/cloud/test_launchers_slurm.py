"""Slurm itself, with a controller and two nodes, reads our script, refuses wrong ones, and runs it.

The script runs with a stand-in for torchrun, which ends as the trainer does when it is asked to stop: what is seen here
is that Slurm starts it on each node, that its signal arrives there, and that the job is put back and goes on. The nodes
have no GPUs, so a job that wants some gets as far as the controller's answer that no node has them.
"""

import os
import re
import subprocess

import pytest

from course_lib.cloud.job import Job
from course_lib.cloud.launchers import slurm
from course_lib.config import build
from course_lib.launching.interrupts import NOTE
from tests.waiting import until

from .slurm_cluster import cluster
from .test_launchers import JOB

pytestmark = [pytest.mark.long]  # Slurm's packages are downloaded
CONFIG = build({"model": "tiny-bert", "output_dir": "out"})
JOB_OF_CPUS = Job(CONFIG, "ml.m5.xlarge", 2, 2, max_hours=2.5, name="stops")
TORCHRUN = f"""#!/bin/bash
trap 'mkdir -p out/checkpoint-000002; touch out/{NOTE}; exit 1' TERM
echo "started: $*"
[ -d out/checkpoint-000002 ] && exit 0
for i in {{1..900}}; do sleep 0.1; done; exit 3
"""


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """The environment of a cluster that runs."""
    with cluster(tmp_path_factory.mktemp("slurm")) as env:
        yield env


def said(env, *command, cwd=None):
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


def fields(env, number):
    """What the controller knows of a job."""
    code, told, wrong = said(env, "scontrol", "show", "job", number)
    assert code == 0, wrong
    return dict(re.findall(r"(\S+?)=(\S*)", told))


def submitted(env, file, text):
    """What sbatch makes of a script: its exit code, the job's number, what it says of the options and of errors."""
    file.write_text(text)
    code, told, log = said(env, "sbatch", "-v", file, cwd=file.parent)
    return code, told.split()[-1] if told else None, log


@pytest.mark.parametrize("job", [JOB, JOB_OF_CPUS], ids=["gpus", "cpus"])
def test_every_directive_arrives(there, tmp_path, job):
    text = slurm(job)
    code, number, log = submitted(there, tmp_path / "job.sbatch", text)
    options = dict(re.findall(r"^sbatch: (\S+) +: (.*)$", log, re.MULTILINE))
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
    assert directives.keys() == options.keys() - {"verbose"} and len(directives) == 10 - (job is JOB_OF_CPUS)
    bare = {"exclusive": "exclusive", "requeue": "requeue", "open-mode": "a", "output": f"{tmp_path}/%x-%j.log"}
    assert {name: options[name] for name in directives} == directives | bare
    if job is JOB:
        assert code != 0 and "Requested node configuration is not available" in log, "these nodes have no GPU"
        return
    assert code == 0, log
    wanted = {"JobName": "stops", "NumNodes": "2", "TimeLimit": "02:30:00", "Requeue": "1", "OverSubscribe": "NO"}
    wanted |= {"NtasksPerN:B:S:C": "1:0:*:*", "StdOut": f"{tmp_path}/stops-{number}.log"}
    reported = fields(there, number)
    assert said(there, "scancel", number)[0] == 0
    assert {key: reported[key].removesuffix("-2") for key in wanted} == wanted


def test_a_job_that_is_asked_to_stop_goes_on_from_its_checkpoint(there, tmp_path):
    (tmp_path / "torchrun").write_text(TORCHRUN)
    (tmp_path / "torchrun").chmod(0o755)
    env = there | {"PATH": f"{tmp_path}{os.pathsep}{there['PATH']}"}
    code, number, log = submitted(env, tmp_path / "job.sbatch", slurm(JOB_OF_CPUS))
    assert code == 0, log

    def starts():
        file = tmp_path / f"stops-{number}.log"
        return [line for line in file.read_text().splitlines() if "started" in line] if file.exists() else []

    def is_now(**wanted):
        return wanted.items() <= fields(env, number).items()

    until(lambda: len(starts()) == 2, told=lambda: str(fields(env, number)))
    assert said(env, "scancel", "--signal=TERM", number)[0] == 0  # to the steps alone, as --signal does it
    until(lambda: is_now(JobState="PENDING", Restarts="1"), told=lambda: str(fields(env, number)))
    # Slurm itself waits two minutes.
    assert said(env, "scontrol", "update", f"JobId={number}", "StartTime=now")[0] == 0
    until(lambda: is_now(JobState="COMPLETED", ExitCode="0:0"), told=lambda: str(fields(env, number)))
    assert ["--resume_from_checkpoint auto" in line for line in starts()] == [True] * 4
    given = {"--nnodes 2", "--nproc_per_node 2", "--rdzv_endpoint node1:29500", f"--rdzv_id {number}"}
    assert all(f" {option} " in line for option in given for line in starts())
