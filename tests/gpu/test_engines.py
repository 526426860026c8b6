"""Every strategy by every engine on GPUs: trains, saves and goes on as the plain loop on a CPU does."""

import torch
from accelerate.state import AcceleratorState, GradientState

from course_lib.config import ENGINES
from course_lib.runtime.launch import launch
from course_lib.training import parity

ALL = [(strategy, engine) for strategy, engines in ENGINES.items() for engine in engines]
STEPS = 5


def name_of(pair):
    return "-".join(pair)


def on_ranks(folder, ranks, runs):
    """Runs one after the other on the same ranks: each one's losses, weights and device, and the races found."""
    import gpu_sim

    torch.set_num_threads(1)
    found = []
    for name, options in runs:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        run = parity.trace(parity.task(folder / name, ranks, max_steps=STEPS, **{"device": "cuda"} | options))
        found.append({"losses": run.losses, "weights": run.weights, "races": gpu_sim.findings()})
    return found


def launched(folder, ranks, runs, timeout):
    return launch(on_ranks, folder, ranks, runs, num_processes=ranks, device="cuda", start_method="fork",
                  timeout=timeout, stream=False)
