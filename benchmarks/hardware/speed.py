"""Tokens per second and MFU of our trainers beside their peers at equal settings, as ratios within one run."""

import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.hardware import peers
from benchmarks.hardware import subject as subjects
from benchmarks.hardware.findings import Findings, Settings, Table
from benchmarks.hardware.peers import Windows
from benchmarks.hardware.subject import Subject
from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.planning import hardware
from course_lib.system import machine
from course_lib.training.callbacks import Callback

WARMUP, WINDOWS = 6, 2
WINDOW_SECONDS, STEPS = 2.0, 20
"""About, for a stretch of steps; and how many those are where it cannot be found out."""
SECONDS = 240
"""For one trial; a first compilation takes most of it."""


@dataclass(frozen=True)
class System:
    """Something that trains.

    Attributes:
        train: a peer's function; None for ours.
        options: our trainer's.
        beside: of ours: the peers that it is compared with.
        compiles: needs torch.compile.
    """

    name: str
    train: Callable[[Subject, Windows, Path, int], None] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    beside: tuple[str, ...] = ()
    compiles: bool = False


def systems(ranks: int) -> list[System]:
    """The peers, and ours."""
    hugging_face, loop, ddp, fsdp, fast = (
        "Hugging Face Trainer",
        "plain loop",
        "torch's DDP, loop",
        "torch's FSDP2, loop",
        "compiled loop",
    )
    found = [
        System(hugging_face, peers.hugging_face),  # those that say most come first
        System("ours, ddp", None, (("strategy", "ddp"),), (hugging_face, ddp)),
        System(fast, peers.compiled, compiles=True),
        System("ours, ddp, compiled", None, (("strategy", "ddp"), ("torch_compile", True)), (fast,), compiles=True),
        System(ddp, peers.ddp),
        System("ours, ddp from scratch", None, (("strategy", "ddp"), ("engine", "scratch")), (ddp,)),
        System(fsdp, peers.fsdp2),
        System("ours, fsdp", None, (("strategy", "fsdp"),), (fsdp,)),
        System("ours, fsdp from scratch", None, (("strategy", "fsdp"), ("engine", "scratch")), (fsdp,)),
    ]
    if ranks == 1:
        found[1:1] = [
            System("ours, basic", None, (("training_type", "basic"),), (loop, hugging_face)),
            System(loop, peers.plain),
        ]
    return found


class Tick(Callback):
    """Counts our trainers' steps."""

    def __init__(self, windows: Windows):
        self.windows = windows

    def on_step_end(self, trainer: Any) -> None:
        self.windows.step()


def on_rank(system: System, subject: Subject, folder: Path, ranks: int, shape: tuple[int, int, int]) -> list[float]:
    """Train; seconds of each stretch."""
    windows = Windows(*shape)
    if system.train:
        system.train(subject, windows, folder, ranks)
    else:
        trainer = subjects.trainer(subject, folder, windows.total, ranks, [Tick(windows)], **dict(system.options))
        trainer.train()
        trainer.engine.close()
    return windows.seconds


def product_rate(precision: str) -> float:
    """FLOP/s of a large square product in this precision, measured."""
    return machine.matmul_rate(torch.bfloat16 if precision == "bf16" else torch.float32, 8192, 1.0, "cuda")


def run(settings: Settings, findings: Findings) -> None:
    """Every system in turn, and again in the opposite order."""
    subject, ranks = subjects.choose(settings), settings.gpus
    chosen = [each for each in systems(ranks) if not (each.compiles and _no_compile(settings))]
    if left := [each.name for each in systems(ranks) if each not in chosen]:
        findings.leave_out(", ".join(left), _no_compile(settings))
    if settings.tiny:
        chosen = [each for each in chosen if each.name in ("torch's DDP, loop", "ours, ddp")]
        findings.leave_out("the other systems", "a tiny run")
    findings.note(
        f"{subject.described}, on {settings.counted}; fused AdamW, gradients clipped to {subjects.CLIP:g}, a "
        f"constant learning rate, {subjects.WORKERS} workers per rank and pinned batches for all. Each trial "
        "is of new processes; ours run without guards, trackers, evaluation and checkpoints. Peers get "
        "batches without a mask. A trial has "
        f"{WINDOWS} stretches after {WARMUP} steps, timed from one wait for the GPU to the next."
    )
    rounds = 1 if settings.tiny else 4 if settings.full else 2
    steps = STEPS
    with findings.trying("how many steps to time"):
        steps = _steps(settings, subject)
    trials: dict[str, list[list[float]]] = {each.name: [] for each in chosen}
    order = findings.table("round", "system", f"tokens/s in stretches of {steps} steps, in the order of the trials")
    turns = [(number, system) for number in range(rounds) for system in chosen[:: 1 if number % 2 == 0 else -1]]
    for done, (number, system) in enumerate(turns):
        if findings.is_late(f"the last {len(turns) - done} of {len(turns)} trials"):
            break
        rates = [float("nan")] * WINDOWS
        with findings.trying(f"{system.name}, round {number + 1}"):
            rates = _trial(settings, system, subject, (WARMUP, steps, WINDOWS), f"{number}-{system.name}")
            order.row(number + 1, system.name, ", ".join(f"{rate:,.0f}" for rate in rates))
        trials[system.name].append(rates)
    _summary(settings, findings, subject, trials)
    _ratios(findings.table("ours", "peer", "ratio of tokens/s, median over the rounds", "each round"), chosen, trials)


def _trial(settings: Settings, system: System, subject: Subject, shape: tuple[int, int, int], name: str) -> list[float]:
    """Tokens/s of all ranks together in each stretch."""
    folder = settings.room("speed") / "".join(letter if letter.isalnum() else "-" for letter in name)
    ranks = settings.gpus
    seconds = launch(
        on_rank, system, subject, folder, ranks, shape, num_processes=ranks, device="cuda", timeout=SECONDS
    )[0]
    tokens = shape[1] * subject.rows * subject.tokens * ranks
    return [tokens / each for each in seconds]


def _steps(settings: Settings, subject: Subject) -> int:
    """Steps of a stretch: as many as the plain DDP loop makes in WINDOW_SECONDS."""
    if settings.tiny:
        return 2
    system = next(each for each in systems(settings.gpus) if each.train is peers.ddp)
    rate = _trial(settings, system, subject, (WARMUP, 4, 1), "probe")[0]
    return max(4, min(40, round(WINDOW_SECONDS * rate / (subject.rows * subject.tokens * settings.gpus))))


def _no_compile(settings: Settings) -> str:
    """Why torch.compile is of no use here; empty where it is."""
    if settings.simulated:
        return "torch.compile makes kernels with Triton, which knows no simulated device"
    if importlib.util.find_spec("triton") is None:
        return "triton, with which torch.compile makes kernels, is not installed"
    return ""


def _summary(settings: Settings, findings: Findings, subject: Subject, trials: dict[str, list[list[float]]]) -> None:
    """Medians, with their share of the datasheet's peak and of what a product reaches here."""
    dtype = "bf16" if subject.precision == "bf16" else "fp32"
    flops, peak, product = subject.known.flops(subject.tokens), None, None
    try:
        peak = hardware.accelerator(settings.name).peak.get(dtype)
    except ConfigError as error:
        findings.leave_out("MFU by datasheet", str(error.what))
    if not settings.simulated:
        with findings.trying("a large product"):
            product = launch(product_rate, subject.precision, num_processes=1, device="cuda", timeout=SECONDS)[0]
            says = f"; the datasheet says {peak / 1e12:.0f}" if peak else ""
            findings.note(f"An 8192 x 8192 product in {dtype} reaches {product / 1e12:.0f} TFLOP/s here{says}.")
    findings.note(f"A token takes {flops / 1e6:.1f} MFLOP forward and backward (arXiv 2204.02311, appendix B).")
    table = findings.table(
        "system", "tokens/s, median (least to most)", f"MFU, of the datasheet's {dtype}", "of the product measured here"
    )
    for name, rounds in trials.items():
        rates = [rate for each in rounds for rate in each if rate == rate]
        if rates:
            median = statistics.median(rates)
            achieved = flops * median / settings.gpus
            table.row(
                name,
                f"{median:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
                f"{achieved / peak:.1%}" if peak else "unknown",
                f"{achieved / product:.1%}" if product else "unknown",
            )


def _ratios(table: Table, chosen: list[System], trials: dict[str, list[list[float]]]) -> None:
    """Ours by each peer, round by round."""
    for system in chosen:
        for peer in system.beside:
            pairs = [
                (statistics.median(ours), statistics.median(theirs))
                for ours, theirs in zip(trials[system.name], trials.get(peer, []), strict=False)
            ]
            ratios = [ours / theirs for ours, theirs in pairs if ours == ours and theirs == theirs]
            if ratios:
                table.row(
                    system.name, peer, f"{statistics.median(ratios):.2f}", ", ".join(f"{ratio:.2f}" for ratio in ratios)
                )
