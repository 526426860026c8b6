"""Streamed training text in the trainer: the same steps on any number of ranks, and after a stop at any step."""

import json
from pathlib import Path

import datasets
import pytest

from course_lib.launching.launch import launch
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
    found = {"whole": traced(folder / "two", 2, options)}
    return found | {"resumed": traced(folder / "again", 2, options | {"resume_from_checkpoint": str(resumed)})}


def test_two_ranks_make_the_steps_of_one_and_go_on_from_its_checkpoint(one, tmp_path):
    folder, options, wanted, state = one
    saved = next(path for path in checkpoint.in_order(folder / "run") if checkpoint.step_of(path) == SAVED)
    found = launch(two_ranks, tmp_path, options, saved, num_processes=2, timeout=280)[0]
    whole, of_two = found["whole"]
    assert parity.compare(whole, wanted, "ddp", "streamed", 2).agrees
    assert {name: of_two[name] for name in ("stream", "tokens", "samples")} == {
        name: state[name] for name in ("stream", "tokens", "samples")
    }
    assert state["samples"] == STEPS * parity.GLOBAL_ROWS == state["stream"]["row"] and state["tokens"] > 100
    rest, after = found["resumed"]
    assert after["stream"] == state["stream"] and after["tokens"] == state["tokens"]
    assert max(abs(a - b) for a, b in zip(rest.losses, wanted.losses[SAVED:], strict=True)) < parity.LOSS_TOLERANCE
    assert max((rest.weights[name] - wanted.weights[name]).abs().max() for name in rest.weights) < (
        parity.WEIGHT_TOLERANCE
    )


def test_without_the_place_a_second_start_has_other_rows(one, tmp_path, monkeypatch):
    folder, options, wanted, _ = one
    saved = next(path for path in checkpoint.in_order(folder / "run") if checkpoint.step_of(path) == SAVED)
    go_on = Trainer.go_on

    def forgetful(self):
        go_on(self)
        self.state.stream = {}

    monkeypatch.setattr(Trainer, "go_on", forgetful)
    rest, _ = traced(tmp_path, 1, options | {"training_type": "basic", "resume_from_checkpoint": str(saved)})
    assert max(abs(a - b) for a, b in zip(rest.losses, wanted.losses[SAVED:], strict=True)) > 1e-3


def test_a_run_goes_over_its_shards_again_and_says_what_it_read(tmp_path):
    options = options_of(
        written(tmp_path / "data"), num_workers=1, max_steps=20, max_length=128, save_steps=0, eval_steps=10
    )
    config = parity.task(tmp_path / "run", 1, training_type="basic", **options)
    summary = train(config)
    assert summary["train"]["samples"] < 160 and summary["train"]["epochs"] >= 1
    assert any("streamed from 4 files, shuffled in windows of 16 rows" in note for note in summary["data"]["notes"])
    assert Path(summary["model_dir"]).is_dir() and summary["eval"]["split"] == "validation"
