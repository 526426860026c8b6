"""Runs of the parity task on ranks, one layout after the other, and what they are held against: one process."""

import json
import os

from torch.testing import assert_close

from course_lib.launching.launch import launch
from course_lib.lessons import parity
from course_lib.training.checkpoints import checkpoint
from tests.fresh_accelerator import forget_accelerator


def place(folder, name):
    """The folder of a run."""
    return folder / name.replace(" ", "-").replace(",", "")


def saved(folder, name, step):
    """Its checkpoint of a step, as an option."""
    return str(place(folder, name) / checkpoint.name(step))


def alone(folder, **options):
    """The plain loop in this process; ranks that are forked later know nothing of it."""
    forget_accelerator()
    found = parity.trace(parity.task(folder, 1, training_type="basic", **options))
    forget_accelerator()
    return found


def runs(folder, cases, **common):
    """Several runs on the ranks that are here; what each left, by name."""
    found = {}
    for name, options in cases.items():
        forget_accelerator()
        options = common | options
        copies = int(os.environ["WORLD_SIZE"]) // parity.sharing(options)  # of the model, each with rows of its own
        found[name] = parity.trace(parity.task(place(folder, name), copies, **options))
    return found


def on(number, folder, cases, *, runs=runs, **common):
    """The same on so many ranks; what is replaced here is replaced there."""
    return launch(runs, folder, cases, num_processes=number, timeout=2200, device="cpu", stream=False, **common)[0]


def evaluations(folder, name):
    """The losses of a run's evaluations."""
    lines = map(json.loads, (place(folder, name) / "metrics.jsonl").read_text().splitlines())
    return [line["eval.loss"] for line in lines if "eval.loss" in line]


def apart(found, wanted):
    """The largest differences of two runs."""
    return parity.compare(found, wanted, "", "", 0)


def agree(found, wanted, relative_norm=float("inf")):
    """That two runs have the losses and weights of each other, and gradient norms too."""
    cell = apart(found, wanted)
    assert cell.agrees and cell.norm <= relative_norm * max(wanted.norms), cell


def goes_on(found, wanted, step):
    """That a run took the steps after this one as the other did."""
    assert_close(found.losses, wanted.losses[step:], rtol=0, atol=parity.LOSS_TOLERANCE)
    assert_close(found.weights, wanted.weights, rtol=0, atol=parity.WEIGHT_TOLERANCE)
