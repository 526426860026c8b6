"""`make gpu`: on a machine without GPUs, with sections that go wrong, and whole on a simulated GPU."""

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks import gpu
from benchmarks.hardware import facts, memory, peers, processes, report, speed, strategies
from benchmarks.hardware import subject as subjects
from benchmarks.hardware.findings import Findings, Settings, failed, missing
from benchmarks.hardware.processes import Section
from course_lib.config import build
from course_lib.config.axes import ENGINES
from course_lib.planning import memory as planning
from tests.gpu import training as t
from tests.gpu.machine import ROOT, SITE
from tests.long_cases import some
from tests.waiting import until

pytestmark = pytest.mark.simulated("it tries the tool that runs these tests")
HERE = Settings(gpus=1, name="NVIDIA H100 80GB HBM3", memory=80 << 30, bf16=True)


# --- without a GPU


def run_tool(folder, simulated, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES" or not simulated}
    environment |= {"GPU_SIM": str(simulated), "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)])}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=850)


def test_without_a_gpu_it_says_so_in_one_line_and_ends_well(tmp_path):
    said = run_tool(tmp_path, 0)
    assert said.returncode == 0, said.stderr
    assert re.fullmatch(r"no GPU here: \S.*\n", said.stdout) and not list(tmp_path.iterdir())


# --- sections that go wrong


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Runs planted sections by name; gives the exit code and the report."""
    probed = {"gpus": 1, "name": "planted", "memory": 1, "bf16": True, "simulated": True}
    monkeypatch.setattr(gpu, "probe", lambda: probed)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)  # these tests' own process keeps its handlers

    def run(*names, seconds=100.0, arguments=()):
        pids, module = {"PIDS": str(tmp_path / "pids")}, "tests.gpu.planted_sections"
        sections = [
            Section(f"{number}-{name}", f"Section {number}", f"{module}:{name}", seconds, environment=pids)
            for number, name in enumerate(names)
        ]
        code = gpu.main(["--output", str(tmp_path / "report.md"), *arguments], sections)
        text = (tmp_path / "report.md").read_text()
        return code, re.findall(r"^## Section \d: (.*)$", text, re.M), text

    return run


def test_sections_that_pass(planted):
    code, _, text = planted("fine", "nothing")
    assert code == 0 and text.startswith("# What runs on the simulated device")
    assert "## Section 0: passed\n\n| what | found |\n|---|---|\n| GPUs | 1 |\n" in text
    assert "## Section 1: not run\n\n**Not run:**\n\n- all of it: it needs two GPUs\n" in text


def test_a_section_that_fails_in_any_way_does_not_stop_the_others(planted, tmp_path):
    code, states, text = planted("raises", "dies", "tells", "fine")
    assert (code, states) == (1, ["FAILED", "FAILED", "FAILED", "passed"])
    assert "before" in text and "- raises: `RuntimeError: planted`" in text
    assert "- 1-dies: `its process ended with 3`" in text
    assert "(log: `report-logs/0-raises.log`)" in text
    log = (tmp_path / "report-logs" / "0-raises.log").read_text()
    assert "Traceback" in log and "RuntimeError: planted" in log


def test_the_report_names_neither_home_nor_host_nor_folders(planted):
    _, _, text = planted("tells")
    (failure,) = re.findall(r"^- a row \| of a table: `(.*)`$", text, re.M)
    assert failure == "ValueError: …/data.csv on <host>"
    assert "| …/file and …/torch.py at https://host.org/a/b |" in text
    for private in (str(Path.home()), socket.gethostname(), "somebody"):
        assert not re.search(rf"(?<!\w){re.escape(private)}(?!\w)", text)


def test_a_users_name_and_one_home_beneath_root_are_left_out(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    assert report.private("alice wrote /home/alice and /home/alice/x/y.py") == "<user> wrote ~ and …/y.py"
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert report.private("1 / 2 tokens/s in /a/b.py") == "1 / 2 tokens/s in …/b.py"


def test_what_hangs_is_ended_with_all_that_it_started(planted, tmp_path):
    code, states, text = planted("hangs", "fine", seconds=12)
    assert (code, states) == (1, ["FAILED", "passed"])
    assert "| a row before it hung |" in text and "- 0-hangs: `not done after 12 s, and ended`" in text
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_a_section_may_take_half_of_what_is_left_of_the_minutes_and_the_last_one_all(planted, monkeypatch):
    """By a clock that stands still except for what a section takes: here, each all that it may."""
    now, limits = [0.0], []

    def takes_all(section, settings, logs, seconds):
        limits.append(seconds)
        now[0] += seconds
        return processes.not_begun(section, "planted", logs)

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(processes, "run", takes_all)
    whole = 480 - gpu.ENDING_SECONDS
    planted("fine", "fine", "fine")
    assert limits == [whole / 2, whole / 4, whole / 4] and now[0] == whole
    now[0] = 0.0
    _, _, text = planted(*["fine"] * 5, arguments=["--minutes", "0.5"])
    assert limits[3:] == [10.0, 5.0, 5.0] and now[0] == 30 - gpu.ENDING_SECONDS
    assert text.count("- all of it: the 0.5 minutes were over: --minutes") == 2


def test_what_is_ended_at_its_share_keeps_what_it_has_and_has_not_failed(planted, monkeypatch, tmp_path):
    class WaitsUntilItHangs(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is not None and not (tmp_path / "pids").exists():
                until((tmp_path / "pids").exists, self)
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    monkeypatch.setattr(processes.subprocess, "Popen", WaitsUntilItHangs)
    code, _, text = planted("hangs", "nothing", seconds=1000)
    assert code == 0 and "| a row before it hung |" in text
    assert re.search(r"^- the rest of it: ended after \d+ s, its share of --minutes$", text, re.M)


@pytest.mark.parametrize("minutes", ["-1", "soon", "inf"])
def test_minutes_that_are_none_are_refused_in_a_line(planted, capsys, minutes):
    with pytest.raises(SystemExit, match="2"):
        planted("fine", arguments=["--minutes", minutes])
    assert "argument --minutes" in capsys.readouterr().err.splitlines()[-1]


def test_what_wants_a_package_that_is_not_installed_is_left_out_by_its_name(planted):
    code, _, text = planted("lacks", "fine")
    assert code == 1 and "- another: `ModuleNotFoundError: No module named 'course_lib.nowhere'`" in text
    assert "- a row: absent is not installed\n- the rest of it: nowhere_at_all is not installed\n" in text


@pytest.mark.parametrize(
    ("said", "package"),
    [
        ("/venv/bin/python: No module named papermill", "papermill"),
        ("ModuleNotFoundError: No module named 'matplotlib.pyplot'", "matplotlib"),
        ("course: `course doctor` needs datasets, which is not installed: pip install", "datasets"),
    ],
)
def test_what_another_program_lacks_is_read_from_its_words(said, package):
    assert missing(failed(said, said)) == f"{package} is not installed"
    for ours in ("ValueError: no data", "ModuleNotFoundError: No module named 'tests.gone'"):
        assert missing(failed(ours, ours)) == ""


def full_gpu():
    torch.cuda.set_per_process_memory_fraction(0.0)
    return facts.probe()


def test_a_full_gpu_is_found_when_they_are_looked_for(gpus):
    found = gpus.run(full_gpu, gpus=2)
    assert found["unusable"].startswith("GPU 0 is full: `nvidia-smi` lists what runs there")


def test_a_gpu_that_cannot_be_used_is_named_in_a_line(monkeypatch):
    answer = subprocess.CompletedProcess([], 0, json.dumps({"gpus": 1, "unusable": "GPU 0 is full"}) + "\n", "")
    monkeypatch.setattr(gpu.subprocess, "run", lambda *args, **options: answer)
    with pytest.raises(SystemExit, match="^GPU 0 is full$"):
        gpu.probe()


def test_findings_are_on_the_disk_as_they_come(tmp_path):
    findings = Findings(tmp_path / "found.json")
    with findings.trying("something") as attempt:
        findings.table("a", "b").row(1, "x")
        assert json.loads(findings.path.read_text())["parts"] == [[["a", "b"], ["1", "x"]]]
    assert attempt.word == "ok"
    with findings.trying("another") as attempt:
        raise ValueError("first\nsecond")
    assert attempt.word == "FAILED"
    assert json.loads(findings.path.read_text())["failures"] == [["another", "ValueError: first"]]


# --- what is tried


@pytest.mark.parametrize(("gpus", "pipelines"), [(1, 0), (2, 3), (3, 0), (4, 3), (8, 4)])
def test_every_pair_is_trained_in_fp32_on_all_gpus_and_every_run_is_a_valid_one(gpus, pipelines):
    for full in (False, True):
        cases = strategies.cases(replace(HERE, gpus=gpus, full=full))
        plain = [case for case in cases if (case.ranks, case.precision) == (gpus, "no") and not case.options]
        assert sorted((case.strategy, case.engine) for case in plain) == sorted(t.PAIRS)
        assert sum("pipeline" in case.name for case in cases) == pipelines
        assert len({case.label for case in cases}) == len(cases)
        for case in cases:
            config = build(case.config(Path("runs/x")))
            assert config.run.max_steps == 2 * config.output.save_steps
            rows = config.run.global_batch_size or config.run.batch_size * config.pipeline.data_parallel_size
            assert rows == strategies.ROWS
    assert not [case for case in strategies.cases(replace(HERE, bf16=False)) if case.precision == "bf16"]


def test_the_model_is_gpt2_with_as_many_rows_as_the_gpu_should_hold():
    assert [subjects.choose(replace(HERE, memory=gib << 30)).rows for gib in (80, 40, 24, 16, 8)] == [16, 8, 8, 4, 1]
    chosen = subjects.choose(HERE)
    assert 124e6 < chosen.known.parameters < 125e6 and chosen.tokens == 1024 and chosen.precision == "bf16"
    assert subjects.choose(replace(HERE, bf16=False)).precision == "no"
    with pytest.raises(RuntimeError, match="3.0 GiB are too little"):
        subjects.choose(replace(HERE, memory=3 << 30))


@pytest.mark.parametrize("ranks", [1, 2])
def test_ours_is_timed_beside_every_peer(ranks):
    known = {each.name: each for each in speed.systems(ranks)}
    assert {peer for each in known.values() for peer in each.beside} == {name for name in known if known[name].train}


def test_windows_wait_for_the_gpu_at_both_ends_of_each(monkeypatch):
    waits = []
    windows = peers.Windows(warmup=3, steps=2, count=2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(windows.done))
    for _ in range(windows.total):
        windows.step()
    assert waits == [3, 5, 7] and windows.total == 7 and len(windows.seconds) == 2


def test_kinds_of_memory_add_up_to_what_the_allocator_counts_at_the_peak():
    small = subjects.choose(replace(HERE, tiny=True))
    held = planning.estimate(small.known, small.plan("ddp", "torch", 2, "bf16"))
    at = {"before": 100, "rest": 250, "after backward": 330, "peak": 700}
    for has_buckets in (False, True):
        rows = memory.kinds(held, at, "torch", has_buckets)
        assert sum(counted for _, _, counted in rows[:-1]) == rows[-1][2] == 700
        assert sum(predicted for _, predicted, _ in rows[:-1]) == pytest.approx(held.total) == rows[-1][1]
    rows = memory.kinds(held, at, "deepspeed", False)
    assert [counted for _, _, counted in rows] == [250, 700]


# --- on simulated GPUs


def test_the_allocator_is_read_at_each_moment_of_a_step(gpus, tmp_path):
    options = {"training_type": "basic"}
    at = gpus.run(memory.on_rank, subjects.choose(replace(HERE, tiny=True)), tmp_path, 1, options, gpus=1)
    assert 0 < at["before"] < at["rest"] < at["after backward"] < at["peak"] <= at["reserved"]


def allocated_by(engine, folder):
    small = subjects.choose(replace(HERE, tiny=True))
    made = subjects.trainer(small, folder, 2, 2, [], strategy="fsdp", engine=engine)
    return torch.cuda.memory_allocated() / (4 * small.known.parameters), made.engine.close()


@pytest.mark.parametrize("engine", some(ENGINES["fsdp"], "scratch"))
def test_fsdp_keeps_no_whole_parameters_beside_its_shards(gpus, engine, tmp_path):
    for share, _ in gpus.ranks(2, allocated_by, engine, tmp_path):
        assert 0.4 < share < 0.8


@pytest.mark.long
def test_the_whole_of_it_runs_on_a_simulated_gpu(tmp_path):
    said = run_tool(tmp_path, 1, "--tiny", "--minutes", "30")
    text = (tmp_path / "gpu-report.md").read_text()
    assert said.returncode == 0, f"{said.stdout}\n{said.stderr}\n{text}"
    assert "simulated device" in text.splitlines()[0]
    states = dict(re.findall(r"^## (.*): (.*)$", text, re.M))
    assert states == {section.title: "passed" for section in gpu.SECTIONS} | {"Hangs": "not run"}
    assert "| ddp | scratch |  | fp32 | 1 | ok | ok | 0.0e+00 / 0.0e+00 |" in text
    assert len(re.findall(r"^\| ddp \| (torch|scratch) \|  \| fp32 \| 1 \| \S+ / \S+ \| ok \|$", text, re.M)) == 2
    assert re.search(r"^\| ours, ddp \| torch's DDP, loop \| \d+\.\d\d \| \d+\.\d\d \|$", text, re.M)
    assert "Triton" in text and str(tmp_path) not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-report-logs", "gpu-report.md"]
