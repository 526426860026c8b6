"""Names that a service refuses are refused when the config is built, by the rules that its own library has."""

from unittest import mock

import pytest

from course_lib.cloud.sagemaker import Account, CloudError
from course_lib.cloud.stand_in import ROLE
from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.tracking.base import Guarded, RunInfo, Tracker, artifact_name
from course_lib.training.callbacks.tracking import TrackingCallback

NAMES = ["tweets", "my project", "a" * 128, "a" * 129, "数据", "données", "_system", "model_artifacts"]
NAMES += ["a/b", "a\\b", "a#b", "a?b", "a%b", "a:b"]
NAMES += ["registry-x", "Registry-x", "x_system", "x.sys_configs", "x_run_artifact_links"]


def refused(call, *arguments):
    try:
        call(*arguments)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_a_project_is_refused_where_the_library_refuses_it(name):
    import wandb
    from trackio.sqlite_storage import SQLiteStorage

    assert refused(build, {"tracker": "wandb", "project": name}) == refused(lambda: wandb.Settings(project=name))
    theirs = refused(SQLiteStorage.validate_project_name, name)
    assert refused(build, {"tracker": "trackio", "project": name}) == theirs
    assert not refused(build, {"tracker": "jsonl,none", "project": name}), "files of our own take any name"


@pytest.mark.parametrize(
    ("leaves", "told"),
    [
        ({"tracker": "wandb", "project": "team/proj"}, "name the team by WANDB_ENTITY=team .* give --project proj"),
        ({"tracker": "jsonl,wandb", "project": "team/a#b"}, "give another --project"),
        ({"tracker": "wandb", "project": ""}, "project is empty"),
        ({"tracker": "trackio", "project": "registry-a"}, "trackio takes no project"),
        ({"tracker": "wandb", "run_name": "x" * 129}, "of 129 characters: give --run_name one of up to 128"),
        ({"tracker": "wandb", "output_dir": "runs/" + "x" * 129}, "takes no run_name"),
        ({"tracker": "wandb", "run_group": "x" * 129}, "takes no run_group"),
        ({"tracker": "tensorboard", "run_name": "../a"}, "it names a folder"),
        ({"push_to_hub": "a/b/c"}, "is no name of a repository"),
        ({"push_to_hub": "a b"}, "is no name of a repository"),
        ({"push_to_hub": "x" * 97}, "is no name of a repository"),
    ],
)
def test_the_line_says_what_to_give(leaves, told):
    with pytest.raises(ConfigError, match=told) as caught:
        build(leaves)
    assert "\n" not in str(caught.value)


def test_usual_names_are_taken():
    names = {"project": "my project", "run_name": "bert, 1e-4", "run_group": "a/b", "push_to_hub": "owner/my.model-1"}
    build({"tracker": "wandb,trackio,tensorboard"} | names)
    Account(ROLE, bucket="my-bucket.1", tags={"cost centre": "a/b:c=d@e"}, environment={"A_1": "x y"})


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("WANDB_TAGS", "good,", "tag of 0 characters"),
        ("WANDB_TAGS", "x" * 65, "tag of 65 characters"),
        ("WANDB_MODE", "ofline", "WANDB_MODE is `ofline`"),
    ],
)
def test_settings_of_the_environment_are_looked_at_before_a_model_is_loaded(monkeypatch, tmp_path, name, value, told):
    (tmp_path / "keys").write_text(f"{name}={value}\n")
    monkeypatch.setenv(name, value)
    monkeypatch.delenv(name)  # what the file sets is taken away again
    config = build({"tracker": "wandb", "env_file": str(tmp_path / "keys")})
    with pytest.raises(ConfigError, match=told):
        TrackingCallback(config)
    monkeypatch.setenv(name, value)
    TrackingCallback(config.replace(tracker="trackio"))


def test_the_name_of_an_artifact_is_made_fit(tmp_path):
    from trackio.cas import validate_artifact_name as of_trackio
    from wandb.sdk.artifacts._validators import validate_artifact_name as of_wandb

    for name in ("meta-llama/Llama 3.2", "a:b#c", "模型/x", "x" * 200, "plain-1.0_a"):
        fit = artifact_name(name)
        assert of_trackio(fit) == of_wandb(fit) == fit
    assert artifact_name("plain-1.0_a") == "plain-1.0_a"

    kept = Tracker(RunInfo("id", "name", "project", None, tmp_path))
    kept.name, kept.artifact = "kept", mock.Mock()
    tracker = Guarded(kept)
    tracker.start()
    tracker.artifact("org/model", tmp_path, "model")
    tracker.finish()
    kept.artifact.assert_called_once_with("org-model", tmp_path, "model")


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *(("bucket", name) for name in ("s3://x", "A")),
        *(("tags", tags) for tags in ({"a": "b#c"}, {"aws:x": "1"}, {"x" * 129: ""})),
        *(("environment", variables) for variables in ({"1A": "x"}, {"A": "x" * 513}, {"a-b": "x"})),
    ],
)
def test_what_aws_does_not_take_is_refused(field, wrong):
    with pytest.raises(CloudError):
        Account(ROLE, **{field: wrong})
