"""Tracking on real ranks: who tracks, what of the others arrives, and that nobody waits for a tracker that fails."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from course_lib.config import build
from course_lib.launching.launch import launch
from course_lib.tracking.base import Guarded, Tracker
from course_lib.tracking.collect import read_json_lines, read_runs
from course_lib.training import run as runs
from course_lib.training.callbacks import Callback, tracking
from course_lib.training.callbacks.predictions import predict
from course_lib.training.engines.base import StepEngine
from tests.forked_process import wandb_imported
from tests.training.callbacks import quick

QUICK = quick.QUICK | {
    "max_train_samples": 44,
    "max_eval_samples": 33,
    "max_steps": 4,
    "logging_steps": 2,
    "learning_rate": 0.001,
    "tracker": "jsonl",
    "keep_best": True,
}


class Fails(Tracker):
    name = "fails"

    def log(self, values, step=None, **kwargs):
        raise RuntimeError("the service is gone")


class UsersOwn(Callback):
    """What a user hands to Accelerate has to reach our trackers."""

    def on_step_end(self, trainer):
        trainer.ranks.accelerator.log({"mine": 10.0 * trainer.state.step}, step=trainer.state.step)


def train_all(folder: str) -> dict:
    """Several runs, one after another, on two ranks; gives what each rank found out."""
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        os.environ[name] = f"{folder}/of wandb"
    os.environ["WANDB_MODE"] = "offline"
    found = {}

    def train(name, callbacks=(), **options):
        # The end of a run takes the process group with it, which the next one here needs.
        with mock.patch.object(StepEngine, "close", lambda engine: engine.ranks.barrier()):
            return runs.train(build(QUICK | {"output_dir": f"{folder}/{name}"} | options), callbacks)

    train("one", [UsersOwn()], training_type="accelerated", log_predictions=100)
    train("each", training_type="accelerated", track_every_rank=True, tracker="jsonl,wandb")
    for name, options in {
        "pipeline": {"training_type": "pipeline", "log_predictions": 100, "watch": "all"},
        "zero1-torch": {"strategy": "zero1", "engine": "torch", "watch": "all"},
        "fsdp-torch": {"strategy": "fsdp", "engine": "torch", "watch": "all"},
        "zero3-scratch": {"strategy": "zero3", "engine": "scratch", "watch": "parameters"},
    }.items():
        train(name, **options)

    class Predict(Callback):
        def on_train_end(self, trainer):
            found["predictions"] = predict(trainer, "test")

    with mock.patch.object(tracking, "make_trackers", lambda names, info: [Guarded(Fails(info))]):
        config = build(QUICK | {"output_dir": f"{folder}/fails"})
        found["failed"] = runs.train(config, [Predict()])["train"]["steps"]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    with wandb_imported():
        yield folder, launch(train_all, str(folder), num_processes=2, timeout=680)


def histograms_in(path: Path) -> set[str]:
    entries = map(json.loads, path.read_text().splitlines())
    return {name for entry in entries if entry["kind"] == "histograms" for name in entry["values"]}


def test_rank_0_tracks_one_run_with_every_ranks_machine(trained):
    (run,) = read_runs(trained[0] / "one")
    assert (run.rank, run.state, run.group) == (0, "finished", None)
    assert [path.name for path in (trained[0] / "one" / "tracking").iterdir()].count("rank-0.jsonl") == 1
    last = {name: value for _, _, name, value in run.rows}
    memory = [last[f"system/rank{rank}/memory_mib"] for rank in (0, 1)]
    assert min(memory) > 50 and memory[0] != memory[1]
    mine = [(step, value) for step, _, name, value in run.rows if name == "mine"]
    assert mine == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]


def test_every_rank_tracks_a_run_of_its_own_in_one_group(trained):
    found = read_runs(trained[0] / "each")
    assert len(found) == 4 and {run.group for run in found} == {"each"}
    for tracker in ("jsonl", "wandb"):
        own = sorted((run for run in found if run.tracker == tracker), key=lambda run: run.rank)
        assert [(run.name, run.rank, run.state) for run in own] == [
            ("each-rank0", 0, "finished"),
            ("each-rank1", 1, "finished"),
        ]
        assert len({run.id for run in own}) == 2
        memory = [next(value for *_, name, value in run.rows if name == "system/memory_mib") for run in own]
        assert memory[0] != memory[1]
    assert len({run.id for run in found}) == 2, "both trackers of a rank know the run by the same id"


def test_predictions_of_a_pipeline_and_of_two_ranks_are_those_of_one_process(trained):
    """All wrong rows of the 33, with text and loss: gathered by rank, or with a model in stages."""
    folder, found = trained
    tables = {}
    for name in ("one", "pipeline"):
        run = read_json_lines(folder / name / "tracking" / "rank-0.jsonl")
        tables[name] = run.tables["test/wrong_predictions"][1]
        scores = {metric: value for _, _, metric, value in run.rows if metric.startswith("test/")}
        wrong = len(tables[name])
        assert 0 < wrong < 33 and scores["test/accuracy"] == pytest.approx(1 - wrong / 33)
    predictions = found[0]["predictions"]
    assert len(predictions.labels) == 33
    assert all(
        (a == b).all() for a, b in zip(vars(predictions).values(), vars(found[1]["predictions"]).values(), strict=True)
    )
    config = build(
        QUICK | {"output_dir": str(folder / "again"), "training_type": "basic", "model": str(folder / "one" / "model")}
    )
    trainer, text = runs.build_trainer(config)
    alone = predict(trainer, "test").wrong(text.splits["test"]["text"], text.label_names, 100)
    assert [row[:4] for row in alone] == [row[:4] for row in tables["one"]]
    assert [row[4] for row in alone] == pytest.approx([row[4] for row in tables["one"]], abs=1e-3)


def test_tensors_are_watched_with_every_way_to_hold_them(trained):
    looked_at = 0
    for name, kinds in {
        "pipeline": {"gradients", "parameters"},
        "zero1-torch": {"gradients", "parameters"},
        "fsdp-torch": {"gradients", "parameters"},
        "zero3-scratch": {"parameters"},
    }.items():
        names = histograms_in(trained[0] / name / "tracking" / "rank-0.jsonl")
        assert {each.partition("/")[0] for each in names} == kinds, name
        assert any(each.endswith("h.0.mlp.c_fc.weight") for each in names), name
        looked_at += 1
    assert looked_at == 4
    assert not histograms_in(trained[0] / "one" / "tracking" / "rank-0.jsonl")


def test_a_tracker_that_fails_on_rank_0_leaves_no_rank_waiting(trained):
    assert [each["failed"] for each in trained[1]] == [4, 4]
    assert not read_runs(trained[0] / "fails")
