"""Runs of the trainers on simulated GPUs; functions of the process that has them, and of its ranks."""

import torch
from accelerate.state import AcceleratorState, GradientState

from course_lib.config import build
from course_lib.config.axes import ENGINES
from course_lib.launching.launch import launch
from course_lib.lessons import parity
from course_lib.training.checkpoints import checkpoint
from course_lib.training.run import train

PAIRS = [(strategy, engine) for strategy, engines in ENGINES.items() for engine in engines]
STEPS, SAVED_AT = 5, 3
SAVING = {"save_steps": SAVED_AT, "save_total_limit": None}
WATCHDOG = 0.0
"""Seconds, of whole runs."""
QUICK = {
    "model": "tiny-bert",
    "max_train_samples": 64,
    "max_eval_samples": 16,
    "max_length": 32,
    "max_steps": 3,
    "eval_batch_size": 4,
    "progress_bar": False,
    "device": "cuda",
    "watchdog": WATCHDOG,
    "tracker": "none",
}


def name_of(pair):
    return "-".join(pair)


def of(pair, **options):
    """A run of a pair, as :func:`launched` takes it."""
    return name_of(pair), {"strategy": pair[0], "engine": pair[1], **options}


def saved(folder, pair):
    """Where such a run left its checkpoint."""
    return str(folder / name_of(pair) / checkpoint.name(SAVED_AT))


def found_on(folder, ranks, runs):
    """The parity task's runs, one after the other on the ranks that are here: losses, weights, findings."""
    import gpu_sim

    torch.set_num_threads(1)
    found = []
    for name, options in runs:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        run = parity.trace(parity.task(folder / name, ranks, **{"max_steps": STEPS, "device": "cuda"} | options))
        weights = {name: tensor.cpu() for name, tensor in run.weights.items()}
        found.append((run.losses, weights, [str(each) for each in gpu_sim.findings()]))
    return found


def launched(folder, ranks, runs):
    """What each rank found, by run."""
    return launch(
        found_on,
        folder,
        ranks,
        runs,
        num_processes=ranks,
        device="cuda",
        start_method="fork",
        timeout=1600,
        stream=False,
    )


def agree(ranks, wanted, from_step=0):
    """Whether every run on every rank gave the losses and the weights of the plain loop on a CPU, and no finding.

    To rounding: 1e-6 of a loss are eight of its last bits, and a strategy adds the same numbers in another order.
    """
    for rank, runs in enumerate(ranks):
        for losses, weights, findings in runs:
            assert findings == []
            assert len(losses) == STEPS - from_step
            assert max(abs(a / b - 1) for a, b in zip(losses, wanted.losses[from_step:], strict=True)) < 1e-6
            if rank == 0:
                assert weights.keys() == wanted.weights.keys()
                assert max((weights[name] - wanted.weights[name]).abs().max() for name in weights) < 2e-6


def whole_run(folder, options):
    """A run from data to summary, as `course train` makes it, on the ranks that are here."""
    import gpu_sim

    torch.set_num_threads(1)
    summary = train(build(QUICK | {"output_dir": str(folder)} | options))
    return summary, [str(each) for each in gpu_sim.findings()]


def whole_runs(folder, ranks, options):
    """Its summary on each rank, and the findings."""
    return launch(
        whole_run, folder, options, num_processes=ranks, device="cuda", start_method="fork", timeout=1600, stream=False
    )
