"""Names that a tracker's service refuses are told in one line, and the training goes on; artifacts' are made fit."""

import pytest

from course_lib.tracking.base import Guarded, RunInfo, Tracker, artifact_name
from course_lib.tracking.trackio_tracker import TrackioTracker
from course_lib.tracking.wandb_tracker import WandbTracker


@pytest.mark.parametrize(
    ("tracker", "project", "told"),
    [(WandbTracker, "team/proj", "Invalid project name 'team/proj'"), (TrackioTracker, "registry-x", "registry-")],
)
def test_a_project_that_the_service_refuses_is_told(monkeypatch, tmp_path, tracker, project, told):
    monkeypatch.setenv("WANDB_MODE", "offline")
    lines = []
    guarded = Guarded(tracker(RunInfo("id", "name", project, None, tmp_path)), lines.append)
    guarded.start()
    guarded.finish()
    assert len(lines) == 1 and told in lines[0] and "the training goes on" in lines[0] and "\n" not in lines[0]


def test_the_name_of_an_artifact_is_made_fit(tmp_path):
    from trackio.cas import validate_artifact_name as of_trackio
    from wandb.sdk.artifacts._validators import validate_artifact_name as of_wandb

    for name in ("meta-llama/Llama 3.2", "a:b#c", "模型/x", "x" * 200, "plain-1.0_a"):
        fit = artifact_name(name)
        assert of_trackio(fit) == of_wandb(fit) == fit
    assert artifact_name("plain-1.0_a") == "plain-1.0_a"

    class Kept(Tracker):
        name = "kept"

        def artifact(self, name, folder, kind):
            names.append(name)

    names = []
    tracker = Guarded(Kept(RunInfo("id", "name", "project", None, tmp_path)))
    tracker.start()
    tracker.artifact("org/model", tmp_path, "model")
    tracker.finish()
    assert names == ["org-model"]
