"""Copies of one command that know nothing of each other are refused; a rank takes the cores that Slurm gave it."""

import os

import pytest

from course_lib.commands import relaunch
from course_lib.errors import LaunchError
from course_lib.launching import cores
from course_lib.launching.launch_environment import LaunchEnvironment, check_copies, to_start

STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
BATCH = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "num_processes", "told"),
    [
        (STEP, None, "Slurm has 4 tasks"),
        (STEP, 4, "Slurm has 4 tasks"),
        (STEP, 1, ""),
        (BATCH | {"SLURM_PROCID": "3"}, None, "the one numbered 3 has no rank"),
        (BATCH, 4, ""),
        (BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, None, ""),
        ({"SLURM_NTASKS": "4"}, None, ""),
        ({}, None, ""),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, None, "mpirun started 2 copies"),
        ({"PMI_SIZE": "2"}, 2, "mpirun started 2"),
        ({"PMI_SIZE": "1"}, None, ""),
    ],
)
def test_copies_without_ranks(environ, num_processes, told):
    if not told:
        check_copies(num_processes, environ)
        return
    with pytest.raises(LaunchError, match=told) as caught:
        check_copies(num_processes, environ)
    assert "--num_processes 1" in str(caught.value) and "torchrun" in str(caught.value)


def test_ranks_that_have_a_number_are_no_copies(monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert to_start(LaunchEnvironment(0, 2, launched=True), None) == 0
    with pytest.raises(LaunchError, match="Slurm has 4 tasks"):
        to_start(LaunchEnvironment(), None)


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        ({}, None),
        ({"SLURM_CPUS_PER_TASK": "3"}, 3),
        ({"SLURM_CPUS_PER_TASK": "3", "SLURM_STEP_NUM_TASKS": "2"}, 3),
        ({"SLURM_CPUS_PER_TASK": "3", "SLURM_TASKS_PER_NODE": "4(x2),1"}, 12),
        ({"SLURM_CPUS_PER_TASK": "3", "SLURM_TASKS_PER_NODE": "4", "SLURM_STEP_NUM_TASKS": "4"}, 3),
    ],
)
def test_cores_that_slurm_gives(environ, share):
    assert cores.slurm_cores(environ) == share


def test_no_more_threads_than_cores_that_slurm_gave(monkeypatch, tmp_path):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    cores.keep_to_slurm_cores()
    assert "OMP_NUM_THREADS" not in os.environ and cores.usable_cores(tmp_path) == 16
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    assert cores.usable_cores(tmp_path) == 6 and relaunch.usable_cores is cores.usable_cores
    monkeypatch.setattr(cores, "usable_cores", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cores.keep_to_slurm_cores()
    assert os.environ.pop("OMP_NUM_THREADS") == "3"
