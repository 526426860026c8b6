"""The map of strategies, and the rule of thumb held against it."""

import pytest

from course_lib.lessons.planning import figures
from course_lib.planning import hardware, strategy, strategy_map


@pytest.fixture(scope="module")
def places():
    return strategy_map.survey("A10G")


def test_every_place_holds_the_best_or_says_why_not(places):
    assert len(places) == 7 and all(len(row) == 7 for row in places)
    seen = [place for row in places for place in row]
    assert len({(place.model.name, place.gpus) for place in seen}) == 49
    empty = [place for place in seen if place.best is None]
    assert 4 <= len(empty) < 25 and all(
        "it fits with" in place.why_not or "take a smaller" in place.why_not for place in empty
    )
    for row in places:  # who holds it on some GPUs holds it on more
        there = [place.best is not None for place in row]
        assert there == sorted(there)
    again = strategy.search(places[2][3].model, hardware.cluster("A10G", 8), 1024, 32).best
    assert again.plan == places[2][3].best.plan


def test_small_models_need_nothing_and_large_ones_offload(places):
    assert places[0][0].families == ("DDP",)
    assert "offload" in places[-1][-1].families[0] and places[-1][0].families == ()


def test_equals_are_closer_than_a_tie_and_the_simplest_comes_first(places):
    equals = [place.equals for row in places for place in row if len(place.equals) > 1]
    assert equals
    for candidates in equals:
        speeds = [candidate.cost.tokens_per_second for candidate in candidates]
        assert min(speeds) >= (1 - strategy_map.TIE) * max(speeds)
        ranks = [strategy_map.SIMPLEST_FIRST.index(strategy.family(candidate.plan)) for candidate in candidates]
        assert ranks == sorted(set(ranks))
    assert set(strategy_map.SIMPLEST_FIRST) == set(strategy.FAMILIES)


def test_the_rule_of_thumb():
    said = strategy_map.rule_in_words()
    assert "up to ten billion, DDP on up to 2 GPUs and FSDP on more; beyond that, offload on up to 4 GPUs and" in said
    assert [
        strategy_map.rule_of_thumb(size, gpus)
        for size, gpus in ((124e6, 64), (6.7e9, 2), (6.7e9, 4), (70e9, 4), (70e9, 8))
    ] == ["DDP", "DDP", "FSDP", "offload", "ZeRO-3"]


def test_where_the_search_differs_from_the_rule(places):
    cases = strategy_map.disagreements(places, "A10G")
    differing = {(case.place.model.name, case.place.gpus) for case in cases}
    for place in (place for row in places for place in row):
        rule = strategy_map.rule_of_thumb(place.model.parameters, place.gpus)
        same = [name for name in place.families if name == rule or (rule == "offload" and "offload" in name)]
        assert bool(same) == ((place.model.name, place.gpus) not in differing)
    for case in cases:
        if "of the speed" in case.because:
            best = max(each.cost.tokens_per_second for each in case.place.equals)
            assert case.fits.cost.tokens_per_second < (1 - strategy_map.TIE) * best
    assert {case.because.rpartition(" ")[2] for case in cases} == {"fits", "fit", "speed", "offload"}


def test_the_map_is_drawn(places):
    figure = figures.strategy_map(places, "A10G")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(texts) == 49 and texts.count("nothing") == sum(place.best is None for row in places for place in row)
    assert any("=" in text for text in texts)
    framed = sum(patch.get_linewidth() > 1 for patch in figure.axes[0].patches)
    assert framed == sum("offload" in place.families[0] for row in places for place in row if place.best)
