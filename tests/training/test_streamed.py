"""Streamed training text in the trainer: the same steps on any number of ranks, and after a stop at any step."""

import json
from pathlib import Path

import datasets
import pytest
import torch

from course_lib.lessons import parity
from course_lib.training.checkpoints import checkpoint
from course_lib.training.run import train
from course_lib.training.trainer import Trainer
from tests.fresh_accelerator import forget_accelerator
from tests.long_cases import some

STEPS, SAVED = 6, 4


def written(folder):
    """Four shards of 30 texts, and a validation split."""
    folder.mkdir()
    for shard in range(4):
        rows = [{"text": f"shard {shard} row {row} " + "and more words " * (row % 5)} for row in range(30)]
        path = folder / f"train-{shard:05}-of-00004.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "validation.jsonl").write_text('{"text": "a row to be checked, with words and more words in it"}\n' * 6)
    return folder


def options_of(folder, **options):
    return {
        "dataset": str(folder),
        "streaming": True,
        "stream_window": 16,
        "max_train_samples": None,
        "max_length": 32,
        "max_steps": STEPS,
        "save_steps": 2,
        "save_total_limit": None,
    } | options


def traced(folder, ranks, options):
    forget_accelerator()
    found = parity.trace(parity.task(folder, ranks, **options))
    return found, json.loads((checkpoint.in_order(folder)[-1] / "state.json").read_text())["state"]


@pytest.fixture(scope="module", params=some(["best_fit", "wrapped"], "best_fit"))
def one(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
        options = options_of(written(folder / "data"), packing=request.param)
        found = traced(folder / "run", 1, options | {"training_type": "basic"})
        kept = {path: len(datasets.Dataset.from_file(str(path))) for path in (folder / "cache").rglob("*.arrow")}
    assert kept and max(kept.values()) < 30  # of the training text, 120 rows in shards of 30, nothing is written
    return folder, options, *found


def two_ranks(folder, options, resumed):
    whole = traced(folder / "two", 2, options)
    return whole, traced(folder / "again", 2, options | {"resume_from_checkpoint": str(resumed)})


@pytest.fixture(scope="module")
def saved(one):
    return next(path for path in checkpoint.in_order(one[0] / "run") if checkpoint.step_of(path) == SAVED)


def test_two_ranks_make_the_steps_of_one_and_go_on_from_its_checkpoint(one, saved, tmp_path, ranks):
    _, options, wanted, state = one
    (whole, of_two), (rest, after) = ranks(2)(two_ranks, tmp_path, options, saved)[0]
    assert parity.compare(whole, wanted, "ddp", "streamed", 2).agrees
    for name in ("stream", "tokens", "samples"):
        assert of_two[name] == state[name], name
    assert state["samples"] == STEPS * parity.GLOBAL_ROWS == state["stream"]["row"] and state["tokens"] > 100
    assert (after["stream"], after["tokens"]) == (state["stream"], state["tokens"])
    assert rest.losses == pytest.approx(wanted.losses[SAVED:], rel=0, abs=parity.LOSS_TOLERANCE)
    torch.testing.assert_close(rest.weights, wanted.weights, rtol=0, atol=parity.WEIGHT_TOLERANCE)


def test_without_the_place_a_second_start_has_other_rows(one, saved, tmp_path, monkeypatch):
    _, options, wanted, _ = one
    go_on = Trainer.go_on

    def forgetful(self):
        go_on(self)
        self.state.stream = {}

    monkeypatch.setattr(Trainer, "go_on", forgetful)
    rest, _ = traced(tmp_path, 1, options | {"training_type": "basic", "resume_from_checkpoint": str(saved)})
    assert max(abs(a - b) for a, b in zip(rest.losses, wanted.losses[SAVED:], strict=True)) > 1e-3


def test_a_run_goes_over_its_shards_again_and_says_what_it_read(tmp_path):
    more = {"num_workers": 1, "max_steps": 20, "max_length": 128, "save_steps": 0, "eval_steps": 10}
    options = options_of(written(tmp_path / "data"), training_type="basic", **more)
    summary = train(parity.task(tmp_path / "run", 1, **options))
    assert summary["train"]["samples"] < 160 and summary["train"]["epochs"] >= 1
    assert any("streamed from 4 files, shuffled in windows of 16 rows" in note for note in summary["data"]["notes"])
    assert Path(summary["model_dir"]).is_dir() and summary["eval"]["split"] == "validation"
