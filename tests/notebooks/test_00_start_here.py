"""What lesson 00 claims, on the values that its cells recorded."""

import re
import statistics

import pytest

from course_lib.commands.doctor_checks import CHECKS
from course_lib.system import machine
from tests.notebooks.conftest import NOTEBOOKS, page, says

WORLD_SIZE, REPEATS = 2, 1


@pytest.fixture(scope="module")
def values(run_lesson):
    return run_lesson("00_start_here", forked=False, world_size=WORLD_SIZE, steps=10, repeats=REPEATS)


def test_it_says_how_fast_bf16_was_measured_to_be(values):
    assert values["native_bf16"] == machine.native_bf16("cpu")
    factor = values["bf16_speedup"]
    assert factor == pytest.approx(values["bf16_gflops"] / values["fp32_gflops"]) and factor > 0
    advice = "faster: use it" if factor > 1 else "slower: stay with fp32"
    assert says(
        values,
        f"multiplies at {values['fp32_gflops']:.0f} GFLOP/s in fp32. "
        f"bf16 is {max(factor, 1 / factor):.1f} times {advice}.",
    )


def test_it_says_what_starts_took_and_shared(values):
    starts = {int(count): seconds for count, seconds in values["starts"].items()}
    assert list(starts) == [1, WORLD_SIZE, 2 * WORLD_SIZE] and {*map(len, starts.values())} == {REPEATS}
    assert values["start_seconds"] == pytest.approx(statistics.median(starts[WORLD_SIZE]))
    assert min(values["fork_seconds"], values["import_seconds"]) > 0
    assert says(values, f"{WORLD_SIZE} ranks start in {values['start_seconds']:.2f} s here, where fresh interpreters ")
    assert 0 < values["private_megabytes"] <= values["resident_megabytes"]


def test_ranks_are_processes_of_their_own_and_told_who_they_are_and_where_to_meet(values):
    ranks, pids = zip(*values["ranks"], strict=True)
    assert list(ranks) == list(range(WORLD_SIZE)) and len(set(pids)) == WORLD_SIZE
    told = [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in values["told"]]
    assert told == [(str(rank), str(rank), str(WORLD_SIZE)) for rank in range(WORLD_SIZE)]
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in values["told"]}) == 1


def test_ranks_differ_before_the_all_reduce_and_agree_after(values):
    assert values["before"] == list(range(WORLD_SIZE))
    assert values["after"] == [values["sum_of_ranks"]] * WORLD_SIZE
    assert says(
        values,
        f"a rank sends {values['all_reduce_gb_per_s']:.2f} GB/s, "
        f"and a copy in memory moves {values['copy_gb_per_s']:.2f} GB/s",
    )


def test_a_script_of_ones_own_meets_by_hand_and_by_torchrun(values):
    lines = [f"rank {rank} of {WORLD_SIZE} has the sum {sum(range(WORLD_SIZE))}" for rank in range(WORLD_SIZE)]
    assert values["said"] == {"by hand": lines, "torchrun": lines}


def test_it_says_how_fast_the_ranks_were_beside_one(values):
    """As many steps and turns for each way, all of them shown, and the median told."""
    assert [len(turns) for turns in values["turns"]] == [REPEATS] * 3
    alone, single, many = values["speeds"]
    assert [round(speed, 2) for speed in values["speeds"]] == [statistics.median(turns) for turns in values["turns"]]
    assert values["speed_up"] == many / alone > 0
    assert says(
        values,
        f"train {many / alone:.1f} times as fast as one rank that has them all, and "
        f"{many / single:.1f} times as fast as one on one thread.",
    )
    assert values["talk_share"] > 0


def test_the_engines_run_and_nothing_needed_is_missing(values):
    assert values["not_ok"].keys() <= {check.name for check in CHECKS} - {"CPU processes", "FSDP2", "DeepSpeed"}
    assert ("bf16" in values["not_ok"]) != values["native_bf16"]
    assert values["missing"] == []
    assert values["deepspeed"] == f"{machine.version('deepspeed')}, takes the device cpu, talks by gloo"


def test_the_map_knows_the_lessons_that_are_here():
    rows = re.findall(r"^\| (\d\d) \| ", page("00_start_here").prose, re.M)
    assert rows == [path.stem.split("_")[0] for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))]


def test_each_error_is_the_one_that_the_text_explains(values):
    assert values["too_many_ranks"].startswith("LaunchError: asked for 99 ranks on GPUs, and there are ")
    assert values["folder_taken"].startswith("ConfigError: output_dir ")
    assert "already holds a run: go on with --resume_from_checkpoint auto" in values["folder_taken"]
    assert values["hang"].startswith("RanksHung: 1 rank was still running after 3 s")
