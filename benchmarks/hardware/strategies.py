"""Every strategy and engine on all GPUs that are there: trained, saved, and resumed in a new process.

Each run is ``course train``'s own, with its guards, in fp32 without TF32 unless it says otherwise; what it leaves is
compared with the CPU in the section on parity.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.hardware.findings import Findings, Settings
from benchmarks.harness import STEPS_ALONE
from course_lib.config import build
from course_lib.config.axes import ENGINES
from course_lib.launching.launch import launch
from course_lib.training.run import train

STEPS, SAVED = 8, 4
"""Optimizer steps of a run, and the one after which it is saved and resumed from."""
ROWS = 16
"""Of a global batch, however many ranks share it."""
LOSS, WEIGHT = 5e-5, 5e-5
"""How far losses (nats) and final weights may lie apart in fp32: of two devices, or of a run and its resumption. The
sums of a GPU have another order, and some of them a new one each time; CPU ranks are held to 2e-6."""
LOW_LOSS, LOW_WEIGHT = 5e-2, 5e-3
"""The same where the matmuls are in 16 bits, whose products differ by one part in 256."""
SECONDS = 180
"""For one run."""
WATCHDOG = 60.0
"""Seconds without progress after which a run ends itself; 0 leaves the watchdog off."""

# A Llama has no dropout, whose masks each device would draw differently. Adam's epsilon is large, so that a gradient
# that is all rounding does not become a whole step.
RUN: dict[str, Any] = STEPS_ALONE | {
    "model": "tiny-llama",
    "task": "causal_lm",
    "dataset": "tweets",
    "max_length": 64,
    "max_train_samples": 600,
    "max_eval_samples": 32,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-3,
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
    "max_steps": STEPS,
    "save_steps": SAVED,
    "logging_steps": 1,
    "save_total_limit": None,
    "baselines": False,
    "desync_steps": 2,
}


@dataclass(frozen=True)
class Case:
    """A run."""

    strategy: str
    engine: str
    ranks: int
    precision: str = "no"
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    """Further words for the table."""

    @property
    def label(self) -> str:
        """For tables and failures."""
        words = [
            self.strategy,
            self.engine,
            *filter(None, [self.name]),
            {"no": "fp32"}.get(self.precision, self.precision),
            f"{self.ranks} rank{'s' * (self.ranks > 1)}",
        ]
        return ", ".join(words)

    def config(self, folder: Path) -> dict[str, Any]:
        """Its options."""
        rows = {"global_batch_size": ROWS, "batch_size": max(1, ROWS // 2 // self.ranks)}
        if self.options.get("training_type") == "pipeline":
            rows = {"batch_size": ROWS // self.options.get("data_parallel_size", 1)}
        own = {"strategy": self.strategy, "engine": self.engine, "mixed_precision": self.precision}
        where = {"device": "cuda", "output_dir": str(folder), "watchdog": WATCHDOG}
        return RUN | rows | own | where | self.options


def cases(settings: Settings) -> list[Case]:
    """What is run: in fp32 all pairs, in 16 bits some; with ``--full`` all of both, on one GPU too, and offloaded."""
    gpus, full = settings.gpus, settings.full
    if settings.tiny:
        return [Case("ddp", "torch", gpus), Case("ddp", "scratch", gpus)]
    pairs = [(strategy, engine) for strategy, engines in ENGINES.items() for engine in engines]
    few = [("ddp", "torch"), ("zero2", "deepspeed"), ("zero3", "scratch"), ("fsdp", "torch")]
    chosen = pairs if full else few
    found = [Case(*pair, gpus) for pair in pairs]
    found += [Case(*pair, gpus, "bf16") for pair in chosen if settings.bf16]
    found += [
        Case(*pair, gpus, "fp16") for pair in chosen if pair == ("ddp", "torch") or (pair[1] == "deepspeed" and full)
    ]
    found += _pipelines(gpus)
    if full:
        offloaded = [(strategy, "deepspeed", "optimizer") for strategy in ("zero1", "zero2", "zero3")]
        offloaded += [(*pair, "parameters") for pair in pairs if pair in OFFLOADING]
        found += [Case(*pair, gpus, options={"offload": what}, name=f"{what} offloaded") for *pair, what in offloaded]
        found += [Case(*pair, 1) for pair in pairs if gpus > 1]
    return found


OFFLOADING = (("zero3", "deepspeed"), ("fsdp", "torch"), ("fsdp", "accelerate"))
"""Those that offload parameters."""


def _pipelines(gpus: int) -> list[Case]:
    """Pipelines of two ranks, or of four, side by side on all GPUs that they divide."""
    size = 4 if gpus % 4 == 0 else 2
    if gpus % size or ROWS % (gpus // size) or ROWS * size // gpus < 2 * size:
        return []
    zero_bubble = "zb_h1" if size == 4 else "zbv"  # which takes two of the model's four blocks per rank
    grid = {"training_type": "pipeline", "pipeline_parallel_size": size, "data_parallel_size": gpus // size}
    found = [("ddp", "scratch", "1f1b"), ("zero1", "scratch", zero_bubble), ("ddp", "torch", "gpipe")]
    found += [("fsdp", "torch", "1f1b")] if gpus > size else []
    return [
        Case(strategy, engine, gpus, options=grid | {"schedule": schedule}, name=f"pipeline {schedule}")
        for strategy, engine, schedule in found
    ]


def on_rank(options: dict[str, Any]) -> dict[str, Any]:
    """Train; what the summary says of where."""
    torch.set_float32_matmul_precision("highest")
    summary = train(build(options))
    return {name: summary[name] for name in ("device", "world_size", "mixed_precision")}


def run(settings: Settings, findings: Findings) -> None:
    """Train, save and resume each; leave the traces for the section on parity."""
    room = settings.room("strategies")
    findings.note(
        f"{STEPS} steps of tiny-llama, {ROWS} rows per step, `course train`'s own code; saved after step "
        f"{SAVED} and resumed from there by new processes. The differences are of the resumed run's losses "
        f"(nats) and final weights from the first run's; at most {LOSS:g} and {WEIGHT:g} in fp32, "
        f"{LOW_LOSS:g} and {LOW_WEIGHT:g} in 16 bits."
    )
    table = findings.table(
        "strategy",
        "engine",
        "",
        "precision",
        "ranks",
        "trained and saved",
        "resumed",
        "largest difference: loss / weight",
        "seconds",
    )
    done, chosen = [], cases(settings)
    for number, case in enumerate(chosen):
        if findings.is_late(f"the last {len(chosen) - number} of {len(chosen)} runs"):
            break
        first, second = room / f"{number}", room / f"{number}-resumed"
        with findings.trying(case.label) as trained:
            _train(case, case.config(first))
        difference, resumed_word, seconds = "", "not run", trained.seconds
        if trained.succeeded:
            done.append(asdict(case) | {"folder": str(first)})
            (room / "cases.json").write_text(json.dumps(done), encoding="utf-8")
            with findings.trying(f"{case.label}, resumed") as resumed:
                checkpoint = first / f"checkpoint-{SAVED:06d}"
                _train(case, case.config(second) | {"resume_from_checkpoint": str(checkpoint)})
                apart = trace(second, SAVED).apart(trace(first, SAVED))
                difference = shown(apart)
                check(apart, case.precision)
            resumed_word, seconds = resumed.word, seconds + resumed.seconds
        table.row(
            case.strategy,
            case.engine,
            case.name,
            case.precision.replace("no", "fp32"),
            case.ranks,
            trained.word,
            resumed_word,
            difference,
            f"{seconds:.0f}",
        )
    if settings.tiny:
        findings.leave_out("all but two pairs", "a tiny run")
    elif not settings.full:
        findings.leave_out("offload, and 16 bits for most pairs", "`--full` runs them")
    if settings.gpus < 2:
        findings.leave_out("pipelines", "they need two GPUs")


def _train(case: Case, options: dict[str, Any]) -> None:
    """Run it on ranks of its own.

    Raises:
        AssertionError: it was not on all the GPUs.
    """
    found = launch(on_rank, options, num_processes=case.ranks, device="cuda", timeout=SECONDS)
    wanted = {"device": "cuda", "world_size": case.ranks, "mixed_precision": case.precision}
    assert found == [wanted] * case.ranks, f"asked for {wanted}, and the ranks say {found}"


@dataclass(frozen=True)
class Trace:
    """What a run left: losses by step (nats per token), and the final weights."""

    losses: dict[int, float]
    weights: dict[str, torch.Tensor]

    def apart(self, other: "Trace") -> tuple[float, float]:
        """The largest differences of a loss and of a weight.

        Raises:
            AssertionError: they have other steps or other weights.
        """
        assert self.losses and self.losses.keys() == other.losses.keys(), (
            f"steps {sorted(self.losses)} and {sorted(other.losses)}"
        )
        assert self.weights.keys() == other.weights.keys(), f"weights {self.weights.keys() ^ other.weights.keys()}"
        loss = max(abs(value - other.losses[step]) for step, value in self.losses.items())
        weight = max(
            (value.float() - other.weights[name].float()).abs().max().item() for name, value in self.weights.items()
        )
        return loss, weight


def trace(folder: Path, after: int = 0) -> Trace:
    """Read a run's folder; losses of the steps after this one."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line and line["step"] > after}
    return Trace(losses, load_file(folder / "model" / "model.safetensors"))


def shown(apart: tuple[float, float]) -> str:
    """For a table."""
    return f"{apart[0]:.1e} / {apart[1]:.1e}"


def check(apart: tuple[float, float], precision: str) -> None:
    """Raise AssertionError where the differences are larger than the tolerance, or no numbers."""
    loss, weight = (LOSS, WEIGHT) if precision == "no" else (LOW_LOSS, LOW_WEIGHT)
    if not (apart[0] <= loss and apart[1] <= weight):
        raise AssertionError(f"losses and weights differ by {shown(apart)}, more than {loss:g} / {weight:g}")


def read_cases(folder: Path) -> list[tuple[Case, Path]]:
    """The runs that were trained, and where."""
    path = folder / "cases.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [
        (Case(**{name: value for name, value in row.items() if name != "folder"}), Path(row["folder"])) for row in rows
    ]


def oracle(folder: Path) -> dict[str, Any]:
    """Options of the same run by the plain loop on the CPU, in fp32."""
    return Case("ddp", "torch", 1, options={"device": "cpu", "training_type": "basic"}).config(folder)
