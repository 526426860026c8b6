"""What lesson 12 claims, measured anew, with no network but the loopback interface and no account."""

import pytest

from course_lib.cloud.job import Job
from course_lib.cloud.sagemaker import Account, CloudError
from course_lib.cloud.stand_in import ROLE
from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.launching.netns import in_own_network
from course_lib.lessons.cloud.figures import losses_by_attempt
from tests.notebooks.conftest import assert_quoted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
STEPS, INTERRUPT_AFTER = 24, 3


@pytest.fixture(scope="module")
def lesson(run_lesson):
    """Run in a network namespace that has the loopback interface alone."""
    return in_own_network(run_lesson, "12_sagemaker", world_size=1, steps=STEPS, interrupt_after=INTERRUPT_AFTER)


def test_the_class_of_the_sdk_makes_the_same_request(lesson):
    assert {"ResourceConfig", "StoppingCondition", "RoleArn"} <= set(lesson["same_as_by_hand"])
    assert {"HyperParameters", "InputDataConfig", "CheckpointConfig"} <= set(lesson["parts_of_the_request"])
    assert set(lesson["parts_of_the_request"]) <= set(lesson["parts_by_hand"])


def test_the_interrupted_job_goes_on_after_the_step_that_was_running(lesson):
    first, second = lesson["attempts"]
    assert max(first) >= INTERRUPT_AFTER + 1 and lesson["second_attempt_begins_at"] == min(second)


def test_model_and_metrics_came_back(lesson):
    assert lesson["label"] in ("negative", "neutral", "positive")
    assert {"train:loss", "eval:accuracy", "eval:macro_f1"} <= lesson["final_metrics"].keys()
    assert 0 < lesson["final_metrics"]["train:learning_rate"] < 1e-3, "of the last step, one before the schedule's 0"


def test_every_launcher_has_a_script(lesson):
    assert lesson["lines_of_each_script"].keys() == {"slurm", "torchrun", "accelerate"}
    assert min(lesson["lines_of_each_script"].values()) >= 5


def test_attempts_are_told_apart():
    log = [
        "[algo-1] metrics: step=1 epoch=0.1 loss=1.5 x=1",
        "[algo-1] resumed from f (step 1 of 2)",
        "[algo-1] metrics: step=2 epoch=0.2 loss=1.25 x=1",
        "[algo-1] metrics: step=2 epoch=0.2 eval.loss=9",
    ]
    assert losses_by_attempt(log) == [{1: 1.5}, {2: 1.25}]


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: Job(build({"num_processes": 3}), "ml.m5.xlarge", 2),
        lambda: Account("admin"),
        lambda: Account(ROLE, environment={"WANDB_API_KEY": "x"}),
    ],
    ids=["ranks", "role", "key"],
)
def test_what_goes_wrong_says_what_the_lesson_says(attempt):
    with pytest.raises((ConfigError, CloudError)) as error:
        attempt()
    assert_quoted("12_sagemaker", str(error.value))
