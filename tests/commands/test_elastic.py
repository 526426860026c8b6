"""Machines that die and join: the run goes on with the ranks that are there, on the same global batches.

The machines are torchrun's agents, side by side on this one; their ranks are forked, which spares them their imports.
"""

import dataclasses
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from course_lib.config import build
from course_lib.data.batching import GlobalBatchSampler, layout
from course_lib.errors import ConfigError, CourseError, LaunchError
from course_lib.launching import interrupts, launch_environment, openmp
from course_lib.training import run
from course_lib.training.callbacks import Callback
from testing.virtual_hosts import torchrun
from tests.waiting import until

STEPS, DIES_AT, JOINS_AT = 12, 5, 8
TOLERANCE = 1e-5
"""Largest relative difference of a step's loss from that of the undisturbed run, in fp32 without dropout."""
LENGTHS = np.random.default_rng(0).integers(4, 60, size=203)


def dealt(processes, rows=4, accumulation=1, global_batch_size=None):
    """Rows of each step, and the rows a process has in a micro-batch."""
    sampler = GlobalBatchSampler(LENGTHS, rows, processes, accumulation, 7, global_batch_size=global_batch_size)
    micro, per_step = list(sampler), processes * accumulation
    steps = [[key for batch in micro[i : i + per_step] for key in batch] for i in range(0, len(micro), per_step)]
    return [sorted(key.row for key in step if not key.is_filler) for step in steps], {len(batch) for batch in micro}


def test_any_number_of_ranks_deals_out_the_same_global_batches():
    assert dealt(2)[0] != dealt(3)[0], "left to itself, the step grows with the ranks"
    alone, _ = dealt(1, *layout(32, 1, 4), 32)
    assert len(alone) == -(-len(LENGTHS) // 32) and sorted(sum(alone, [])) == list(range(len(LENGTHS)))
    for processes in (2, 3, 4, 7, 40):  # more ranks than rows, too
        rows, accumulation = layout(32, processes, 4)
        steps, sizes = dealt(processes, rows, accumulation, 32)
        assert steps == alone and sizes == {rows} and rows <= 4
    assert layout(32, 3, 8) == (6, 2)


@pytest.mark.parametrize(
    "leaves", [{"split_batches": True}, {"loss_weighting": "micro_batch"}, {"gradient_accumulation_steps": 2}]
)
def test_what_makes_a_step_depend_on_the_ranks_is_refused(leaves):
    with pytest.raises(ConfigError, match="global_batch_size"):
        build({"global_batch_size": 32} | leaves)


def test_an_elastic_launcher_may_start_any_number():
    launched = {"RANK": "0", "WORLD_SIZE": "3", "TORCHELASTIC_MAX_RESTARTS": "0"}
    with pytest.raises(LaunchError, match="num_processes is 2, and the launcher started 3"):
        launch_environment.to_start(launch_environment.discover(launched), 2)
    elastic = launch_environment.discover(launched | {"TORCHELASTIC_MAX_RESTARTS": "3"})
    assert launch_environment.to_start(elastic, 2) == 0


def config(folder, **more):
    sizes = {"model": "tiny-bert", "max_train_samples": 60, "max_eval_samples": 8, "max_length": 32}
    steps = {"global_batch_size": 10, "batch_size": 4, "max_steps": STEPS, "save_steps": 3, "eval_steps": 0}
    off = dict.fromkeys(("keep_best", "baselines", "progress_bar"), False)
    rest = {"logging_steps": 1, "device": "cpu", "mixed_precision": "no", "learning_rate": 1e-3}
    return build(sizes | steps | off | rest | {"output_dir": str(folder)} | more)


class Calm(Callback):
    """No dropout, whose random numbers are the rank's own."""

    def on_train_begin(self, trainer):
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0


@dataclasses.dataclass
class Events(Calm):
    """Tells who works on which step, and waits at two steps: until the other machine died, and until it has to stop."""

    folder: Path

    def on_step_end(self, trainer):
        step, count = trainer.state.step, trainer.num_processes
        (self.folder / f"step-{step}-rank-{trainer.rank}-of-{count}").touch()
        if (step, count) in ((DIES_AT, 2), (JOINS_AT, 1)):
            while not (trainer.stop_request or ((self.folder / "died").exists() and count == 2)):
                time.sleep(0.05)


def rank(folder):
    """What the command line does in a rank."""
    interrupts.end_with_launcher()
    torch.set_num_threads(1)
    asked = config(folder / "run", strategy="zero2", engine="scratch", num_processes=2, resume_from_checkpoint="auto")
    asked.output_dir.mkdir(exist_ok=True)
    try:
        run.build_trainer(asked, [Events(folder)])[0].train()
    except CourseError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def machine(folder, name, count, endpoint, is_head=False):
    """A machine: torchrun's agent and its ranks, what they print in a file."""
    with open(folder / f"{name}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
    torchrun(rank, folder, nodes=(1, 2), ranks=count, endpoint=endpoint, is_head=is_head, max_restarts=1)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_machines_die_and_join_and_the_curve_is_the_undisturbed_one(tmp_path, endpoint):
    undisturbed = config(tmp_path / "undisturbed", training_type="basic", save_steps=0)
    undisturbed.output_dir.mkdir()
    run.build_trainer(undisturbed, [Calm()])[0].train()
    started = []

    def start(*arguments):
        openmp.end_threads()
        started.append(multiprocessing.get_context("fork").Process(target=machine, args=(tmp_path, *arguments)))
        started[-1].start()
        return started[-1]

    try:
        head, other = start("head", 1, endpoint, True), start("other", 1, endpoint)
        for at_work in range(2):  # either may be the first to end the step
            until((tmp_path / f"step-{DIES_AT}-rank-{at_work}-of-2").exists, head, other)
        for process in [*psutil.Process(other.pid).children(recursive=True), other]:
            process.kill()  # the ranks and the agent: all that the machine did
        (tmp_path / "died").touch()
        until((tmp_path / f"step-{JOINS_AT}-rank-0-of-1").exists, head)
        joined = start("joined", 2, endpoint)
        for process in (head, joined):
            process.join(600)
        assert (head.exitcode, joined.exitcode) == (0, 0)
    except AssertionError as error:
        raise AssertionError("\n".join(log.read_text() for log in tmp_path.glob("*.log"))) from error
    finally:
        for process in started:
            for below in psutil.Process(process.pid).children(recursive=True) if process.is_alive() else []:
                below.kill()
            process.kill()
    worked = {path.name for path in tmp_path.glob("step-*-rank-*")}
    assert {f"step-{DIES_AT}-rank-1-of-2", f"step-{STEPS}-rank-2-of-3"} <= worked, "two ranks, then three"
    assert f"step-{DIES_AT - 1}-rank-0-of-1" in worked, "the machine died: what came after the checkpoint is done anew"
    alone, three = ({int(name.split("-")[1]) for name in worked if name.endswith(f"of-{n}")} for n in (1, 3))
    assert min(three) == max(alone) + 1, "a machine joined: the others saved first, and lost no step"
    curve = losses(tmp_path / "run")
    assert curve == pytest.approx(losses(undisturbed.output_dir), rel=TOLERANCE) and len(curve) == STEPS
