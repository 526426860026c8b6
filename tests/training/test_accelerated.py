"""The accelerated trainer on real ranks: the same run at 1, 2 and 4."""

import pytest
import torch

from course_lib.config import build
from tests.training import quick

OPTIONS = quick.QUICK | {
    "model": "tiny-bert",
    "training_type": "accelerated",
    "max_train_samples": 44,
    "max_eval_samples": 33,
    "max_steps": 12,
    "logging_steps": 1,
    "learning_rate": 1e-3,
}


def train(folder, unsynchronised=False, **options):
    """Train on this rank without dropout; gives the losses, the weights, and how many rows an evaluation has."""
    trainer = quick.trainer_of(build(OPTIONS | {"output_dir": str(folder)} | options))
    quick.without_dropout(trainer.model)
    if unsynchronised:
        trainer.engine.accumulating = lambda last: trainer.ranks.accelerator.no_sync(trainer.wrapped)
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return quick.losses(folder), weights, trainer.evaluate("validation")["rows"]


def test_the_same_losses_at_one_two_and_four_ranks(tmp_path, ranks):
    """Equal global batches, 44 rows in batches of 8: the last of each epoch is uneven."""
    wanted, _, _ = ranks(1, timeout=800)(train, tmp_path / "1", batch_size=8)[0]
    for number, rows, steps in ((2, 4, 1), (4, 1, 2)):
        layout = {"batch_size": rows, "gradient_accumulation_steps": steps}
        for losses, weights, evaluated in (
            found := ranks(number, timeout=800)(train, tmp_path / str(number), **layout)
        ):
            assert losses == pytest.approx(wanted, abs=2e-4) and losses[:4] == pytest.approx(wanted[:4], abs=1e-5)
            torch.testing.assert_close(weights, found[0][1], rtol=0, atol=0)
            assert evaluated == 33


def test_without_synchronisation_the_ranks_drift_apart(tmp_path, ranks):
    (_, first, _), (_, second, _) = ranks(2)(train, tmp_path, unsynchronised=True, max_steps=3)
    assert not torch.equal(first, second)
