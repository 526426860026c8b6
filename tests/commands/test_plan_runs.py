"""Plans that run here: the files of one, scaled down, under Accelerate's launcher, and a benchmark of them."""

import json

import pytest

from course_lib import cli
from course_lib.planning import benchmark, cost, hardware, models
from course_lib.planning.plan import Plan
from tests.commands.conftest import run


@pytest.mark.long
def test_the_emitted_run_trains(tmp_path):
    asked = ["plan", "--model", "gpt2", "--gpu", "CPU", "--gpus", "2", "--sequence-length", "32", "--global-batch", "8"]
    assert cli.main([*asked, "--emit", str(tmp_path / "plan")]) == 0
    done = run(
        "train",
        "--config",
        tmp_path / "plan/course.yaml",
        "--model",
        "tiny-gpt2",
        "--max_steps",
        "2",
        "--max_train_samples",
        "64",
        "--max_eval_samples",
        "16",
        "--baselines",
        "false",
        "--torch_compile",
        "false",
        "--mixed_precision",
        "no",
        "--device",
        "cpu",
        "--output_dir",
        tmp_path / "run",
        launcher=["-m", "accelerate.commands.launch", "--config_file", tmp_path / "plan/accelerate.yaml"],
        ACCELERATE_USE_CPU="true",
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["strategy"], summary["world_size"]) == ("fsdp", 2)


@pytest.mark.long
def test_a_benchmark_runs_here_and_calibrates_the_planner(tmp_path, capsys):
    results = tmp_path / "results.json"
    assert cli.main(["bench", "--model", "gpt2", "--hardware", "cpu", "--run", "--output", str(results)]) == 0
    assert "DDP on 1: " in capsys.readouterr().out
    written = json.loads(results.read_text())
    (result,) = written["results"]
    assert (result["model"], result["strategy"], result["ranks"]) == ("tiny-gpt2", "DDP", 1)
    measured, plan = result["tokens_per_second"], Plan(**result["plan"])
    assert measured > 0 and written["matmul"]["CPU"]["fp32"] > 0
    model = models.load(tmp_path / "results-runs/ddp-1/model")
    here = hardware.cluster("CPU", 1)
    assert cost.estimate(model, plan, benchmark.calibrated(here, results)).tokens_per_second == pytest.approx(
        measured, rel=1e-6
    )
    assert cost.estimate(model, plan, here).tokens_per_second != pytest.approx(measured, rel=1e-3)
