"""torchrun's own command line, elastic: machines die and join in the middle, and the curve is the undisturbed one.

Agents and ranks are processes of their own, the trainer is the command line's, and nothing in it knows of the test. A
rank that is to wait for a machine that joins is stopped from outside until its agent has told it to end.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from course_lib import cli, modeling
from course_lib.config import build
from course_lib.data import DataConnector
from course_lib.launching.interrupts import NOTE
from tests.commands.conftest import CLI
from tests.several_hosts import hosts_or_skip
from tests.waiting import tree, until


@pytest.fixture(scope="module", autouse=True)
def narrow_presets():
    """The usual ones: fresh interpreters, which have them, are compared with forked ones."""


pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
TORCHRUN = Path(sys.executable).parent / "torchrun"
STEPS, SAVE_STEPS, DIES_AT, ROWS = 24, 4, 6, 12
TOLERANCE = 1e-5
"""Largest relative difference of a step's loss from that of the undisturbed run, in fp32 without dropout."""
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"}
"""What docs/reliability.md has one set beside torchrun."""
SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """What trains in this process does so as the ranks do; beside other tests, two threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with an untrained model without dropout, whose random numbers would be the rank's own."""
    config = build({"model": "tiny-bert", "max_train_samples": 60, "max_length": 32})
    text = DataConnector(config.data, 1).load()
    about = {"label_names": text.label_names, "texts": text.splits["train"]["text"], "seed": 1, "max_length": 32}
    loaded = modeling.load(config.model, config.data.task, **about)
    loaded.model.config.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    folder = tmp_path_factory.mktemp("model")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def training(model, folder, more=""):
    return f"""train --model={model} --output_dir={folder} --max_train_samples=60 --max_eval_samples=8 --max_length=32
        --batch_size=4 --max_steps={STEPS} --logging_steps=1 --save_steps={SAVE_STEPS} --eval_steps=0 --keep_best=false
        --baselines=false --progress_bar=false --device=cpu --mixed_precision=no --learning_rate=1e-3
        --resume_from_checkpoint=auto {more}""".split()


def logged(folder):
    """Step and loss of each logged line so far; the last may be half written."""
    losses = {}
    with contextlib.suppress(FileNotFoundError):
        for text in (folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                line = json.loads(text)
                if "loss" in line:
                    assert line["step"] not in losses, f"step {line['step']} stands there twice"
                    losses[line["step"]] = line["loss"]
    return losses


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    """The losses of the same global batches in one process that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert cli.main(training(model, folder, f"--training_type=basic --global_batch_size={ROWS} --save_steps=0")) == 0
    return logged(folder)


class Machines:
    """torchrun's agents, one per machine, with one rank each."""

    def __init__(self, folder, line, endpoint, places=()):
        self.folder, self.line, self.places = folder, line, places
        # Who comes later makes one more start of all; where three have to meet, one is late more easily.
        self.meeting = f"last_call_timeout={10 if places else 3},keep_alive_interval=1,keep_alive_max_attempt=6"
        self.options = "--nnodes 1:3 --nproc_per_node 1 --max-restarts 3 --rdzv_backend c10d "
        self.options += f"--rdzv_endpoint {endpoint} --rdzv_id run"
        self.started, self.ranks_seen = [], set()

    def start(self):
        """One machine more; the first is the one where they meet."""
        number = len(self.started)
        own = f"{self.options} --rdzv_conf {self.meeting}"
        if not self.places:  # each of them has the endpoint's address
            own += f",is_host={int(not number)} --local_addr 127.0.0.1"
        command = [str(TORCHRUN), *own.split(), str(CLI), *self.line]
        more = ELASTIC | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        with open(self.folder / f"machine-{number}.log", "w") as log:
            popen = self.places[number].popen if self.places else subprocess.Popen
            environment = self.places[number].environment if self.places else os.environ
            self.started.append(popen(command, env=environment | more, stdout=log, stderr=log))
        return self.started[-1]

    def rank_of(self, machine, world_size):
        """The rank that a machine runs in a world of that many; None while there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for below in psutil.Process(machine.pid).children():
                if below.environ().get("WORLD_SIZE") == str(world_size):
                    self.ranks_seen.add(below)
                    return below
        return None

    def training_with(self, machine, world_size, step):
        """Wait until so many ranks log that step; gives this machine's."""

        def there():
            return self.rank_of(machine, world_size) if max(logged(self.folder / "run"), default=0) >= step else None

        return until(there, machine, what=f"step {step} with {world_size} ranks")

    def kill(self, machine):
        """SIGKILL to the agent and its rank at once: all that the machine did."""
        for process in tree(machine):
            process.kill()
        machine.wait(80)

    def told(self):
        return "\n".join(f"{log.name}:\n{log.read_text()[-6000:]}" for log in sorted(self.folder.glob("*.log")))

    def end(self):
        for machine in self.started:
            if machine.poll() is None:
                self.kill(machine)


def was_told_to_end(rank):
    """Whether SIGTERM waits for a process that is stopped."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{rank.pid}/status").read_text().splitlines())
    return bool((int(status["ShdPnd"], 16) | int(status["SigPnd"], 16)) & SIGTERM_BIT)


def one_dies_and_one_joins(machines, count, die):
    """Train on so many machines, lose the last in the middle, gain another later, and see it through."""
    try:
        head, *others = [machines.start() for _ in range(count)]
        machines.training_with(head, count, DIES_AT)
        die(others[-1])
        died_at = max(logged(machines.folder / "run"))
        waiting = machines.training_with(head, count - 1, died_at + 2)
        waiting.suspend()
        stood_at = max(logged(machines.folder / "run"))
        joined = machines.start()
        until(lambda: was_told_to_end(waiting), head, joined, what="the agent ends its rank for who has joined")
        waiting.resume()
        machines.training_with(head, count, stood_at + 1)
        assert [machine.wait(600) for machine in (head, *others[:-1], joined)] == [0] * count
    except (AssertionError, subprocess.TimeoutExpired) as error:
        raise AssertionError(f"{error}\n{machines.told()}") from error
    finally:
        machines.end()
    assert not any(rank.is_running() for rank in machines.ranks_seen) and len(machines.ranks_seen) == 3
    logs = "\n".join(log.read_text() for log in sorted(machines.folder.glob("*.log")))
    after_death, after_joining = map(int, re.findall(r"^resumed from .*\(step (\d+)", logs, re.MULTILINE))
    assert DIES_AT - SAVE_STEPS < after_death <= died_at, "the newest checkpoint there was"
    assert after_death % SAVE_STEPS == 0
    assert after_joining >= stood_at, "who was asked to stop saved first, and lost no step"
    assert json.loads((machines.folder / "run" / "summary.json").read_text())["world_size"] == count
    assert not (machines.folder / "run" / NOTE).exists()


@pytest.mark.long
def test_torchrun_loses_a_machine_and_gains_one_and_the_curve_is_the_undisturbed_one(
    tmp_path, course, model, undisturbed, endpoint
):
    machines = Machines(tmp_path, training(model, tmp_path / "run", f"--global_batch_size={ROWS}"), endpoint)
    one_dies_and_one_joins(machines, 2, machines.kill)
    assert logged(tmp_path / "run") == pytest.approx(undisturbed, rel=TOLERANCE) and len(undisturbed) == STEPS
    # What two ranks of six rows each would do when one of them is left, if accumulation did not follow:
    half = f"--training_type=basic --batch_size={ROWS // 2} --save_steps=0 --max_steps=8"
    assert course(*training(model, tmp_path / "half", half))[0] == 0
    apart = [abs(loss - undisturbed[step]) / undisturbed[step] for step, loss in logged(tmp_path / "half").items()]
    assert len(apart) == 8 and min(apart[1:]) > 1000 * TOLERANCE, "another batch is another curve"


@pytest.fixture(scope="module")
def four():
    with hosts_or_skip(4) as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("strategy, loses_power", [("zero1", True), ("fsdp", False)])
def test_across_hosts_with_sharded_state(four, tmp_path, model, undisturbed, strategy, loses_power):
    """Three, two, three. A host without power closes no connection; the watchdog sees that its rank is gone, as hosts
    of one machine share its table of processes, and ends those who wait for it."""
    more = f"--global_batch_size={ROWS} --strategy={strategy} --engine=scratch --watchdog=20"
    machines = Machines(tmp_path, training(model, tmp_path / "run", more), f"{four[0].name}:29400", four)

    def die(machine):
        four[machines.started.index(machine)].power_off()
        machine.wait(80)

    try:
        one_dies_and_one_joins(machines, 3, die if loses_power else machines.kill)
    finally:
        four[2].mend()
    assert logged(tmp_path / "run") == pytest.approx(undisturbed, rel=TOLERANCE)
