"""What lesson 16 claims, measured anew: what Adam hides, what drifts apart, the audit by hand, five engines, ours."""

import re

import pytest

from tests.notebooks.conftest import says

PARAMETERS = {"device": "auto", "world_size": 2, "steps": 30}


def test_adam_divides_a_factor_out_and_the_curves_agree(lesson):
    assert lesson["gradients_times"] == pytest.approx(2, rel=1e-5)
    assert says(lesson, "Adam divides a constant factor out: gradients 2.00 times too large, losses")


def test_what_nobody_reduces_drifts_apart_and_with_clipping_all_does(lesson):
    assert says(lesson, "2 of 5 settings show a factor of 2.")
    assert says(lesson, "with clipping 9 of 9 parameters drift apart.")


def test_the_audit_by_hand_accuses_nobody_who_is_right_and_names_factor_and_axis(lesson):
    assert max(lesson["right_loss_off"], lesson["example_loss_apart"]) < 1e-12
    ratios = lesson["example_ratios"]
    assert {name for name, ratio in ratios.items() if abs(ratio - 1) > 1e-9} == {"norm.weight", "norm.bias"}
    assert ratios["norm.weight"] == pytest.approx(3) and len(ratios) == 9
    wrong = {name: said for name, said in lesson["example_said"].items() if said != "equal"}
    assert wrong == dict.fromkeys(("norm.weight", "norm.bias"), "3 times the right one, the size of tp")
    assert lesson["tolerances"]["float32"] < 1e-3 < lesson["tolerances"]["bfloat16"] < 0.1


OF_ITS_OWN = "no factor: each rank has its own"
WRONG = {
    1: ("all nine", "1/3", "0.3333 times the right one, the size of tp"),
    2: ("those of norm, and embedding.weight", OF_ITS_OWN, "of tp has its own part; their sum is the right one"),
    3: ("down.bias", "1/3", "0.3333 times the right one, the size of tp"),
    4: ("all nine", "another factor", "times the right one, the size of no axis"),
    5: ("up.weight and down.weight", OF_ITS_OWN, "of dp has its own part; their mean is the right one"),
}


@pytest.mark.parametrize("number", WRONG)
def test_each_engine_of_the_hunt_is_caught_though_its_loss_is_right(lesson, number):
    parameters, factor, sentence = WRONG[number]
    assert lesson[f"engine_{number}_loss_off"] < 1e-12
    assert lesson[f"engine_{number}_parameters"] == parameters and lesson[f"engine_{number}_factor"] == factor
    said = [words for words in lesson[f"engine_{number}_said"].values() if words != "equal"]
    assert all(sentence in words for words in said if "nothing explains it" not in words)
    assert sum("nothing explains it" in words for words in said) == (number == 2), "embedding.weight"


def test_two_data_ranks_alone_show_one_of_the_five(lesson):
    assert says(lesson, "Two data ranks alone show 1 of the five")


def test_ours_says_it_in_a_sentence(lesson):
    assert lesson["audited"]["dp2"] == []
    for layout in ("tp3", "dp2 × tp3"):
        (sentence,) = lesson["audited"][layout]
        assert sentence.startswith("`norm.weight`, `norm.bias`: 3 times the reference, the size of tp: summed over it")
    assert re.match(
        "dp3: `embedding.weight`, .* and 6 more: 0.3333 times the reference, the size of dp:", lesson["step_said"]
    )
    assert says(lesson, lesson["step_said"].split(": see")[0])
    assert lesson["released_agree"] == 9 and "`model.layers.0.mlp.gate.weight`" in lesson["released_said"]
