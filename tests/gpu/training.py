"""Runs of the trainers on simulated GPUs; functions of the process that has them, and of its ranks."""

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.testing import assert_close

from course_lib.config import build
from course_lib.config.axes import ENGINES
from course_lib.lessons import parity
from course_lib.training.checkpoints import checkpoint
from course_lib.training.run import train

PAIRS = [(strategy, engine) for strategy, engines in ENGINES.items() for engine in engines]
STEPS, SAVED_AT = 5, 3
SAVING = {"save_steps": SAVED_AT, "save_total_limit": None}
ORDERS = {
    "late": {"GPU_SIM_EARLY": "0"},
    "early-1": {"GPU_SIM_EARLY": "0.3", "GPU_SIM_SEED": "1"},
    "early-2": {"GPU_SIM_EARLY": "0.05", "GPU_SIM_SEED": "2"},
}
"""When results arrive that nobody has waited for yet: never, or at odds drawn from a seed."""
SMALL = {
    "model": "tiny-bert",
    "max_eval_samples": 16,
    "max_length": 32,
    "eval_batch_size": 4,
    "progress_bar": False,
    "device": "cuda",
    "watchdog": 0.0,
    "tracker": "none",
    "output_dir": "out",
}
"""Of whole runs."""
STEPS_ALONE = SMALL | {"batch_size": 4, "eval_steps": 0, "save_steps": 0, "keep_best": False, "baselines": False}


def name_of(pair):
    return "-".join(pair)


def of(pair, **options):
    """A run of a pair, as :func:`trained` takes it."""
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


def trained(machine, folder, ranks, runs, **options):
    """What each rank found, by run."""
    return machine.ranks(ranks, found_on, folder, ranks, runs, **options)


def agree(ranks, wanted, from_step=0):
    """Every run on every rank gave the losses and the weights of the plain loop on a CPU, and no finding.

    To rounding: 1e-6 of a loss are eight of its last bits, and a strategy adds the same numbers in another order.
    """
    for rank, runs in enumerate(ranks):
        for losses, weights, findings in runs:
            assert findings == []
            assert_close(losses, wanted.losses[from_step:], rtol=1e-6, atol=0)
            if rank == 0:
                assert_close(weights, wanted.weights, rtol=0, atol=2e-6)


def whole_run(folder, options):
    """A run from data to summary, as `course train` makes it, on the ranks that are here."""
    import gpu_sim

    torch.set_num_threads(1)
    sizes = {"max_train_samples": 64, "max_steps": 3, "output_dir": str(folder)}
    return train(build(SMALL | sizes | options)), [str(each) for each in gpu_sim.findings()]
