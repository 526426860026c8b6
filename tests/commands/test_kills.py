"""Real runs, killed and gone on from: the trained model is that of a run that nothing happened to."""

import os
import shutil
import signal
import time

import pytest
import torch

from course_lib import cli
from course_lib.training.checkpoints import checkpoint, manifest, safetensors_tree
from testing import fault_injection
from testing.fault_injection import FaultCase
from tests.forked_process import Forked
from tests.waiting import until


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run of one process with all its checkpoints, and its digest."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert fault_injection.attempt(FaultCase("basic", "none", "none", 0), folder, [], save_total_limit=None) is None
    return folder, fault_injection.digest(folder)


def started(main, said):
    with open(said, "w") as file:
        return Forked(main, os.environ, output=(file.fileno(), file.fileno()))


def test_a_process_killed_while_saving_goes_on_in_a_fresh_one(tmp_path, undisturbed):
    """By the very command that it was started with, as a scheduler repeats it."""
    case, folder = FaultCase("basic", "SIGKILL", "saving", 0), tmp_path / "run"
    train = ["train", *(f"--{name}={value}" for name, value in case.options(folder).items())]
    third = checkpoint.beside(folder, 3 * fault_injection.SAVE_STEPS)
    seal = checkpoint.seal

    def first_process():
        def stays_there(folder, number):
            return time.sleep(10_000) if folder == third else seal(folder, number)

        checkpoint.seal = stays_there
        return second_process()

    def second_process():
        torch.set_num_threads(1)
        return cli.main(train)

    process = started(first_process, tmp_path / "said")
    second = folder / checkpoint.name(2 * fault_injection.SAVE_STEPS)
    until(third.exists, process, what="a checkpoint is begun")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert "beginning anew" in (tmp_path / "said").read_text()
    kept = {path.name for path in folder.iterdir()}
    assert second.name in kept and ".checkpoint-000006.writing" in kept, "it was killed in the middle"
    assert started(second_process, tmp_path / "said").wait() == 0, (tmp_path / "said").read_text()
    assert f"resumed from {second} (step 4 of 10)" in (tmp_path / "said").read_text()
    assert fault_injection.digest(folder) == undisturbed[1]
    assert not list(folder.glob(".checkpoint-*"))


@pytest.mark.long
def test_a_killed_rank():
    """benchmarks/reliability.py does all seven trainers, four faults and six phases."""
    wanted = fault_injection.undisturbed("pipeline", 1)
    result = fault_injection.broken(FaultCase("pipeline", "SIGKILL", "backward", 1), wanted)
    assert result.struck and result.ending == "RankError" and not result.hung
    assert result.lost == 0 and result.redone < fault_injection.SAVE_STEPS
    assert result.finished and result.equal


def test_a_wrong_resume_would_be_seen(undisturbed):
    """A run that goes on from a checkpoint without the first moments: the comparison can fail."""
    run_dir, wanted = undisturbed
    for later in checkpoint.in_order(run_dir)[2:]:
        shutil.rmtree(later)
    folder = checkpoint.latest(run_dir)
    assert folder.name == checkpoint.name(4)
    state = safetensors_tree.load(folder / "optimizer.safetensors")
    for kept in state["state"].values():
        kept["exp_avg"].zero_()
    safetensors_tree.save(state, folder / "optimizer.safetensors")
    manifest.seal(folder)
    assert fault_injection.attempt(FaultCase("basic", "none", "none", 0), run_dir, []) is None
    assert fault_injection.digest(run_dir) != wanted
