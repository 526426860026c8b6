"""The memory model beside what the meter finds on two real ranks, at every stage of ZeRO."""

import pytest

from benchmarks import planner

pytestmark = pytest.mark.timeout(120)


def test_states_within_5_and_activations_within_15_percent():
    found = planner.on_real_ranks()
    states = [each for each in found if each.kind == "two ranks, model states"]
    activations = [each for each in found if each.kind == "two ranks, activations"]
    assert len(states) == 12 and len(activations) == 4
    assert all(abs(each.error) <= 0.05 for each in states), states
    assert all(abs(each.error) <= 0.15 for each in activations), activations
