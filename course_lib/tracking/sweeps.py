"""Sweeps: many runs of one configuration with some fields varied, in the file format of W&B sweeps.

The same file serves ``course sweep``, which runs everything here, and ``wandb sweep``, for those with an account.
"""

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import scipy.stats
import yaml
from sklearn.model_selection import ParameterGrid, ParameterSampler

from course_lib.config import files as config_files
from course_lib.errors import ConfigError, CourseError, nearest
from course_lib.tracking.base import ends_by_name
from course_lib.writing import write_text

METHODS = ("grid", "random")
DISTRIBUTIONS = ("uniform", "log_uniform_values", "int_uniform")
KEYS = ("name", "method", "metric", "parameters", "run_cap", "seed", "program", "command", "description", "project")
CLI = Path(__file__).parents[1] / "cli.py"
RESULTS = "results.csv"
ABOUT = "sweep.json"
"""In the sweep's folder: what it runs, so that the same sweep goes on and no other does."""
HOW = "write `values: [...]`, `value:`, or `min:` and `max:`"


@dataclass(frozen=True)
class Sweep:
    """Fields that a sweep varies, how, and the metric that decides.

    Attributes:
        name: of the sweep; the group of its runs.
        method: ``grid`` or ``random``.
        parameters: by field either a list of values, or a distribution to draw from (random alone).
        metric: of the final evaluation, as in a summary: ``macro_f1``, ``loss``.
        goal: ``maximize`` or ``minimize``.
        count: runs; None: the whole grid.
        seed: of the random draws.
    """

    name: str
    method: str
    parameters: Mapping[str, Any]
    metric: str
    goal: str
    count: int | None = None
    seed: int = 0

    def settings(self) -> list[dict[str, Any]]:
        """The fields of each run, plain values, in order."""
        if self.method == "grid":
            return list(itertools.islice(ParameterGrid(dict(self.parameters)), self.count))
        drawn = ParameterSampler(dict(self.parameters), self.count or 10, random_state=self.seed)
        return [
            {name: getattr(value, "item", lambda value=value: value)() for name, value in parameters.items()}
            for parameters in drawn
        ]


@dataclass
class Outcome:
    """One run of a sweep.

    Attributes:
        settings: the varied fields.
        folder: of the run.
        scores: of the final evaluation, with the ends of their 95 % intervals (``accuracy_low``, ``accuracy_high``) and
            samples_per_second; empty where it failed.
        error: its last line of output, where it failed.
    """

    settings: dict[str, Any]
    folder: Path
    scores: dict[str, float] = field(default_factory=dict)
    error: str = ""


def read_sweep(path: Path) -> Sweep:
    """A sweep from a YAML file as ``wandb sweep`` reads it.

    Raises:
        ConfigError: no such file, an unknown key, field, method or distribution, or a value of another type.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"cannot read sweep {path}: {getattr(error, 'strerror', None) or 'it is not YAML'}",
            "give a file with `method:` and `parameters:`",
        ) from None
    if not isinstance(tree, dict) or not isinstance(tree.get("parameters"), dict) or not tree["parameters"]:
        raise ConfigError(f"sweep {path} has no parameters", "write `parameters:` with a field and its values")
    if unknown := [key for key in tree if key not in KEYS]:
        raise ConfigError(f"{path}: unknown key `{unknown[0]}`", nearest(str(unknown[0]), KEYS))
    method = tree.get("method", "grid")
    if method not in METHODS:
        raise ConfigError(f"{path}: method `{method}` is not run here", f"choose from {', '.join(METHODS)}")
    metric = tree.get("metric") or {"name": "loss", "goal": "minimize"}
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        raise ConfigError(f"{path}: metric is `{metric}`", "write `metric: {name: loss, goal: minimize}`")
    goal = metric.get("goal", "minimize")
    if goal not in ("maximize", "minimize"):
        raise ConfigError(f"{path}: goal `{goal}`", "choose from maximize, minimize")
    for key, least in (("run_cap", 1), ("seed", 0)):
        if tree.get(key) is not None and not (type(tree[key]) is int and least <= tree[key] < 2**32):
            raise ConfigError(f"{path}: {key} is `{tree[key]}`", f"give a whole number, {least} or more")
    parameters = {
        config_files.canonical(str(name)): _values(name, given, method, path)
        for name, given in tree["parameters"].items()
    }
    if "output_dir" in parameters:
        raise ConfigError(f"{path}: output_dir cannot be varied", "each run has a folder of the sweep")
    return Sweep(
        str(tree.get("name") or path.stem),
        method,
        parameters,
        metric["name"].removeprefix("eval."),
        goal,
        tree.get("run_cap"),
        tree.get("seed") or 0,
    )


def _values(name: str, given: Any, method: str, path: Path) -> Any:
    """A list of values, or a distribution with ``rvs``."""
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: parameter {name} is `{given}`", HOW)
    if "value" in given:
        return [given["value"]]
    if "values" in given:
        if not isinstance(given["values"], list) or not given["values"]:
            raise ConfigError(f"{path}: parameter {name} has the values `{given['values']}`", HOW)
        return given["values"]
    if not {"min", "max"} <= given.keys():
        raise ConfigError(f"{path}: parameter {name} has no values", HOW)
    low, high = given["min"], given["max"]
    if not all(isinstance(end, int | float) and abs(end) < 2**62 for end in (low, high)):
        raise ConfigError(f"{path}: {name} from {low} to {high}", "min and max have to be numbers such as 2 or 1.0e-5")
    whole = isinstance(low, int) and isinstance(high, int)
    kind = given.get("distribution", "int_uniform" if whole else "uniform")
    if kind not in DISTRIBUTIONS:
        raise ConfigError(f"{path}: distribution `{kind}` of {name}", f"choose from {', '.join(DISTRIBUTIONS)}")
    if not low < high or (kind == "log_uniform_values" and low <= 0):
        raise ConfigError(
            f"{path}: {name} from {low} to {high} with {kind}", "min has to lie below max, and above 0 for logs"
        )
    if method == "grid":
        raise ConfigError(f"{path}: {name} has a distribution, and a grid needs values", "use `method: random`")
    if kind == "int_uniform":
        if not whole:
            raise ConfigError(f"{path}: {name} from {low} to {high} with {kind}", "give it whole numbers")
        return scipy.stats.randint(low, high + 1)
    return scipy.stats.loguniform(low, high) if kind == "log_uniform_values" else scipy.stats.uniform(low, high - low)


class TrainingFailed(CourseError):
    """A ``course train`` of a sweep or a study ended badly; its last line tells why."""


class Trainings:
    """The ``course train`` processes that run now, so that all can be told to save and end."""

    def __init__(self) -> None:
        self._alive: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command quietly to its end.

        Raises:
            TrainingFailed: all were told to stop before it began.
        """
        with self._lock:
            if self._stopped:
                raise TrainingFailed("not started")
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
            self._alive.add(process)
        try:
            out, err = process.communicate()
        finally:
            with self._lock:
                self._alive.discard(process)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def stop(self) -> None:
        """Start none any more, and send SIGTERM to those that run: each writes a checkpoint and ends."""
        with self._lock:
            self._stopped = True
            for process in self._alive:
                process.terminate()


def train_apart(options: Sequence[str], folder: Path, trainings: Trainings | None = None) -> dict[str, Any]:
    """Run ``course train`` as a process of its own, quietly, and give its summary.

    Raises:
        TrainingFailed: with the last line that it printed.
    """
    command = [sys.executable, str(CLI), "train", *options, "--output_dir", str(folder), "--progress_bar", "false"]
    done = (trainings or Trainings()).run(command)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}").splitlines()
        raise TrainingFailed(lines[-1].removeprefix("course: "))
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def run_sweep(
    sweep: Sweep, base: Sequence[str], folder: Path, *, parallel: int = 1, say: Callable[[str], None] = print
) -> list[Outcome]:
    """Run every setting as its own ``course train``, some at a time; one that fails stops no other.

    In a folder where the same sweep was stopped, it goes on: what has ended is read, what was begun is resumed from its
    newest checkpoint, and what failed is tried again.

    Args:
        sweep: the settings, and the metric that ranks them.
        base: options of every run, such as ``["--config", "configs/quickstart.yaml"]``.
        folder: where each run has its own, and ``results.csv`` is written.
        parallel: runs at a time; they share this machine.
        say: told of each run as it ends.
    Raises:
        ConfigError: the folder holds another sweep, or something else.
        KeyboardInterrupt: it was stopped; the runs under way have saved and ended.
    """
    claim(sweep, base, folder)
    trainings = Trainings()
    settings = sweep.settings()
    width = len(str(len(settings)))
    planned = [Outcome(setting, folder / f"{i:0{width}}") for i, setting in enumerate(settings)]

    def one(outcome: Outcome) -> Outcome:
        options = [text for name, value in outcome.settings.items() for text in (f"--{name}", _text(value))]
        try:
            done = outcome.folder / "summary.json"
            go_on = ["--resume_from_checkpoint", "auto"] if outcome.folder.exists() else []
            summary = (
                json.loads(done.read_text(encoding="utf-8"))
                if done.exists()
                else train_apart([*base, *options, "--run_group", sweep.name, *go_on], outcome.folder, trainings)
            )
            outcome.scores = {name: value for name, value in summary["eval"].items() if isinstance(value, float)}
            outcome.scores |= ends_by_name(summary["eval"].get("interval95", {}))
            outcome.scores["samples_per_second"] = summary["train"]["samples_per_second"]
        except TrainingFailed as error:
            outcome.error = str(error)
        told = (
            f"{sweep.metric} {with_interval(outcome.scores, sweep.metric)}"
            if sweep.metric in outcome.scores
            else outcome.error or f"it has no {sweep.metric}"
        )
        say(f"{outcome.folder.name}: {shown(outcome.settings)}: {told}")
        return outcome

    with ThreadPoolExecutor(parallel) as pool:
        try:
            outcomes = list(pool.map(one, planned))
        except BaseException:
            trainings.stop()
            pool.shutdown(cancel_futures=True)
            raise
    write_text(folder / RESULTS, ranked(sweep, outcomes).to_csv(index=False))
    return outcomes


def claim(sweep: Sweep, base: Sequence[str], folder: Path) -> None:
    """Write into a sweep's folder what it runs, or find that the same is there.

    Raises:
        ConfigError: the folder holds another sweep, or something else.
    """
    about = json.loads(json.dumps({"settings": sweep.settings(), "options": list(base)}))
    note = folder / ABOUT
    if not note.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} holds files that are no sweep", "give another --sweep_dir")
        folder.mkdir(parents=True, exist_ok=True)
        write_text(note, json.dumps(about, indent=1) + "\n")
    elif json.loads(note.read_text(encoding="utf-8")) != about:
        raise ConfigError(
            f"{folder} holds a sweep of other settings or options",
            "give it those to go on, another --sweep_dir, or delete it",
        )


def ranked(sweep: Sweep, outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row per run, the best first, those that failed last."""
    rows = [{"run": o.folder.name} | o.settings | o.scores | {"error": o.error} for o in outcomes]
    frame = pd.DataFrame(rows)
    if sweep.metric in frame:
        frame = frame.sort_values(sweep.metric, ascending=sweep.goal == "minimize", na_position="last", kind="stable")
    return frame.reset_index(drop=True)


def with_interval(scores: Mapping[str, Any], metric: str) -> str:
    """A score and its 95 % interval, where it has one: ``0.8290 [0.7910, 0.8600]``."""
    ends = [f"{scores[end]:.4f}" for end in (f"{metric}_low", f"{metric}_high") if pd.notna(scores.get(end))]
    return f"{scores[metric]:.4f}" + (f" [{', '.join(ends)}]" if ends else "")


def wandb_yaml(sweep_file: Path, base: Sequence[str]) -> str:
    """The file for ``wandb sweep``: the same, with the program and how its agent has to call it."""
    tree = yaml.safe_load(sweep_file.read_text(encoding="utf-8"))
    tree.pop("seed", None)
    metric = tree.get("metric")
    if metric and not metric["name"].startswith("eval."):
        metric["name"] = f"eval.{metric['name']}"
    tree |= {
        "program": "course_lib/cli.py",
        "command": ["${env}", "${interpreter}", "${program}", "train", *base, "--tracker", "wandb", "${args}"],
    }
    return yaml.safe_dump(tree, sort_keys=False)


def shown(settings: Mapping[str, Any]) -> str:
    """Settings in one line."""
    return ", ".join(f"{name}={_text(value)}" for name, value in settings.items())


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.6g}" if isinstance(value, float) else str(value)
