"""V-Half and V-Min are never longer than the published algorithm's tables, and hold no more."""

import json
from pathlib import Path

import pytest

from course_lib.parallel.pipeline.fitted.building_blocks import BLOCKS, repeat, squeeze
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.parallel.pipeline.validation import check, in_flight

PUBLISHED = json.loads((Path(__file__).parent / "golden" / "v_schedules.json").read_text())
"""What zbv_greedy.py of sail-sg/zero-bubble-pipeline-parallelism (commit 064369d) makes of F, I and W of length 1
without latency: by name, ranks and micro-batches, when the last rank ends, and how many activations of a stage a rank
holds at most."""


@pytest.mark.parametrize("name", BLOCKS)
def test_no_table_is_longer_than_the_published_one_or_holds_more(name):
    shorter = 0
    for size, (ends, held) in PUBLISHED[name].items():
        table = repeat(name, *map(int, size.split()), Costs())
        check(table)
        timeline = simulate(table, Costs())
        assert timeline.makespan <= ends and max(timeline.peak_activations) <= held, size
        shorter += timeline.makespan < ends
    assert shorter >= {"v_half": 20, "v_min": 15}[name]


@pytest.mark.parametrize("name, ranks", [("v_half", 4), ("v_min", 6)])
def test_squeezing_closes_the_gap_that_keeps_copies_apart(name, ranks):
    def ends(where):
        table = squeeze(name, ranks, 4 * ranks, Costs(), where)
        assert max(in_flight(table)) <= 2 * BLOCKS[name].activations(ranks)
        return simulate(table, Costs()).makespan

    assert ends("nowhere") - ends("at the ends") >= 4


@pytest.mark.parametrize("costs", [Costs(3, 2, 1), Costs(10, 10, 7, 1), Costs(5, 6, 4, 2, activation=5, kept=2)])
def test_other_costs_shape_the_table_and_memory_stays_what_it_was(costs):
    for name in BLOCKS:
        most = 2 * BLOCKS[name].activations(5) * costs.activation
        table = repeat(name, 5, 15, costs)
        check(table)
        timeline = simulate(table, costs)
        assert max(timeline.peak_activations) <= most
        assert timeline.makespan <= simulate(repeat(name, 5, 15, Costs()), costs).makespan
