"""What lesson 10 claims, measured anew: who raises, who did it, which tool names the culprit, and that cures work."""

import math
import mmap
import re
from pathlib import Path

import pytest
import torch

from course_lib.lessons.faults.lab import SCENARIOS
from tests.notebooks.conftest import page, says

BY_LUCK = ("mismatched collectives", "different shapes", "wrong port", "wrong address")
"""Faults in which the culprit may be the first to speak: it depends on which message, or time-out, comes first."""


PARAMETERS = {"world_size": 3}


def test_the_culprit_of_a_skipped_step_raises_nothing(lesson):
    assert lesson["last_sum_of_the_culprit"] == 7, "three in its own step 3, and the others' two of step 2 twice"
    assert not lesson["an_error_names_a_rank"] and lesson["cured_sums"] == [0, 3, 4, 9]


def test_the_watchdog_accuses_the_culprit_alone(lesson):
    assert lesson["accused"] == 1
    assert lesson["watchdog_named"] == {"skipped step": [1], "mismatched collectives": [1], "stopped rank": [1]}


def test_forty_lines_name_the_rank_that_the_library_names(lesson):
    assert lesson["found_by_forty_lines"] == {
        "skipped step": [1, "behind", 4],
        "mismatched collectives": [1, "mismatched", 1],
        "different dtypes": [1, "mismatched", 1],
        "stopped rank": [1, "behind", 3],
    }
    assert lesson["named_by_names_alone"] == 3, "a dtype has no name"
    assert lesson["what_the_others_see"] == "a time-out with a key"


def test_torchrun_names_the_rank_that_left_an_error_file(lesson):
    assert lesson["root_cause"] == 1 and lesson["error_files"] == [1] and lesson["code_of_torchrun"] == 1
    assert lesson["error_file_says"] == "ValueError: no batch for step 3"
    assert says(lesson, "torchrun named rank 1, the culprit")


def test_contents_that_do_not_fit(lesson):
    assert 1 <= lesson["runs_with_an_error"] <= 2, "the one with dtypes raises none; the one with shapes need not"
    assert lesson["detail_named"].keys() == {"mismatched collectives", "different shapes", "different dtypes"}


def test_ranks_that_are_gone(lesson):
    assert lesson["culprits_first_to_speak"] <= 2, "a rank that knocks elsewhere may complain as early as the others"
    assert len(lesson["tools_were_right"]) == 6 and all(lesson["tools_were_right"].values())
    assert lesson["starts_of_the_cured_run"] == lesson["steps_of_the_last_start"] == 2


def test_a_rank_is_said_to_be_the_straggler(lesson):
    """tests/lessons/faults/test_lab.py has the right one named, in virtual time."""
    assert lesson["step_of_rank_1_over_rank_0"] > 0 and 0 < lesson["share_that_rank_0_waits"] < 1
    (named,) = lesson["names_the_straggler"]
    assert named in range(3)


def test_numbers_that_go_bad(lesson):
    assert lesson["runs_that_say_nothing"] == 2
    assert len(lesson["losses_cured"]) == 3 and all(map(math.isfinite, lesson["losses_cured"]))
    assert lesson["loss_fell_with_two_models"] and lesson["weights_apart"] == pytest.approx(0.5)
    assert lesson["named"] == {
        "NaN on one rank": [1],
        "diverging parameters": [1],
        "out of memory": [1],
        "full disk": [0],
    }


def test_who_speaks_and_who_did_it(lesson):
    assert len(SCENARIOS) == 15 and lesson["uncured"] == {}
    assert lesson["tool_named_the_culprit"] == 15 - (lesson["names_the_straggler"] != [1]), "the one named by times"
    assert len(lesson["spoke_first"]) == lesson["first_error_from_a_culprit"] <= 6
    assert {"out of memory", "full disk"} <= set(lesson["spoke_first"]) <= {"out of memory", "full disk", *BY_LUCK}


def test_what_goes_wrong_is_what_the_installed_torch_can_say():
    wrong = page("10_faults_and_hangs").prose.split("## When it goes wrong")[1]
    headings = re.findall(r"^\*\*`([^\d`\n]{16,})[^`\n]*`\*\*", wrong, re.MULTILINE)
    assert len(headings) == 3
    with (
        open(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so", "rb") as library,
        mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as built,
    ):
        assert [words for words in headings if built.find(words.encode()) < 0] == []
