"""`course doctor` on this machine, and on planted ones that lack something."""

import argparse
import dataclasses
import json
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from course_lib.commands import doctor, doctor_checks
from course_lib.data import bundled
from course_lib.errors import CourseError, LaunchError
from course_lib.modeling import minilm
from course_lib.system import machine

CHECKS = {check.name: check for check in doctor_checks.CHECKS}
NO_ENGINES = dict.fromkeys(machine.ENGINES)
GPU = machine.Gpu("Planted GPU", 80 * 2**30, "9.0")


def run(*arguments):
    parser = argparse.ArgumentParser()
    doctor.register(parser)
    return doctor.run(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def here():
    return machine.describe()


@pytest.fixture
def look(here):
    """Examine one thing on this machine, with some of its facts changed."""
    return lambda name, **changed: doctor_checks.examine(CHECKS[name], dataclasses.replace(here, **changed))


def test_everything_is_looked_at_here_and_the_quickstart_can_run(capsys):
    code = run("--json")
    report = json.loads(capsys.readouterr().out)
    rows = {check["name"]: check for check in report["checks"]}
    assert rows.keys() == CHECKS.keys() and len(report["checks"]) == len(rows)
    assert {check["state"] for check in rows.values()} <= {"ok", "slow", "cannot"}
    assert {name for name, check in rows.items() if check["state"] == "cannot" and not check["advice"]} == set()
    assert {name: check["detail"] for name, check in rows.items() if "Error" in check["detail"]} == {}
    assert code == 0 and report["quickstart"] is True and report["reasons"] == []
    for name in ("plain loop", "CPU processes", "FSDP2", "MiniLM", "bundled data"):
        assert rows[name]["state"] in ("ok", "slow"), rows[name]
    assert report["machine"]["engines"]["torch"] and report["machine"]["cores"] >= 1


def test_the_tables_say_the_same(capsys, monkeypatch):
    monkeypatch.setattr(doctor_checks, "CHECKS", tuple(CHECKS[name] for name in ("plain loop", "many GPUs")))
    monkeypatch.setenv("COLUMNS", "80")
    assert run() == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "this machine" in shown and "one step taken" in shown and "→ learn with processes on the CPU" in shown
    assert "The quickstart can run here: make train" in shown


def test_what_the_quickstart_needs_decides_the_exit_code(capsys, monkeypatch):
    monkeypatch.setattr(minilm, "MODULE", "no_such_module")
    monkeypatch.setattr(doctor_checks, "CHECKS", (CHECKS["MiniLM"], CHECKS["many GPUs"]))
    assert run("--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["quickstart"] is False
    assert report["reasons"] == ["MiniLM: minilm is not installed, and the Hub cannot be reached"]
    assert report["checks"][0]["advice"] == minilm.INSTALL
    assert run() == 1
    assert "The quickstart cannot run here. MiniLM: minilm is not installed" in capsys.readouterr().out


def test_a_broken_installation_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "course_lib.commands.doctor_checks", None)
    with pytest.raises(CourseError, match="missing or broken .*: run `make setup`"):
        run()


def test_minilm_absent_is_slow_and_damaged_is_refused(look, monkeypatch):
    monkeypatch.setattr(minilm, "SHA256", "0" * 64)
    result = look("MiniLM")
    assert result.state == "cannot" and "--force-reinstall" in result.advice
    monkeypatch.setattr(minilm, "MODULE", "no_such_module")
    result = look("MiniLM", hub_problem=None)
    assert result.state == "slow" and "90 MB" in result.detail


def test_without_a_compiler_torch_compile_is_out_and_deepspeed_s_offload(look, monkeypatch, tmp_path):
    assert look("torch.compile").state == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    result = look("torch.compile")
    assert result.state == "cannot" and "on PATH" in result.detail and "install" in result.advice
    assert look("DeepSpeed", os="Linux", gpus=()).state == "ok"
    result = look("DeepSpeed", os="Linux", gpus=(GPU,))
    assert result.state == "slow" and "--offload" in result.detail and "install" in result.advice


def test_no_ninja(look, monkeypatch):
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "ninja" else which(name))
    result = look("DeepSpeed", os="Linux", gpus=(GPU,))
    assert result.state == "slow" and "no ninja" in result.detail and "activate" in result.advice


def test_no_python_headers(look, monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    result = look("torch.compile")
    assert result.state == "cannot" and "Python.h" in result.detail


@pytest.mark.parametrize(
    ("name", "changed", "state", "word"),
    [
        ("operating system", {"os": "Windows"}, "cannot", "WSL2"),
        ("operating system", {"os": "Darwin"}, "slow", ""),
        ("DeepSpeed", {"os": "Darwin"}, "cannot", "FSDP2"),
        ("DeepSpeed", {"os": "Linux", "engines": NO_ENGINES}, "cannot", "pip install deepspeed"),
        ("W&B", {"engines": NO_ENGINES}, "cannot", "pip install wandb"),
        ("memory", {"memory_available_bytes": 2**30}, "cannot", "memory"),
        ("memory", {"memory_available_bytes": 2**34}, "ok", ""),
        ("Hugging Face Hub", {"hub_problem": "HF_HUB_OFFLINE is set"}, "cannot", "HF_ENDPOINT"),
        ("Hugging Face Hub", {"hub_problem": None}, "ok", ""),
        ("one GPU", {"gpus": (), "backends": ("gloo",)}, "cannot", "every lesson runs on the CPU"),
        ("one GPU", {"gpus": (), "backends": ("gloo", "mps")}, "ok", ""),
        ("many GPUs", {"gpus": (GPU,), "backends": ("gloo", "nccl")}, "cannot", "--num_processes 2"),
        ("many GPUs", {"gpus": (GPU, GPU), "backends": ("gloo",)}, "cannot", "--num_processes 2"),
        ("many GPUs", {"gpus": (GPU, GPU), "backends": ("gloo", "nccl")}, "ok", ""),
    ],
)
def test_machines_that_lack_something(look, name, changed, state, word):
    result = look(name, **changed)
    assert result.state == state and word in result.advice


def test_a_gpu_with_a_cpu_build_of_torch(look, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else None)
    monkeypatch.setattr("torch.version.cuda", None)
    assert "is a CPU build" in look("one GPU", gpus=(), backends=("gloo",)).detail


@pytest.mark.parametrize(("name", "word"), [("disk space", "quickstart takes"), ("shared memory", "--num_workers")])
def test_a_full_disk(look, monkeypatch, name, word):
    assert look(name).state == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 * 2**20))
    result = look(name)
    assert result.state == ("cannot" if name == "disk space" else "slow") and word in result.detail


@pytest.mark.parametrize(("native", "state"), [(True, "ok"), (False, "slow")])
def test_bf16_without_instructions_is_slow(look, monkeypatch, native, state):
    monkeypatch.setattr(machine, "native_bf16", lambda device: native)
    monkeypatch.setattr(machine, "matmul_rate", lambda *_, **__: 1e11)
    result = look("bf16", gpus=())
    assert result.state == state and "100 GFLOP/s in fp32" in result.detail


@pytest.mark.parametrize(
    ("answers", "cores", "state"),
    [([3.0, 1.0], 2, "cannot"), ([1.0], 2, "cannot"), ([3.0, 3.0], 1, "slow"), ([3.0, 3.0], 2, "ok")],
)
def test_two_ranks_have_to_add_up_and_to_have_cores(look, monkeypatch, answers, cores, state):
    monkeypatch.setattr("course_lib.launching.launch.launch", lambda *_, **__: answers)
    result = look("CPU processes", cores=cores)
    assert result.state == state and ("came to" in result.detail) == (state == "cannot")


def test_ranks_that_cannot_start(look, monkeypatch):
    refuse = mock.Mock(side_effect=LaunchError("two ranks asked for, one started", "do this"))
    monkeypatch.setattr("course_lib.launching.launch.launch", refuse)
    assert look("FSDP2") == ("cannot", "two ranks asked for, one started", "do this")


def test_a_check_that_fails_by_itself_is_a_finding(here):
    falls_ill = mock.Mock(side_effect=ZeroDivisionError("division by zero\nand more"))
    result = doctor_checks.examine(doctor_checks.Check("ill", falls_ill), here)
    assert result.state == "cannot" and result.detail == "ZeroDivisionError: division by zero" and result.advice


def test_damaged_data_is_said(look, monkeypatch, tmp_path):
    folder = shutil.copytree(bundled.FOLDER, tmp_path / "bundled")
    with (folder / "tweets.csv").open("a") as file:
        file.write("1,one row too many,neutral,train\n")
    load = bundled.load_tweets
    monkeypatch.setattr(bundled, "load_tweets", lambda: load(folder))
    result = look("bundled data")
    assert result.state == "cannot" and "is damaged" in result.detail
