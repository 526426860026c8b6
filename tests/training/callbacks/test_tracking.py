"""Tracking on real ranks: who tracks, what of the others arrives, and that nobody waits for a tracker that fails."""

import json

import pytest

from course_lib.config import build
from course_lib.tracking.base import Guarded, Tracker
from course_lib.tracking.collect import read_json_lines, read_runs
from course_lib.training import run as runs
from course_lib.training.callbacks import Callback, FunctionCallback, tracking
from course_lib.training.callbacks.predictions import predict
from tests.forked_process import wandb_imported
from tests.ranks import on_ranks
from tests.training import quick

TRACKED = {
    "max_train_samples": 44,
    "max_eval_samples": 33,
    "max_steps": 4,
    "logging_steps": 2,
    "learning_rate": 0.001,
    "tracker": "jsonl",
    "keep_best": True,
}


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "of wandb"))
    with wandb_imported():
        yield


def test_rank_0_tracks_one_run_with_every_ranks_machine_and_what_a_user_hands_to_accelerate(tmp_path, ranks):
    def users_own(trainer):
        trainer.ranks.accelerator.log({"mine": 10.0 * trainer.state.step}, step=trainer.state.step)

    ranks(2)(quick.train, tmp_path, [FunctionCallback(users_own)], **TRACKED)
    (run,) = read_runs(tmp_path)
    assert (run.rank, run.state, run.group) == (0, "finished", None)
    assert [path.name for path in (tmp_path / "tracking").glob("rank-*")] == ["rank-0.jsonl"]
    last = {name: value for _, _, name, value in run.rows}
    memory = [last[f"system/rank{rank}/memory_mib"] for rank in (0, 1)]
    assert min(memory) > 50 and memory[0] != memory[1]
    mine = [(step, value) for step, _, name, value in run.rows if name == "mine"]
    assert mine == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]


def test_every_rank_tracks_a_run_of_its_own_in_one_group(tmp_path, ranks, wandb):
    folder = tmp_path / "each"
    ranks(2, timeout=680)(quick.train, folder, **TRACKED | {"track_every_rank": True, "tracker": "jsonl,wandb"})
    found = read_runs(folder)
    assert len(found) == 4 and {run.group for run in found} == {"each"}
    ids = {}
    for tracker in ("jsonl", "wandb"):
        own = sorted((run for run in found if run.tracker == tracker), key=lambda run: run.rank)
        named = [(run.name, run.rank, run.state) for run in own]
        assert named == [("each-rank0", 0, "finished"), ("each-rank1", 1, "finished")]
        memory = [next(value for *_, name, value in run.rows if name == "system/memory_mib") for run in own]
        assert memory[0] != memory[1]
        ids[tracker] = [run.id for run in own]
    assert ids["jsonl"] == ids["wandb"] and len(set(ids["wandb"])) == 2, "of a rank's run, one for both trackers"


def predicted(folder):
    """What each rank predicts, at the end of a training in whose tables the wrong rows are; one in stages too."""
    found = []

    class Predict(Callback):
        def on_train_end(self, trainer):
            found.append(predict(trainer, "test"))

    quick.train(folder / "one", [Predict()], **TRACKED, log_predictions=100)
    quick.train(folder / "pipeline", **TRACKED, log_predictions=100, training_type="pipeline")
    return vars(found[0])


def test_predictions_of_a_pipeline_and_of_two_ranks_are_those_of_one_process(tmp_path, ranks):
    """All wrong rows of the 33, with text and loss: gathered by rank, or with a model in stages."""
    first, second = ranks(2)(predicted, tmp_path)
    assert len(first["labels"]) == 33
    for name, column in first.items():
        assert (column == second[name]).all(), name
    tables = {}
    for name in ("one", "pipeline"):
        run = read_json_lines(tmp_path / name / "tracking" / "rank-0.jsonl")
        tables[name] = run.tables["test/wrong_predictions"][1]
        (accuracy,) = [value for _, _, metric, value in run.rows if metric == "test/accuracy"]
        wrong = len(tables[name])
        assert 0 < wrong < 33 and accuracy == pytest.approx(1 - wrong / 33)
    options = {
        "output_dir": str(tmp_path / "again"),
        "training_type": "basic",
        "model": str(tmp_path / "one" / "model"),
    }
    trainer, text = runs.build_trainer(build(quick.QUICK | TRACKED | options))
    alone = predict(trainer, "test").wrong(text.splits["test"]["text"], text.label_names, 100)
    assert [row[:4] for row in alone] == [row[:4] for row in tables["one"]]
    assert [row[4] for row in alone] == pytest.approx([row[4] for row in tables["one"]], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"training_type": "pipeline", "watch": "all"}, {"gradients", "parameters"}),
        ({"strategy": "zero1", "engine": "torch", "watch": "all"}, {"gradients", "parameters"}),
        ({"strategy": "fsdp", "engine": "torch", "watch": "all"}, {"gradients", "parameters"}),
        ({"strategy": "zero3", "engine": "scratch", "watch": "parameters"}, {"parameters"}),
        ({}, set()),
    ],
    ids=["pipeline", "zero1", "fsdp", "zero3", "not"],
)
def test_tensors_are_watched_with_every_way_to_hold_them(tmp_path, ranks, options, kinds):
    ranks(2)(quick.train, tmp_path, **TRACKED | options)
    entries = map(json.loads, (tmp_path / "tracking" / "rank-0.jsonl").read_text().splitlines())
    names = {name for entry in entries if entry["kind"] == "histograms" for name in entry["values"]}
    assert {each.partition("/")[0] for each in names} == kinds
    assert any(each.endswith("h.0.mlp.c_fc.weight") for each in names) == bool(kinds)


class Fails(Tracker):
    name = "fails"

    def log(self, values, step=None, **kwargs):
        raise RuntimeError("the service is gone")


@on_ranks(2)
def test_a_tracker_that_fails_on_rank_0_leaves_no_rank_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "make_trackers", lambda names, info: [Guarded(Fails(info))])
    assert quick.train(tmp_path, **TRACKED)["train"]["steps"] == 4
    assert not read_runs(tmp_path)
