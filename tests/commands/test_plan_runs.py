"""A plan that runs here: its files, scaled down, under Accelerate's launcher."""

import json
import shlex

import pytest

from course_lib import cli
from tests.commands.conftest import run


@pytest.mark.long
def test_the_emitted_run_trains(tmp_path):
    plan, launcher = tmp_path / "plan", ("-m", "accelerate.commands.launch", "--config_file")
    asked = shlex.split("plan --model gpt2 --gpu CPU --gpus 2 --sequence-length 32 --global-batch 8")
    assert cli.main([*asked, "--emit", str(plan)]) == 0
    small = shlex.split(
        "--model tiny-gpt2 --max_steps 2 --max_train_samples 64 --max_eval_samples 16 --baselines false "
        "--torch_compile false --mixed_precision no --device cpu"
    )
    line = ("train", "--config", plan / "course.yaml", *small, "--output_dir", tmp_path / "run")
    done = run(*line, launcher=(*launcher, plan / "accelerate.yaml"), ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["strategy"], summary["world_size"]) == ("fsdp", 2)
