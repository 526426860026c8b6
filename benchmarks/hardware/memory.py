"""Memory as the planner predicts it beside what the GPU's allocator counts, by kind."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.hardware import subject as subjects
from benchmarks.hardware.findings import Findings, Settings
from benchmarks.hardware.subject import Subject
from course_lib.launching.launch import launch
from course_lib.parallel.clock import Clock, Phases
from course_lib.planning import memory as planning
from course_lib.planning.memory import Memory
from course_lib.training.callbacks import Callback

STEPS = 4
SECONDS = 120
MIB = 2**20


class PhasesThatCount(Phases):
    """Phases at whose ends the allocator is read."""

    def __init__(self, clock: Clock | None, at: dict[str, int]):
        super().__init__(clock)
        self.at = at

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if name == "forward":
            torch.cuda.reset_peak_memory_stats()
            self.at["rest"] = torch.cuda.memory_allocated()
        with super().__call__(name):
            yield
        if name == "backward":
            self.at["after backward"] = torch.cuda.memory_allocated()


class Allocated(Callback):
    """What the allocator counts, in bytes: before the first step, after it, and three times in the last."""

    def on_train_begin(self, trainer: Any) -> None:
        self.at = {"before": torch.cuda.memory_allocated()}
        trainer.phases = PhasesThatCount(trainer.clock, self.at)

    def on_step_end(self, trainer: Any) -> None:
        self.at["peak"] = torch.cuda.max_memory_allocated()
        self.at["reserved"] = torch.cuda.max_memory_reserved()


def on_rank(subject: Subject, folder: Path, ranks: int, options: dict[str, Any]) -> dict[str, int]:
    """Train a few steps; bytes at the last."""
    allocated = Allocated()
    trainer = subjects.trainer(subject, folder, STEPS, ranks, [allocated], **options)
    trainer.train()
    trainer.engine.close()
    return allocated.at


def runs(settings: Settings, subject: Subject) -> list[tuple[str, str, str, bool]]:
    """Strategy, engine, precision and whether activations are computed again."""
    low = subject.precision
    found = [("ddp", "torch", "no", False), ("ddp", "torch", low, False)]
    if not settings.tiny:
        found += [("ddp", "torch", low, True), ("fsdp", "torch", low, False), ("zero2", "deepspeed", low, False)]
    if settings.full:
        found += [
            ("fsdp", "torch", low, True),
            ("fsdp", "torch", "no", False),
            ("zero1", "deepspeed", low, False),
            ("zero3", "deepspeed", low, False),
        ]
    return list(dict.fromkeys(found))


def kinds(held: Memory, at: dict[str, int], engine: str, has_buckets: bool) -> list[tuple[str, float, int]]:
    """What is compared: kind, bytes predicted, bytes counted.

    Args:
        held: the prediction.
        at: of :class:`Allocated`.
        engine: whose code trains.
        has_buckets: DDP keeps buckets for the gradients from the start, which are what the planner calls gradients.
    """
    peak = ("peak", held.total, at["peak"])
    if engine == "deepspeed":  # its backward pass steps as well, and its master weights are made with the model
        return [("parameters and optimizer", held.parameters + held.optimizer, at["rest"]), peak]
    buckets = held.gradients if has_buckets else 0.0
    gradients = at["after backward"] - at["rest"]
    return [
        ("parameters" + " and buckets" * has_buckets, held.parameters + buckets, at["before"]),
        ("optimizer", held.optimizer, at["rest"] - at["before"]),
        ("gradients" + " beside their buckets" * has_buckets, held.gradients - buckets, gradients),
        (
            "activations, logits, buffers",
            held.activations + held.logits + held.buffers,
            at["peak"] - at["rest"] - gradients,
        ),
        peak,
    ]


def run(settings: Settings, findings: Findings) -> None:
    """Predict, train, and set the two side by side."""
    subject = subjects.choose(settings)
    findings.note(
        f"{subject.described}, on {settings.counted}; precision and strategy as below. MiB of the fullest "
        "rank. Parameters stand before the first step; the optimizer is what stands between two steps "
        "besides; gradients are what the backward pass leaves; the rest of the peak are activations, logits "
        "and buffers. The allocator also counts the workspaces of matmuls; it does not count CUDA's context "
        "and NCCL."
    )
    table = findings.table("run", "kind", "predicted", "counted", "error of the prediction")
    for number, (strategy, engine, precision, again) in enumerate(runs(settings, subject)):
        label = f"{strategy}, {engine}, {precision.replace('no', 'fp32')}" + (", recomputing" if again else "")
        if findings.is_late(label):
            continue
        with findings.trying(label):
            held = planning.estimate(subject.known, subject.plan(strategy, engine, settings.gpus, precision, again))
            options = {"strategy": strategy, "engine": engine, "mixed_precision": precision, "checkpointing": again}
            folder = settings.room("memory") / str(number)
            ranks = {"num_processes": settings.gpus, "device": "cuda", "timeout": SECONDS}
            found = launch(on_rank, subject, folder, settings.gpus, options, **ranks)
            at = max(found, key=lambda each: each["peak"])
            for kind, predicted, counted in kinds(held, at, engine, strategy == "ddp" and settings.gpus > 1):
                table.row(
                    label,
                    kind,
                    f"{predicted / MIB:,.1f}",
                    f"{counted / MIB:,.1f}",
                    f"{100 * (predicted / counted - 1):+.1f} %" if counted > 0 else "",
                )
            table.row(label, "reserved by the allocator", "", f"{at['reserved'] / MIB:,.1f}", "")
            if not at["peak"] > at["rest"] > at["before"] > 0:
                raise AssertionError(f"the allocator counts {at}")
