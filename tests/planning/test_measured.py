"""The memory model beside the meter on two real ranks, and the order of strategies beside published runs."""


from benchmarks import planner, planner_order


def test_states_within_5_and_activations_within_15_percent():
    rows = planner.on_real_ranks()
    states = [row for row in rows if row.kind == "two ranks, model states"]
    activations = [row for row in rows if row.kind == "two ranks, activations"]
    assert len(states) == 12 and len(activations) == 4
    assert all(abs(row.error) <= 0.05 for row in states), states
    assert all(abs(row.error) <= 0.15 for row in activations), activations


def test_the_faster_of_two_published_strategies_is_predicted_to_be():
    pairs = planner_order.pairs()
    assert len(pairs) == 10
    assert [(pair.first, pair.second) for pair in pairs if not pair.right] == [
        ("titan-asynctp-8B-bf16", "titan-asynctp-8B-float8-rowwise")], "float8 was slower there than bf16"


def test_layouts_that_a_sweep_found_best_are_near_the_predicted_best():
    places = planner_order.places()
    assert len(places) == 11 and min(place.fitting for place in places) >= 7
    assert all(place.behind < 1 / 3 for place in places), places
    assert sum(place.place <= max(3, place.fitting // 10) for place in places) >= 7
