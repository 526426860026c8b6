"""Watches the ranks while they train: memory with alerts, the share of communication, and torch.profiler's traces.

Each is a :class:`Callback`, to be handed to a trainer as it is, or switched on by the config's section ``monitor``.
What they find is in ``monitor/`` of the run's folder.
"""

import os
from collections.abc import Sequence
from typing import Any

import pandas as pd
import psutil
import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from course_lib.config import Config
from course_lib.metering.meter import Meter
from course_lib.system import machine
from course_lib.training.callbacks.base import Callback
from course_lib.training.callbacks.step_profile import StepProfile, quiet
from course_lib.training.checkpoints.run_folder import MONITOR
from course_lib.training.session import Batch, Session
from course_lib.writing import write_text

MEMORY, COMMUNICATION, ALERTS = "memory.csv", "communication.csv", "alerts.csv"
MIB = 2**20


def monitors(config: Config) -> list[Callback]:
    """The callbacks that the config's section ``monitor`` switches on."""
    chosen = config.monitor
    monitors: list[Callback] = []
    if chosen.memory_steps:
        monitors.append(MemoryMonitor(chosen.memory_steps, chosen.memory_alert, chosen.imbalance_alert))
    if chosen.communication_steps:
        monitors.append(CommunicationMonitor(chosen.communication_steps))
    if chosen.profile:
        monitors.append(StepProfile(chosen.profile_wait, chosen.profile_warmup, chosen.profiled_steps))
    elif chosen.profile_steps:
        monitors.append(Profiler(chosen.profile_wait, chosen.profile_warmup, chosen.profile_steps))
    return monitors


def from_every_rank(trainer: Session, own: Sequence[float]) -> list[list[float]]:
    """Each rank's numbers, by rank, as float32: one sum brings them together. A collective call."""
    numbers = torch.zeros(trainer.num_processes, len(own), device=trainer.device)
    numbers[trainer.rank] = torch.tensor(own)
    return trainer.ranks.sum(numbers).tolist()


class MemoryMonitor(Callback):
    """Looks at every rank's memory, and says on rank 0 when one nears its limit, or one holds far more than another.

    On a GPU it is what torch's allocator has reserved at most, of the whole GPU. On a CPU it is what the process
    holds now, of an equal share of the machine (or of its cgroup) for each rank on it. Each alert is said once.

    Args:
        every: optimizer steps between two looks; the ranks wait for each other there.
        alert: share of a rank's memory from which on it is an alert.
        imbalance: memory of the fullest rank by that of the emptiest, from which on it is an alert.

    Attributes:
        rows: step, rank, mib and share of each look.
        alerts: step and text of each alert.
    """

    def __init__(self, every: int = 10, alert: float = 0.9, imbalance: float = 1.5):
        self.every, self.alert, self.imbalance = every, alert, imbalance
        self.rows: list[dict[str, float]] = []
        self.alerts: list[dict[str, Any]] = []
        self._said: set[str] = set()

    def memory(self, trainer: Session) -> tuple[float, float]:
        """Memory that this rank holds and may hold, in MiB."""
        if trainer.device.type == "cuda":
            total = torch.cuda.get_device_properties(trainer.device).total_memory
            return torch.cuda.max_memory_reserved(trainer.device) / MIB, total / MIB
        total = min(psutil.virtual_memory().total, machine.cgroup_memory_limit() or 2**63)
        return psutil.Process().memory_info().rss / MIB, total / MIB / ranks_here(trainer)

    def on_step_end(self, trainer: Session) -> None:
        step = trainer.state.step
        if step % self.every and not trainer.state.finished:
            return
        held_by_rank = from_every_rank(trainer, self.memory(trainer))
        self.rows += [
            {"step": step, "rank": rank, "mib": held, "share": held / limit}
            for rank, (held, limit) in enumerate(held_by_rank)
        ]
        for rank, (held, limit) in enumerate(held_by_rank):
            if held >= self.alert * limit:
                self._alert(
                    trainer,
                    f"threshold {rank}",
                    f"rank {rank} holds {held:,.0f} of its {limit:,.0f} MiB "
                    f"({held / limit:.0%}), and the threshold is {self.alert:.0%}",
                )
        amounts = [held for held, _ in held_by_rank]
        most, least = max(amounts), min(amounts)
        if most >= self.imbalance * least and len(amounts) > 1:
            self._alert(
                trainer,
                "imbalance",
                f"rank {amounts.index(most)} holds {most:,.0f} MiB and rank "
                f"{amounts.index(least)} {least:,.0f}, {most / least:.2f} times less",
            )

    def _alert(self, trainer: Session, kind: str, text: str) -> None:
        if kind in self._said:
            return
        self._said.add(kind)
        self.alerts.append({"step": trainer.state.step, "alert": text})
        if trainer.is_main:
            print(f"memory alert at step {trainer.state.step}: {text}", flush=True)

    def on_train_end(self, trainer: Session) -> None:
        keep(trainer, MEMORY, self.rows, ("step", "rank", "mib", "share"))
        keep(trainer, ALERTS, self.alerts, ("step", "alert"))


class CommunicationMonitor(Callback):
    """Meters one optimizer step in so many: how much of it each rank communicates, and how much no compute hides.

    The metered steps are a little slower, see :class:`Meter`; what is around forward, backward and optimizer (data,
    logging, evaluation) is not counted.

    Args:
        every: optimizer steps between two metered ones.

    Attributes:
        rows: of each metered step and rank its seconds, the shares of communication and of communication that is not
            hidden behind compute, and MB sent under the ring model.
    """

    COLUMNS = ("step", "rank", "seconds", "communication", "exposed", "mb_sent")

    def __init__(self, every: int = 50):
        self.every = every
        self.rows: list[dict[str, float]] = []

    def on_train_begin(self, trainer: Session) -> None:
        train_step = trainer.train_step

        def metered(micro_batches: Sequence["Batch"]) -> tuple[torch.Tensor, torch.Tensor]:
            step = trainer.state.step + 1  # counted after it
            if step % self.every:
                return train_step(micro_batches)
            with Meter(trainer.wrapped, trainer.optimizer) as meter:
                result = train_step(micro_batches)
            seconds = meter.end - meter.start
            by_rank = from_every_rank(
                trainer,
                (
                    seconds,
                    meter.communication_seconds / seconds,
                    meter.exposed_seconds / seconds,
                    meter.bytes_sent / 1e6,
                ),
            )
            self.rows += [
                dict(zip(self.COLUMNS, (step, rank, *numbers), strict=True)) for rank, numbers in enumerate(by_rank)
            ]
            return result

        trainer.train_step = metered  # type: ignore[method-assign]

    def on_train_end(self, trainer: Session) -> None:
        del trainer.train_step
        keep(trainer, COMMUNICATION, self.rows, self.COLUMNS)


class Profiler(Callback):
    """torch.profiler on each rank: it waits, warms up, records, and writes a trace.

    The trace, ``monitor/rank-R.….pt.trace.json``, opens in Perfetto, ``chrome://tracing`` and TensorBoard's profiler.

    Args:
        wait: optimizer steps before it begins.
        warmup: steps that are profiled and thrown away, since the first ones are slowed by the profiler's start.
        active: steps that are recorded.
    """

    def __init__(self, wait: int = 1, warmup: int = 1, active: int = 3):
        self.schedule = schedule(wait=wait, warmup=warmup, active=active, repeat=1)

    def on_train_begin(self, trainer: Session) -> None:
        self.folder, self.rank, self.recorded = trainer.output_dir / MONITOR, trainer.rank, False
        devices = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (trainer.device.type == "cuda")
        quiet()
        self.profile = profile(activities=devices, schedule=self.schedule, on_trace_ready=self._ready)
        self.profile.start()

    def _ready(self, profiled: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tensorboard_trace_handler(str(self.folder), worker_name=f"rank-{self.rank}")(profiled)
        self.recorded = True

    def on_step_end(self, trainer: Session) -> None:
        self.profile.step()

    def on_train_end(self, trainer: Session) -> None:
        self.profile.stop()
        if not self.recorded and trainer.is_main:
            print(
                "profiler: the run ended before a step was recorded: lower profile_wait and profile_warmup", flush=True
            )


def ranks_here(trainer: Session) -> int:
    """Ranks on this machine, as its launcher says; all of them where it says nothing."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", trainer.num_processes))


def keep(trainer: Session, name: str, rows: list[dict[str, Any]], columns: Sequence[str]) -> None:
    """Write rows as CSV into the run's folder of monitors, on the main rank."""
    if trainer.is_main:
        folder = trainer.output_dir / MONITOR
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, pd.DataFrame(rows, columns=list(columns)).to_csv(index=False))
