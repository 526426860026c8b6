"""Names that a service refuses are refused when the config is built, by the rules that its own library has."""

import pytest
from botocore.session import get_session

from course_lib.cloud.sagemaker import Account, CloudError
from course_lib.cloud.stand_in import ROLE
from course_lib.config import build, service_names
from course_lib.errors import ConfigError
from course_lib.tracking.base import Guarded, RunInfo, Tracker, artifact_name
from course_lib.training.callbacks.tracking import TrackingCallback

NAMES = [
    "tweets",
    "my project",
    "a/b",
    "a\\b",
    "a#b",
    "a?b",
    "a%b",
    "a:b",
    "a" * 128,
    "a" * 129,
    "registry-x",
    "x_system",
    "x.sys_configs",
    "model_artifacts",
    "_system",
    "数据",
    "données",
    "x_run_artifact_links",
    "Registry-x",
]


def refused(call):
    try:
        call()
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_a_project_is_refused_where_the_library_refuses_it(name):
    import wandb
    from trackio.sqlite_storage import SQLiteStorage

    theirs = {
        "wandb": lambda: wandb.Settings(project=name),
        "trackio": lambda: SQLiteStorage.validate_project_name(name),
    }
    for tracker, theirs_ in theirs.items():
        ours = refused(lambda tracker=tracker: build({"tracker": tracker, "project": name}))
        assert ours == refused(theirs_), tracker
    assert not refused(lambda: build({"tracker": "jsonl,none", "project": name})), "files of our own take any name"


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
    build(
        {
            "tracker": "wandb,trackio,tensorboard",
            "project": "my project",
            "run_name": "bert, 1e-4",
            "run_group": "a/b",
            "push_to_hub": "owner/my.model-1",
        }
    )


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


def test_what_aws_takes():
    """By the service's own description of its requests."""
    shapes = get_session().get_service_model("sagemaker")
    assert shapes.shape_for("TagKey").metadata["max"] == 128 and shapes.shape_for("TagValue").metadata["max"] == 256
    assert shapes.shape_for("TrainingEnvironmentValue").metadata["max"] == 512
    Account(ROLE, bucket="my-bucket.1", tags={"cost centre": "a/b:c=d@e"}, environment={"A_1": "x y"})
    for wrong in (
        {"bucket": "s3://x"},
        {"bucket": "A"},
        {"tags": {"a": "b#c"}},
        {"tags": {"aws:x": "1"}},
        {"tags": {"x" * 129: ""}},
        {"environment": {"1A": "x"}},
        {"environment": {"A": "x" * 513}},
        {"environment": {"a-b": "x"}},
    ):
        with pytest.raises(CloudError):
            Account(ROLE, **wrong)


def test_every_rule_is_one_of_a_field_that_is_there():
    assert {field for _, field in service_names.RULES} <= {"project", "run_name", "run_group"}
