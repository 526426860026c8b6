"""``course bench --model``: a benchmark as a list of runs, and with ``--run`` those of it that this machine can do."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.errors import ConfigError

if TYPE_CHECKING:  # what --help need not load
    from course_lib.planning.plan import Plan

PRESETS = {
    "bert": "tiny-bert",
    "roberta": "tiny-bert",
    "distilbert": "tiny-bert",
    "gpt2": "tiny-gpt2",
    "opt": "tiny-gpt2",
    "bloom": "tiny-gpt2",
    "gpt_neox": "tiny-gpt2",
}
"""The tiny model that stands for a family here; tiny-llama for the others."""
LENGTH = 64
"""Tokens of a sequence of a run here."""
STEPS = 12


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to ``course bench``."""
    parser.add_argument("--list_models", action="store_true", help="list the bundled models")
    parser.add_argument(
        "--model",
        metavar="NAME",
        default=argparse.SUPPRESS,  # it is an option of the runs' too
        help="write a benchmark plan for this model",
    )
    parser.add_argument(
        "--hardware",
        nargs="+",
        default=["cuda"],
        metavar="NAME",
        help="cuda, rocm, cpu, or names of accelerators or SageMaker instances [cuda]",
    )
    parser.add_argument("--distributed", action="store_true", help="plan for 1, 2, 4 ... GPUs, not for one alone")
    parser.add_argument("--max_gpus", type=int, default=8, metavar="N", help="the most GPUs [8]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the plan there [print it]")
    parser.add_argument(
        "--run",
        action="store_true",
        dest="run_here",
        help="run what this machine can, with a tiny model of the same kind, a few steps each, and "
        "write the results with the measured shares of peak into --output",
    )


def run(args: argparse.Namespace) -> int:
    """List models, or generate a plan, and run it if that is asked for."""
    from course_lib.planning import benchmark, models

    if args.list_models:
        for name in models.names():
            print(f"{name}  {models.load(name).parameters / 1e6:,.0f}M")
        return 0
    if "model" not in args:
        raise ConfigError("nothing to benchmark", "give --model NAME, --list-models, or `course bench scaling`")
    if args.run_here and not args.output:
        raise ConfigError("--run writes results", "name their file with --output")
    document = benchmark.generate(args.model, args.hardware, distributed=args.distributed, max_gpus=args.max_gpus)
    if args.run_here:
        results, shares = measure(document, args.output.parent / f"{args.output.stem}-runs")
        benchmark.write_results(args.output, document, results, shares)
    elif args.output:
        from course_lib.writing import write_text

        write_text(args.output, json.dumps(document, indent=2) + "\n")
    else:
        print(json.dumps(document, indent=2))
    if args.output:
        print(f"wrote {len(document['runs'])} runs to {args.output}")
    return 0


def measure(document: dict[str, Any], folder: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """Run what this machine can, one after another; the results, and the measured shares of the CPU's peak.

    Args:
        document: of :func:`course_lib.planning.benchmark.generate`.
        folder: for the runs.

    Raises:
        ConfigError: none of the plan's layouts runs here.
        TrainingFailed: a run ended badly.
    """
    from dataclasses import asdict, replace

    from course_lib.planning import benchmark, hardware, models
    from course_lib.system import machine

    here = machine.describe(hub_timeout=0.1)
    if here.gpus:
        raise ConfigError("runs are scaled down to CPUs, and this machine has GPUs", "set CUDA_VISIBLE_DEVICES to ''")
    plans = benchmark.runnable(document, here.cores)
    if not plans:
        raise ConfigError(
            f"no layout of the plan runs on {here.cores} ranks",
            "leave --hardware out, or take a model that fits on one GPU",
        )
    preset = PRESETS.get(models.load(document["model"]).family, "tiny-llama")
    results, measured = [], []
    for planned in plans:
        plan = replace(planned, sequence_length=LENGTH)
        run, rate = _measure_one(plan, preset, folder)
        result = {"model": preset, "strategy": plan.strategy, "ranks": plan.gpus, "cpu": here.cpu}
        results.append(result | {"tokens_per_second": rate, "plan": asdict(plan)})
        measured.append((models.load(run / "model"), plan, hardware.cluster("CPU", plan.gpus), rate))
        print(f"{plan.strategy} on {plan.gpus}: {rate:,.0f} tokens/s")
    return results, benchmark.calibration(measured)


def _measure_one(plan: "Plan", preset: str, folder: Path) -> tuple[Path, float]:
    """Train a tiny model under a plan: the run's folder, and its tokens per second."""
    from course_lib.lessons.scaling import QUIET, after_warm_up
    from course_lib.tracking.sweeps import train_apart

    name = f"zero{plan.stage}" if plan.engine == "deepspeed" else plan.engine
    fields = QUIET | {
        "model": preset,
        "task": "masked_lm" if preset == "tiny-bert" else "causal_lm",
        "dataset": "pydocs",
        "max_length": LENGTH,
        "strategy": name,
        "batch_size": plan.micro_batch,
        "num_processes": plan.gpus,
        "max_steps": STEPS,
        "logging_steps": STEPS // 3,
        "mixed_precision": "no",
    }
    run = folder / f"{name}-{plan.gpus}"
    train_apart([text for key, value in fields.items() for text in (f"--{key}", str(value))], run)
    seconds, samples, _ = after_warm_up(run / "metrics.jsonl")
    return run, samples * LENGTH / seconds
