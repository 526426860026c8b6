"""The accelerated trainer on real ranks: the same run at 1, 2 and 4, and the same run after a stop."""

import json

import pytest
import torch

from course_lib.config import build
from course_lib.launching.launch import launch
from course_lib.training.checkpoints import checkpoint
from course_lib.training.run import build_trainer

QUICK = {
    "model": "tiny-bert",
    "training_type": "accelerated",
    "max_train_samples": 44,
    "max_eval_samples": 33,
    "max_length": 32,
    "max_steps": 12,
    "logging_steps": 1,
    "progress_bar": False,
    "device": "cpu",
    "learning_rate": 1e-3,
    "save_steps": 0,
    "eval_steps": 0,
    "mixed_precision": "no",
}


def train(options, dropout=0.1, unsynchronised=False):
    """Run a trainer on this rank; gives its losses, a digest of its weights, and its evaluation."""
    config = build(QUICK | options)
    config.output_dir.mkdir(exist_ok=True, parents=True)
    trainer = build_trainer(config)[0]
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    if unsynchronised:
        trainer.engine.accumulating = lambda last: trainer.ranks.accelerator.no_sync(trainer.wrapped)
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).double()
    return trainer.state.step, [weights.sum().item(), weights.abs().sum().item()], trainer.evaluate("validation")


def losses_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if '"loss"' in line]


def test_the_same_losses_at_one_two_and_four_ranks(tmp_path):
    """Equal global batches, 44 rows in batches of 8: the last of each epoch is uneven. Without dropout."""
    runs = {}
    for ranks, rows, steps in ((1, 8, 1), (2, 4, 1), (4, 1, 2)):
        folder = tmp_path / str(ranks)
        options = {"batch_size": rows, "gradient_accumulation_steps": steps, "output_dir": str(folder)}
        results = launch(train, options, dropout=0.0, num_processes=ranks, timeout=800)
        assert all(result[1] == results[0][1] for result in results), "ranks ended with different weights"
        runs[ranks] = losses_of(folder), results[0][2]
    for ranks in (2, 4):
        assert runs[ranks][0] == pytest.approx(runs[1][0], abs=2e-4)
        assert runs[ranks][0][:4] == pytest.approx(runs[1][0][:4], abs=1e-5)
        assert runs[ranks][1]["rows"] == 33


def test_without_synchronisation_the_ranks_drift_apart(tmp_path):
    options = {"batch_size": 4, "max_steps": 3, "output_dir": str(tmp_path), "keep_best": False}
    apart = launch(train, options, unsynchronised=True, num_processes=2, timeout=400)
    assert apart[0][1] != apart[1][1]


@pytest.mark.long
def test_two_ranks_resume_to_the_bit(tmp_path):
    options = {"batch_size": 4, "save_steps": 5, "save_total_limit": None}
    through = launch(train, options | {"output_dir": str(tmp_path / "a")}, num_processes=2, timeout=400)
    folder = str(tmp_path / "a" / checkpoint.name(5))
    again = launch(
        train,
        options | {"output_dir": str(tmp_path / "b"), "resume_from_checkpoint": folder},
        num_processes=2,
        timeout=400,
    )
    assert losses_of(tmp_path / "b") == losses_of(tmp_path / "a")[5:]
    assert [result[1] for result in again] == [result[1] for result in through]


@pytest.mark.long
def test_saved_by_two_ranks_resumed_by_one(tmp_path):
    """The global batch stays: two ranks of 4 rows, then one of 8. Without dropout the losses go on alike."""
    launch(
        train,
        {"batch_size": 4, "save_steps": 5, "output_dir": str(tmp_path / "a"), "save_total_limit": None},
        dropout=0.0,
        num_processes=2,
        timeout=400,
    )
    folder = str(tmp_path / "a" / checkpoint.name(5))
    launch(
        train,
        {"batch_size": 8, "output_dir": str(tmp_path / "b"), "resume_from_checkpoint": folder},
        dropout=0.0,
        num_processes=1,
        timeout=400,
    )
    assert losses_of(tmp_path / "b") == pytest.approx(losses_of(tmp_path / "a")[5:], abs=2e-4)
