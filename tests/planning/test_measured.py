"""The memory model beside the meter on two real ranks, and the order of strategies beside published runs."""

import pytest

from benchmarks import planner, planner_order

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
def test_states_within_5_and_activations_within_15_percent():
    found = planner.on_real_ranks()
    states = [each for each in found if each.kind == "two ranks, model states"]
    activations = [each for each in found if each.kind == "two ranks, activations"]
    assert len(states) == 12 and len(activations) == 4
    assert all(abs(each.error) <= 0.05 for each in states), states
    assert all(abs(each.error) <= 0.15 for each in activations), activations


def test_the_faster_of_two_published_strategies_is_predicted_to_be():
    found = planner_order.pairs()
    assert len(found) == 7
    assert [(each.first, each.second) for each in found if not each.right] == [
        ("titan-asynctp-8B-bf16", "titan-asynctp-8B-float8-rowwise")], "float8 was slower there than bf16"


def test_layouts_that_a_sweep_found_best_are_near_the_predicted_best():
    found = planner_order.places()
    assert len(found) == 11 and min(each.fitting for each in found) >= 12
    assert all(each.behind < 1 / 3 for each in found), found
    assert sum(each.place <= max(3, each.fitting // 10) for each in found) >= 7
