"""What lesson 00 claims, on the values that its cells recorded."""

import math

import pytest

from course_lib.commands.doctor_checks import CHECKS
from course_lib.data import bundled
from course_lib.system import machine
from tests.notebooks.conftest import NOTEBOOKS

WORLD_SIZE = 2
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def values(run_lesson):
    return run_lesson("00_start_here", world_size=WORLD_SIZE, steps=16, repeats=2)


def test_bf16_is_worth_it_where_the_hardware_has_it(values):
    assert values["native_bf16"] == machine.native_bf16("cpu")
    assert values["bf16_speedup"] == pytest.approx(values["bf16_gflops"] / values["fp32_gflops"])
    assert values["bf16_speedup"] > 1 if values["native_bf16"] else values["bf16_speedup"] < 1


def test_a_fork_starts_sooner_than_an_interpreter_and_shares_its_memory(values):
    starts = {int(count): seconds for count, seconds in values["starts"].items()}
    assert list(starts) == [1, WORLD_SIZE, 2 * WORLD_SIZE] and all(len(seconds) == 2 for seconds in starts.values())
    assert values["fork_seconds"] < min(starts[WORLD_SIZE]) <= values["start_seconds"] < values["import_seconds"]
    assert values["private_megabytes"] < 0.2 * values["resident_megabytes"]


def test_ranks_are_processes_of_their_own(values):
    assert [rank for rank, _ in values["ranks"]] == list(range(WORLD_SIZE))
    assert len({pid for _, pid in values["ranks"]}) == WORLD_SIZE


def test_ranks_differ_before_the_all_reduce_and_agree_after(values):
    assert values["before"] == list(range(WORLD_SIZE))
    assert values["after"] == [values["sum_of_ranks"]] * WORLD_SIZE == [sum(range(WORLD_SIZE))] * WORLD_SIZE
    assert 0 < values["all_reduce_gb_per_s"] < values["copy_gb_per_s"]


def test_ranks_that_talk_train_one_model_and_ranks_that_do_not_train_several(values):
    assert values["models_with_all_reduce"] == 1
    assert values["models_without"] == WORLD_SIZE


def test_the_loss_falls_from_an_even_bet_towards_the_entropy_of_the_classes(values):
    labels = list(bundled.load_tweets()["train"]["label"])
    shares = [labels.count(label) / len(labels) for label in set(labels)]
    assert values["first_loss"] == pytest.approx(math.log(len(shares)), rel=0.06)
    assert values["last_loss"] == pytest.approx(-sum(share * math.log(share) for share in shares), rel=0.06)
    assert values["last_loss"] < values["first_loss"] - 0.05


def test_the_ranks_share_the_cores_that_one_rank_had(values):
    assert values["samples_per_second"] > 0.3 * values["speed_alone"]
    assert values["samples_per_second"] < 1.5 * WORLD_SIZE * values["speed_one_thread"]
    assert 0 < values["talk_share"] < 0.5


def test_fsdp2_leaves_each_rank_its_share(values):
    assert values["weight_bytes_before"] == WORLD_SIZE * values["weight_bytes_per_rank"]
    assert values["gradient_bytes_per_rank"] == values["weight_bytes_per_rank"]


def test_the_engines_run_and_nothing_needed_is_missing(values):
    assert values["not_ok"].keys() <= {check.name for check in CHECKS} - {"CPU processes", "FSDP2", "DeepSpeed"}
    assert ("bf16" in values["not_ok"]) != values["native_bf16"]
    assert values["missing"] == []
    assert values["deepspeed"] == f"{machine.version('deepspeed')}, takes the device cpu, talks by gloo"


def test_the_map_knows_the_lessons_that_are_here(values):
    assert values["lessons"] == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def test_each_error_is_the_one_that_the_text_explains(values):
    assert values["too_many_ranks"].startswith("LaunchError: asked for 99 ranks on GPUs, and there are ")
    assert values["folder_taken"].startswith("ConfigError: output_dir ")
    assert "already holds a run: give --overwrite_output_dir" in values["folder_taken"]
    assert values["hang"].startswith("RanksHung: 1 rank was still running after 3 s")
