"""``course sweep`` runs real trainings, side by side, and ranks them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from course_lib.tracking import sweeps
from tests.forked_process import run_course, train_forked
from tests.waiting import has_lines, until

COURSE = Path(sys.executable).parent / "course"
TINY = shlex.split(
    "--model tiny-bert --max_train_samples 32 --max_eval_samples 16 --max_length 32 --max_steps 2 --baselines false "
    "--device cpu --save_steps 0"
)
SWEEP = """
name: try
method: grid
metric: {name: loss, goal: minimize}
parameters:
  learning_rate: {values: [1.0e-3, 1.0e-9]}
  batch_size: {values: [8]}
"""


def test_runs_are_ranked_and_one_that_fails_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps.Trainings, "run", train_forked)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(SWEEP.replace("[1.0e-3, 1.0e-9]", "[1.0e-3, 1.0e-9, 1.0e+30]"))
    done = run_course("sweep", sweep, *TINY, "--parallel", "2", "--sweep_dir", tmp_path / "runs")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    results = pd.read_csv(tmp_path / "runs" / "results.csv")
    losses = results["loss"].dropna()
    assert len(results) == 3 and len(losses) == 2 and losses.is_monotonic_increasing
    told = re.findall(r"(\d\.\d{4}) \[(\d\.\d{4}), (\d\.\d{4})\]", done.stdout.partition("runs by loss")[2])
    whole = results.dropna(subset=["loss"])[["loss", "loss_low", "loss_high"]]
    assert [list(map(float, row)) for row in told] == whole.round(4).values.tolist(), "with each 95 % interval"
    failed = results[results["error"].notna()]
    assert failed["learning_rate"].tolist() == [1e30] and "not a finite number" in done.stdout
    ended = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/summary.json")}
    assert len(ended) == 2
    again = run_course("sweep", sweep, *TINY, "--sweep_dir", tmp_path / "runs")
    assert again.returncode == 1 and "not a finite number" in again.stdout, "what failed is tried again"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/summary.json")} == ended
    assert pd.read_csv(tmp_path / "runs" / "results.csv").equals(results)
    other = run_course("sweep", sweep, *TINY, "--seed", "7", "--sweep_dir", tmp_path / "runs")
    assert other.returncode == 2 and "holds a sweep of other settings or options" in other.stderr


@pytest.mark.long
def test_a_stopped_sweep_goes_on(tmp_path):
    """SIGTERM while the second of four runs: it saves, the third never starts, and the same command goes on."""
    sweep = tmp_path / "sweep.yaml"
    steps = SWEEP.replace("batch_size: {values: [8]}", "max_steps: {values: [2, 100000]}")
    sweep.write_text(steps.replace("[1.0e-3, 1.0e-9]", "[1.0e-3, 1.0e-4]"))
    line = [str(COURSE), "sweep", sweep, *TINY, "--sweep_dir", tmp_path / "runs", "--num_epochs", "100000"]
    for _ in range(2):
        with subprocess.Popen(list(map(str, line)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as begun:
            try:
                until(lambda: logged(tmp_path / "runs" / "1"), begun, what="a step of the second run")
                begun.terminate()
                out, err = begun.communicate(timeout=240)
            finally:
                begun.kill()
        assert begun.returncode == 75 and err.splitlines()[-1] == (
            "course: sweep stopped: 1 of 4 runs have ended: the same command goes on"
        ), err
        assert list((tmp_path / "runs" / "1").glob("checkpoint-*")) and not (tmp_path / "runs" / "2").exists()


def logged(folder):
    """Whether a run has logged a step since it was last stopped."""
    return has_lines(folder / "metrics.jsonl", 1)() and not (folder / "interrupted.json").exists()


def test_a_dry_run_and_a_setting_that_no_run_could_take(tmp_path):
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(SWEEP)
    done = run_course("sweep", sweep, *TINY, "--dry_run")
    assert done.returncode == 0 and done.stdout.splitlines() == [
        "0: batch_size=8, learning_rate=0.001",
        "1: batch_size=8, learning_rate=1e-09",
    ]
    sweep.write_text(SWEEP.replace("[8]", "[8, 0]"))
    refused = run_course("sweep", sweep, *TINY, "--batch_size", "8", "--sweep_dir", tmp_path / "runs")
    assert refused.returncode == 2 and "`batch_size` cannot be 0" in refused.stderr, "the sweep's value wins"
    assert not (tmp_path / "runs").exists()
    sweep.write_text(SWEEP)
    written = run_course("sweep", sweep, *TINY, "--wandb_yaml", tmp_path / "wandb.yaml")
    assert written.returncode == 0 and "--max_steps" in (tmp_path / "wandb.yaml").read_text()
