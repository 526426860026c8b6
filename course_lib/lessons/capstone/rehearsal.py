"""The capstone's runs on this machine's ranks: metered, killed, resumed, and read back from their tracker."""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file

from course_lib.config import Config
from course_lib.errors import CheckpointError
from course_lib.launching.launch import RankError, launch
from course_lib.lessons.capstone.decisions import Project
from course_lib.metering.meter import Meter
from course_lib.tracking import collect
from course_lib.training.callbacks import Callback
from course_lib.training.checkpoints import checkpoint
from course_lib.training.checkpoints.run_folder import METRICS, MODEL
from course_lib.training.run import train
from course_lib.training.session import Session

METERED = 2
"""The step whose model states are metered; what the next one sends is, too."""
TIMEOUT = 300.0
"""Seconds after which a run of the project is ended."""


class StepMeter(Callback):
    """Meters two steps of this rank, and tracks what it found: the model states, and the bytes sent.

    The first is metered until backward has ended, when gradients are there and the optimizer has not begun; the
    second is metered whole. For strategies of the accelerated trainer.

    Args:
        step: the first of the two, from 2 on, as the optimizer has no states before.
    """

    def __init__(self, step: int = METERED):
        self.step = step

    def on_train_begin(self, trainer: Session) -> None:
        engine, train_step = trainer.engine, trainer.train_step
        wrapped, clip = trainer.wrapped, engine.clip
        optimizer = getattr(wrapped, "optimizer", trainer.optimizer)  # DeepSpeed's own knows its gradients and copies

        def metered(micro_batches: Any) -> Any:
            number = trainer.state.step + 1 - self.step
            if number not in (0, 1):
                return train_step(micro_batches)
            meter = Meter(wrapped, optimizer, getattr(wrapped, "resident", None))
            with ExitStack() as stack:
                stack.enter_context(meter)

                def end_of_backward(max_norm: float) -> Any:
                    if number == 0:
                        stack.close()
                    return clip(max_norm)

                engine.clip = end_of_backward  # type: ignore[method-assign]
                result = train_step(micro_batches)
                engine.clip = clip  # type: ignore[method-assign]
            states = sum(meter.resident[kind] for kind in ("parameters", "gradients", "optimizer states"))
            values = {"capstone/states": states} if number == 0 else {"capstone/sent": meter.bytes_sent}
            trainer.ranks.accelerator.log(values, step=trainer.state.step + 1)
            return result

        trainer.train_step = metered  # type: ignore[method-assign]


@dataclass(frozen=True)
class Tracked:
    """A run, as its tracker kept it.

    Attributes:
        arm: ``chosen`` or ``other``.
        seed: of the run.
        samples: rows that it trained on.
        loss: on the held-out rows at the end, in nats.
        loss_high: upper end of the 95 % interval of that, over rows.
        samples_per_second: of all ranks, over the steps that nothing metered.
        states: bytes on rank 0 when backward had ended.
        sent: bytes that rank 0 sent in an optimizer step.
        macro_f1_low: lower end of the 95 % interval of macro-F1; None for language modelling.
    """

    arm: str
    seed: int
    samples: int
    loss: float
    loss_high: float
    samples_per_second: float
    states: float
    sent: float
    macro_f1_low: float | None = None


def read_back(folder: Path) -> tuple[list[Tracked], list[str]]:
    """The compared runs of a folder, and the fields of the config in which they differ."""
    runs = collect.read_runs(folder)
    return [_tracked(run) for run in runs], collect.differing_options(runs)


def _tracked(run: collect.TrackedRun) -> Tracked:
    curves: dict[str, dict[int, float]] = {}
    for step, _, metric, value in run.rows:
        curves.setdefault(metric, {})[step] = value
    seconds = curves["train/seconds"]
    samples = {step: rate * seconds[step] for step, rate in curves["train/samples_per_second"].items()}
    first, last = METERED + 1, max(samples)
    split = "test" if "test/loss" in curves else "validation"
    scores = {metric: values[max(values)] for metric, values in curves.items() if metric.startswith(f"{split}/")}
    return Tracked(
        run.name.split("-")[0],
        run.config["seed"],
        round(samples[last]),
        scores[f"{split}/loss"],
        scores[f"{split}/loss_high"],
        (samples[last] - samples[first]) / (seconds[last] - seconds[first]),
        next(iter(curves["capstone/states"].values())),
        next(iter(curves["capstone/sent"].values())),
        scores.get(f"{split}/macro_f1_low"),
    )


def table(runs: Sequence[Tracked]) -> pd.DataFrame:
    """One row per arm: runs, rows of each, mean loss and its spread, MiB of states, MB sent, samples per second.

    ``spread`` is the standard deviation of the loss over the arm's seeds.
    """
    frame = pd.DataFrame([vars(run) for run in runs]).groupby("arm")
    means = frame[["loss", "states", "sent", "samples_per_second"]].mean()
    means.insert(0, "runs", frame.size())
    means.insert(1, "samples", frame["samples"].first())
    means.insert(3, "spread", frame["loss"].std())
    return means.assign(states=means["states"] / 2**20, sent=means["sent"] / 1e6).rename(
        columns={"states": "states_MiB", "sent": "sent_MB"}
    )


def gap_and_error(runs: Sequence[Tracked]) -> tuple[float, float]:
    """By how much the other arm's loss is higher in the mean of the seeds, in nats, and the standard error of that.

    Both arms run with the same seeds, so each seed gives a difference, and the error is theirs; it is nan where there
    are fewer than two.
    """
    losses = pd.DataFrame([vars(run) for run in runs]).pivot_table(index="seed", columns="arm", values="loss")
    differences = (losses["other"] - losses["chosen"]).dropna()
    return float(differences.mean()), float(differences.sem())


class KillAt(Callback):
    """Ends a rank by SIGKILL, which no program can catch, at the end of a step, before any checkpoint of it."""

    def __init__(self, rank: int, step: int):
        self.rank, self.step = rank, step

    def on_step_end(self, trainer: Session) -> None:
        if (trainer.rank, trainer.state.step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Broken:
    """Files that a killed run left.

    Attributes:
        how: what ended it, in the launcher's words.
        killed: whether SIGKILL did.
        step: the last step done.
        checkpoint: the newest whole one's name, None where there is none.
        lost: steps done since that checkpoint, or since the beginning.
        losses: by step.
    """

    how: str
    killed: bool
    step: int
    checkpoint: str | None
    lost: int
    losses: Mapping[int, float]


def break_run(project: Project, folder: Path, kill: KillAt | None = None) -> Broken:
    """Train the project's first run in ``folder``, kill a rank in the middle, and look at what is left.

    By default ``kill`` ends the last rank, at the project's ``kill_step``.
    """
    config = project.config(folder)
    kill = kill or KillAt(project.world_size - 1, project.kill_step)
    how = f"nothing: there is no step {kill.step}"
    try:
        _train(project, config, [kill])
    except RankError as error:
        how = str(error).splitlines()[0]
    losses = dict(record_of(folder))
    killed = "SIGKILL" in how
    step = kill.step if killed else max(losses, default=0)
    try:
        newest = checkpoint.latest(folder).name
    except CheckpointError:
        newest = None
    return Broken(how, killed, step, newest, step - (int(newest.split("-")[1]) if newest else 0), losses)


def _train(project: Project, config: Config, callbacks: Sequence[Callback] = ()) -> None:
    ranks: dict[str, Any] = {"num_processes": project.world_size, "device": project.device}
    launch(train, config, list(callbacks), timeout=TIMEOUT, stream=False, **ranks)


def record_of(folder: Path) -> list[tuple[int, float]]:
    """Training steps and losses in a run's ``metrics.jsonl``; nothing where it ended before its first line."""
    if not (folder / METRICS).exists():
        return []
    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@dataclass(frozen=True)
class Resumed:
    """A resumed run beside the undisturbed one.

    Attributes:
        problem: why it could not be resumed, else empty; then what follows is of no meaning.
        bytes: of the final weights.
        differing: bytes of them that are not those of the undisturbed run.
        record: training steps and losses as they stand in ``metrics.jsonl`` after both parts of the run.
    """

    problem: str
    bytes: int = 0
    differing: int = 0
    record: Sequence[tuple[int, float]] = ()


def resume(project: Project, folder: Path, undisturbed: Path) -> Resumed:
    """Go on from the newest whole checkpoint of a broken run, and compare its end with that of another folder's."""
    config = project.config(folder, overwrite_output_dir=False, resume_from_checkpoint="latest")
    try:
        _train(project, config)
    except CheckpointError as error:
        return Resumed(str(error))
    return Resumed("", *differing_bytes(folder, undisturbed), record_of(folder))


def differing_bytes(one: Path, another: Path) -> tuple[int, int]:
    """Bytes of a run's final weights, and how many of them another run's differ in."""
    mine, theirs = (load_file(folder / MODEL / "model.safetensors") for folder in (one, another))
    pairs = [
        (tensor.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8))
        for name, tensor in mine.items()
    ]
    return sum(a.numel() for a, _ in pairs), sum(int((a != b).sum()) for a, b in pairs)
