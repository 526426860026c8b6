"""The search ranks what fits by time, says why the rest does not, and agrees with the simulator."""

from fractions import Fraction

import pytest

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.fitted.search import FITTED, NAMES, build, search, stage_costs, stages_for
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.parallel.pipeline.validation import check


def test_every_schedule_is_looked_at_and_the_fastest_comes_first():
    of_a_rank = Costs(backward_weight=Fraction(1, 4), latency=Fraction(1, 8))
    found = search(4, [8], of_a_rank)
    assert sorted(each.name for each in found) == sorted(NAMES)
    times = [each.sample_time for each in found]
    assert times == sorted(times) and len(set(times)) > 6
    for each in found:
        costs = stage_costs(of_a_rank, each.stages_per_rank)
        assert each.timeline == simulate(build(each.name, 4, 8, each.stages_per_rank, costs), costs)
        assert each.sample_time == each.timeline.makespan / 8


def test_a_limit_turns_the_ranking_over():
    names = ["1f1b", "zb_h2", "zbv", "v_half", "v_min", "gpipe"]
    best = {limit: search(4, [16], Costs(), limit, names=names)[0].name for limit in (7, 4, 3, 2)}
    assert best == {7: "zbv", 4: "zbv", 3: "v_half", 2: "v_min"}
    found = [(each.name, each.problem) for each in search(4, [16], Costs(), 3, names=names)]
    assert found[:2] == [("v_half", ""), ("v_min", "")]
    too_much = {"zbv": 4, "zb_h2": 7, "1f1b": 4, "gpipe": 16}
    assert dict(found[2:]) == {name: f"rank 0 holds {held} > 3" for name, held in too_much.items()}
    assert all(each.problem for each in search(4, [16], Costs(), Fraction(1, 2)))


def test_what_is_illegal_is_listed_last_with_the_rule():
    *legal, first, second = search(4, [7], Costs())
    assert {first.name, second.name} == {"dualpipev", "zbv_auto"} and all(each.timeline for each in legal)
    for each in (first, second):
        assert each.timeline is None and "at least as many as stages" in each.problem


def test_of_equals_the_one_that_holds_least_comes_first():
    assert [each.name for each in search(4, [16], Costs(), names=["gpipe", "1f1b"])] == ["1f1b", "gpipe"]


def test_more_micro_batches_are_better_until_their_overhead_is_not():
    def best(overhead):
        return search(4, [4, 8, 16, 32, 64], Costs(8, 8, 8), names=["1f1b"], measured_at=8, overhead=overhead)

    assert [each.microbatches for each in best(0)] == [64, 32, 16, 8, 4]
    counts = [best(overhead)[0].microbatches for overhead in (Fraction(1, 8), 1, 4)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    halved = best(0)[-1]
    assert halved.timeline.makespan == (4 + 3) * 3 * 16 and halved.timeline.peak_activations[0] == 4 * 2
    assert halved.sample_time == halved.timeline.makespan / 8


def test_a_fitted_table_keeps_to_the_limit_and_beats_the_drawn_one():
    costs = Costs(18, 18, 9, Fraction(1, 2))
    for limit in (4, 5, 6, 8):
        table = build("zb_auto", 4, 16, 1, costs, limit)
        timeline = simulate(table, costs)
        check(table)
        assert max(timeline.peak_activations) <= limit
        assert timeline.makespan <= simulate(make("zb_h1", 4, 16), costs).makespan
    wide = simulate(build("zb_auto", 4, 16, 1, costs), costs)
    assert wide.stage_bubble < simulate(make("zb_h2", 4, 16), costs).stage_bubble


def test_a_stage_gets_its_share_of_a_ranks_costs():
    stage = stage_costs(Costs(6, 4, 2, 1, activation=8, kept=6, pair=10), 2, size=Fraction(1, 2), overhead=1)
    assert stage == Costs(Fraction(5, 2), 2, Fraction(3, 2), Fraction(1, 2), 2, Fraction(3, 2), Fraction(7, 2))
    assert stage_costs(Costs(), 2).of("kept", 4) == [Fraction(1, 2)] * 4


@pytest.mark.parametrize("name", NAMES)
def test_stages_for(name):
    only = FITTED.get(name) or KINDS[name].stages_per_rank
    assert stages_for(name) == (only or 2)
    if only:
        with pytest.raises(ConfigError, match=f"{name} with 3 stages per rank: it takes exactly {only}"):
            stages_for(name, 3)
    else:
        assert stages_for(name, 3) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: search(4, [8], Costs(), names=["zbw"]), "unknown schedule `zbw`: did you mean"),
        (lambda: search(0, [8], Costs()), "0 ranks: take at least 1"),
        (lambda: search(4, [8, 0], Costs()), "0 micro-batches: take at least 1"),
        (lambda: search(4, [8], Costs(), stages_per_rank=[0]), "0 stages per rank: take at least 1"),
        (lambda: build("v_half", 0, 8, 2, Costs()), "0 ranks and 8 micro-batches"),
    ],
)
def test_bad_numbers_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
