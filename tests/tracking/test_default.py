"""With nothing set up a run is kept by trackio, in its own folder."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from course_lib.config import build
from course_lib.tracking.base import Guarded, RunInfo, Tracker
from course_lib.tracking.collect import read_runs
from course_lib.tracking.trackio_tracker import TrackioTracker, trackio_in
from course_lib.training.callbacks.histograms import BINS, histograms


@pytest.fixture
def runs_folder(tmp_path, monkeypatch):
    """Two runs, each in a folder of its own, and the tracker of the second."""
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    for number, name in enumerate(("first", "second")):
        tracker = TrackioTracker(RunInfo(f"id{number}", name, "project", "pair", tmp_path / "runs" / name / "tracking"))
        tracker.start()
        tracker.store_init_configuration({"learning_rate": 10.0**-number})
        tracker.log({"train/loss": 1.0 + number}, 10)
        tracker.table("test/wrong_predictions", ("row", "text"), [[4, "a text"], [5, "<b>another</b>"]], 10)
        tracker.confusion("test/confusion_matrix", ("yes", "no"), [[3, 1], [2, 4]], 10)
        tracker.finish()
    return tmp_path / "runs", tracker


def test_the_default_is_trackio_and_a_variable_sets_another():
    program = "from course_lib.config import Config; print(Config().tracking.tracker)"
    rest = {name: value for name, value in os.environ.items() if name != "COURSE_TRACKER"}
    for default, env in (("trackio", rest), ("jsonl", rest | {"COURSE_TRACKER": "jsonl"})):
        assert subprocess.check_output([sys.executable, "-c", program], text=True, env=env).strip() == default
    assert build({}).tracking.tracker == os.environ["COURSE_TRACKER"] == "none", "tests track what they name"


def test_each_run_keeps_its_own_database_with_its_tables(runs_folder, monkeypatch):
    folder, second = runs_folder
    first, other = read_runs(folder)
    assert (first.name, first.state, first.group, first.id) == ("first", "finished", "pair", "id0")
    assert (other.name, other.state, other.group, other.id) == ("second", "finished", "pair", "id1")
    assert first.folder == folder / "first" / "tracking" / "trackio" != other.folder
    assert other.config["learning_rate"] == 0.1
    assert first.tables == {
        "test/wrong_predictions": (["row", "text"], [[4, "a text"], [5, "<b>another</b>"]]),
        "test/confusion_matrix": (["actual", "yes", "no"], [["yes", 3, 1], ["no", 2, 4]]),
    }
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "shared"))
    assert TrackioTracker(second.info).folder == folder / "shared"


def test_the_hub_is_not_asked_for_the_users_name(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a1B2" * 8)
    monkeypatch.setattr("huggingface_hub.whoami", lambda *_, **__: calls.append("asked") or {"name": "someone"})
    trackio_in(tmp_path / "plain").init("project", name="plain", embed=False, auto_log_cpu=False).finish()
    assert calls == ["asked"], "trackio by itself asks"
    tracker = TrackioTracker(RunInfo("id", "name", "project", None, tmp_path))
    tracker.start()
    tracker.finish()
    assert calls == ["asked"]


class Waits(Tracker):
    """Keeps nothing until it may."""

    name = "waits"

    def __init__(self, info):
        super().__init__(info)
        self.may, self.kept, self.threads = threading.Event(), [], set()

    def log(self, values, step=None, **kwargs):
        assert self.may.wait(120)
        self.kept.append((step, values))
        self.threads.add(threading.current_thread())

    def finish(self, state="finished"):
        self.kept.append(state)


def test_a_step_does_not_wait_for_a_tracker_and_the_end_of_the_run_does(tmp_path):
    tracker = Waits(RunInfo("id", "name", "project", None, tmp_path))
    guarded = Guarded(tracker)
    guarded.start()
    values = {"loss": 1.0}
    for step in range(3):
        guarded.log(values, step)
    values["loss"] = 2.0  # the caller's own again
    assert tracker.kept == []
    tracker.may.set()
    guarded.finish()
    guarded.finish()
    guarded.log({"loss": 9.0}, 9)
    assert tracker.kept == [(0, {"loss": 1.0}), (1, {"loss": 1.0}), (2, {"loss": 1.0}), "finished"]
    assert tracker.threads.isdisjoint({threading.main_thread()})


def test_histograms_of_many_tensors_are_those_of_each():
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(300, generator=generator),
        "b": torch.full((4,), 2.0),
        "empty": torch.empty(0),
        "c": torch.tensor([1.0, float("nan"), float("inf"), 3.0]),
        "d": torch.tensor([float("nan")]),
        "e": torch.randn(50, generator=generator).bfloat16(),
    }
    drawn = histograms(tensors)
    assert list(drawn) == ["a", "b", "c", "d", "e"]
    assert {name: sum(h.counts) for name, h in drawn.items()} == {"a": 300, "b": 4, "c": 2, "d": 0, "e": 50}
    assert (drawn["b"].low, drawn["b"].high) == (1.5, 2.5) and (drawn["c"].low, drawn["c"].high) == (1.0, 3.0)
    for name in ("a", "e"):
        values = tensors[name].float()
        assert drawn[name].counts == torch.histc(values, BINS).int().tolist()
        assert (drawn[name].edges[0], drawn[name].edges[-1]) == (values.min().item(), values.max().item())
    assert len(drawn["a"].edges) == BINS + 1 and histograms({"empty": torch.empty(0)}) == {}
