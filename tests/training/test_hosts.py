"""Training across hosts: network namespaces with addresses of their own, whose cables can be pulled."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from course_lib import cli
from course_lib.config import build
from course_lib.errors import EXIT_HUNG, CourseError
from course_lib.hangs.report import HANG_FOLDER
from course_lib.hangs.watchdog import read_reports
from course_lib.launching.interrupts import NOTE
from course_lib.training import run
from course_lib.training.callbacks import Callback
from course_lib.training.callbacks.guards import guards
from course_lib.training.checkpoints import checkpoint
from tests.long_cases import some
from tests.several_hosts import hosts_or_skip
from tests.training import quick
from tests.waiting import has_lines, until

CLI = Path(cli.__file__)
STEPS = 4
OPTIONS = quick.QUICK | {"max_train_samples": 48, "max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-3}
ROWS = 12  # of an optimizer step
PIPELINE = {"training_type": "pipeline", "pipeline_chunks": 2}
STRATEGIES = {  # hosts, ranks of each
    "zero2": (3, 1, {"strategy": "zero2", "engine": "scratch", "batch_size": ROWS // 3}),
    "pipeline": (2, 1, PIPELINE | {"batch_size": ROWS}),
    "hybrid": (2, 2, PIPELINE | {"data_parallel_size": 2, "pipeline_parallel_size": 2, "batch_size": ROWS // 2}),
}


@pytest.fixture(scope="module")
def three():
    with hosts_or_skip(3) as made:
        yield made


class Calm(Callback):
    """No dropout, whose random numbers are the rank's own; before the third step, waits for what the test does."""

    def __init__(self, folder, waits):
        self.folder, self.waits = folder, waits

    def on_train_begin(self, trainer):
        quick.without_dropout(trainer.model)

    def on_step_end(self, trainer):
        if trainer.state.step == 2 and self.waits:
            (self.folder / f"waits-{trainer.rank}").touch()
            while not (self.folder / "go-on").exists():
                time.sleep(0.05)


def train(folder, options, waits=False):
    """What the command line does in a rank, up to the end of training."""
    torch.set_num_threads(1)
    config = build(OPTIONS | {"output_dir": str(folder / "run")} | options)
    config.output_dir.mkdir(exist_ok=True)
    try:
        run.build_trainer(config, [Calm(folder, waits), *guards(config)])[0].train()
    except CourseError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def rank(number, world_size, local, head, port, folder, options, waits):
    """A rank as any launcher starts it, what it prints in a file."""
    with open(folder / f"rank-{number}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
    place = {"RANK": number, "WORLD_SIZE": world_size, "LOCAL_RANK": local, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR=head.address)
    train(folder, options, waits)


def start(used, each, port, folder, options, waits=False):
    return [
        host.start(rank, i * each + local, len(used) * each, local, used[0], port, folder, options, waits)
        for i, host in enumerate(used)
        for local in range(each)
    ]


def codes(processes):
    for process in processes:
        process.join(800)
    return [process.exitcode for process in processes]


def told(folder):
    return "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of the same global batches in one process."""
    folder = tmp_path_factory.mktemp("alone")
    train(folder, {"training_type": "basic", "batch_size": ROWS, "watchdog": 0})
    return quick.losses(folder / "run")


@pytest.mark.parametrize("name", some(STRATEGIES, "hybrid"))
def test_a_strategy_across_hosts_gives_the_losses_of_one_process(three, tmp_path, name, alone):
    count, each, options = STRATEGIES[name]
    port = 29500 + list(STRATEGIES).index(name)  # these hosts have nobody else on them
    assert codes(start(three[:count], each, port, tmp_path, options)) == [0] * count * each, told(tmp_path)
    assert quick.losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5) and len(alone) == STEPS


@pytest.mark.parametrize("for_good", [False, True], ids=["plugged-in-again", "for-good"])
def test_a_cable_is_pulled(three, tmp_path, for_good, alone):
    """A short cut is TCP's to mend; a long one ends the ranks on both sides, who accuse nobody but the network."""
    options = {"batch_size": ROWS // 2, "watchdog": 5.0 if for_good else 200.0}
    both = start(three[:2], 1, 29510 + for_good, tmp_path, options, waits=True)
    until(lambda: len(list(tmp_path.glob("waits-*"))) == 2, *both, what="both ranks wait")
    three[1].cut()
    (tmp_path / "go-on").touch()
    try:
        if for_good:
            assert codes(both) == [EXIT_HUNG, EXIT_HUNG], told(tmp_path)
            reports = read_reports(tmp_path / "run" / HANG_FOLDER)
            assert [report.rank for report in reports] == [0, 1]
            assert {(report.verdicts, "look at the network" in report.summary) for report in reports} == {((), True)}
        else:
            time.sleep(1.0)
            assert all(process.is_alive() for process in both), "they wait"
    finally:
        three[1].mend()
    if not for_good:
        assert codes(both) == [0, 0], told(tmp_path)
        assert quick.losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


@pytest.mark.long
def test_accelerate_launch_trains_across_hosts_until_one_machine_is_asked_to_stop(three, tmp_path):
    leaves = OPTIONS | {"batch_size": ROWS // 2, "max_steps": 100_000, "output_dir": tmp_path / "run"}
    pair = []
    for i, host in enumerate(three[:2]):
        launcher = (
            "accelerate.commands.launch --multi_gpu --num_machines 2 --num_processes 2 --main_process_port 29600 "
            f"--machine_rank {i} --main_process_ip {three[0].address} --mixed_precision no --dynamo_backend no"
        )
        trained = [str(CLI), "train", *(f"--{k}={v}" for k, v in leaves.items())]
        told_cpu = host.environment | {"ACCELERATE_USE_CPU": "true"}
        with open(tmp_path / f"{host.name}.log", "w") as log:
            output = {"stderr": log, "stdout": subprocess.DEVNULL}
            pair.append(host.popen([sys.executable, "-m", *launcher.split(), *trained], env=told_cpu, **output))
    until(has_lines(tmp_path / "run" / "metrics.jsonl", 3), *pair, what="three steps", told=lambda: told(tmp_path))
    pair[1].terminate()
    assert all(process.wait(600) for process in pair)
    step = json.loads((tmp_path / "run" / NOTE).read_text())["step"]
    assert checkpoint.latest(tmp_path / "run").name == checkpoint.name(step)
    assert all(f"interrupted at step {step};" in (tmp_path / f"host{i}.log").read_text() for i in range(2))
