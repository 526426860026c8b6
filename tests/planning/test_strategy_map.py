"""The map of strategies, and the rule of thumb held against it."""

import pytest

from course_lib.figures import planning as figures
from course_lib.planning import hardware, strategy, strategy_map


@pytest.fixture(scope="module")
def places():
    return strategy_map.survey("A10G")


def test_every_place_holds_the_best_or_says_why_not(places):
    assert len(places) == 7 and all(len(row) == 7 for row in places)
    seen = [place for row in places for place in row]
    assert len({(place.model.name, place.gpus) for place in seen}) == 49
    empty = [place for place in seen if place.best is None]
    assert 4 <= len(empty) < 25 and all("it fits with" in place.why_not or "take a smaller" in place.why_not
                                        for place in empty)
    for row in places:  # who holds it on some GPUs holds it on more
        there = [place.best is not None for place in row]
        assert there == sorted(there)
    again = strategy.search(places[2][3].model, hardware.cluster("A10G", 8), 1024, 32).best
    assert again.plan == places[2][3].best.plan


def test_small_models_need_nothing_and_large_ones_offload(places):
    assert places[0][0].family == "DDP"
    assert "offload" in places[-1][-1].family and places[-1][0].family == ""


def test_the_rule_of_thumb_and_where_the_search_differs(places):
    assert strategy_map.rule_of_thumb(124e6, 2) == ("DDP",) and strategy_map.rule_of_thumb(6.7e9, 4) == ("FSDP",)
    assert strategy_map.rule_of_thumb(70e9, 4) == ("FSDP + offload",)
    assert "ZeRO-3" in strategy_map.rule_of_thumb(70e9, 8)
    cases = strategy_map.disagreements(places, "A10G")
    assert 10 < len(cases) < 45
    assert {(case.place.model.name, case.place.gpus) for case in cases}.isdisjoint(
        {(place.model.name, place.gpus) for row in places for place in row
         if place.family in strategy_map.rule_of_thumb(place.model.parameters, place.gpus)})
    slower = [case for case in cases if case.fits]
    assert slower and all(case.fits.cost.tokens_per_second <= 1.0011 * case.place.best.cost.tokens_per_second
                          for case in slower)
    assert all(case.because for case in cases)
    kinds = {case.because.split(" ")[-1] for case in cases}
    assert {"fits", "fit", "speed"} & kinds


def test_the_map_is_drawn(places):
    figure = figures.strategy_map(places, "A10G")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(texts) == 49 and texts.count("nothing") == sum(place.best is None for row in places for place in row)
    assert any("offload" in text for text in texts)


def test_memory_is_drawn_by_kind():
    figure = figures.memory({"parameters": 2e9, "logits": 1e9}, {"parameters": 2.1e9, "logits": 1e9}, "Close")
    assert len(figure.axes[0].patches) == 4
