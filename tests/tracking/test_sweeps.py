"""Sweeps: what a file means, what is refused, and what is handed to W&B."""

import pytest
import yaml

from course_lib.errors import ConfigError
from course_lib.tracking import sweeps

GRID = """
method: grid
metric: {name: macro_f1, goal: maximize}
parameters:
  lr: {values: [1.0e-4, 5.0e-5]}
  batch_size: {values: [4, 8, 16]}
  optimizer: {value: adamw}
"""
RANDOM = """
name: search
method: random
run_cap: 40
seed: 3
parameters:
  learning_rate: {min: 1.0e-5, max: 1.0e-3, distribution: log_uniform_values}
  weight_decay: {min: 0.0, max: 0.1}
  batch_size: {min: 4, max: 8}
  activation_checkpointing: {values: [true, false]}
"""


@pytest.fixture
def sweep_of(tmp_path):
    def read(text):
        path = tmp_path / "sweep.yaml"
        path.write_text(text)
        return sweeps.read_sweep(path)

    return read


def test_a_grid_is_every_combination_once(sweep_of):
    sweep = sweep_of(GRID)
    settings = sweep.settings()
    assert len(settings) == 6 == len({tuple(sorted(setting.items())) for setting in settings})
    assert all(set(setting) == {"learning_rate", "batch_size", "optimizer"} for setting in settings)  # canonical names
    assert (sweep.name, sweep.metric, sweep.goal) == ("sweep", "macro_f1", "maximize")
    assert len(sweep_of(GRID + "run_cap: 4\n").settings()) == 4


def test_random_draws_are_within_their_bounds_and_repeatable(sweep_of):
    settings = sweep_of(RANDOM).settings()
    assert len(settings) == 40 and settings == sweep_of(RANDOM).settings()
    assert settings != sweep_of(RANDOM.replace("seed: 3", "seed: 4")).settings()
    rates = [setting["learning_rate"] for setting in settings]
    assert all(1e-5 <= rate <= 1e-3 for rate in rates)
    assert sum(rate < 1e-4 for rate in rates) > 8  # a plain uniform would draw a tenth of them, 4
    assert {setting["batch_size"] for setting in settings} == {4, 5, 6, 7, 8}
    assert all(type(setting["batch_size"]) is int and type(setting["weight_decay"]) is float for setting in settings)
    assert {setting["activation_checkpointing"] for setting in settings} == {True, False}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("method: grid\n", "has no parameters"),
        ("parameters: {learning_rte: {values: [1]}}\n", "unknown option `learning_rte`"),
        ("method: bayes\nparameters: {learning_rate: {values: [1]}}\n", "method `bayes` is not run here"),
        ("parameters: {learning_rate: 3}\n", "parameter learning_rate is `3`"),
        ("parameters: {learning_rate: {min: 3}}\n", "parameter learning_rate has no values"),
        ("parameters: {learning_rate: {min: 1, max: 2}}\n", "a grid needs values"),
        ("method: random\nparameters: {learning_rate: {min: 2.0, max: 1.0}}\n", "min has to lie below max"),
        ("method: random\nparameters: {learning_rate: {min: 1.0, max: 2.0, distribution: normal}}\n", "`normal`"),
        ("parameters: {output_dir: {values: [a]}}\n", "output_dir cannot be varied"),
        ("paramters: {}\nparameters: {seed: {values: [1]}}\n", "unknown key `paramters`"),
        ("[1", "it is not YAML"),
        (GRID + "run_cap: true\n", "run_cap is `True`"),
    ],
)
def test_wrong_files_are_refused_in_one_line(sweep_of, text, told):
    with pytest.raises(ConfigError) as error:
        sweep_of(text)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("goal", "order"), [("maximize", ["1", "0", "2"]), ("minimize", ["0", "1", "2"])])
def test_the_best_comes_first_and_the_failed_last(tmp_path, goal, order):
    sweep = sweeps.Sweep("s", "grid", {"seed": [0, 1, 2]}, "loss", goal)
    outcomes = [
        sweeps.Outcome({"seed": 0}, tmp_path / "0", {"loss": 0.5}),
        sweeps.Outcome({"seed": 1}, tmp_path / "1", {"loss": 0.7}),
        sweeps.Outcome({"seed": 2}, tmp_path / "2", error="it broke"),
    ]
    frame = sweeps.ranked(sweep, outcomes)
    assert list(frame["run"]) == order and frame.loc[2, "error"] == "it broke"


def test_the_file_for_wandb_is_one_that_wandb_reads(tmp_path):
    from wandb.sdk.launch.sweeps.utils import load_sweep_config

    path = tmp_path / "sweep.yaml"
    path.write_text(GRID + "seed: 3\n")
    for_wandb = tmp_path / "wandb.yaml"
    for_wandb.write_text(sweeps.wandb_yaml(path, ["--config", "configs/quickstart.yaml"]))
    read = load_sweep_config(str(for_wandb))
    assert read["method"] == "grid" and read["metric"] == {"name": "eval.macro_f1", "goal": "maximize"}
    assert read["command"][3:6] == ["train", "--config", "configs/quickstart.yaml"] and read["command"][-1] == "${args}"
    assert "seed" not in yaml.safe_load(for_wandb.read_text())
