"""What lesson 18 claims, measured anew: waits, DiLoCo beside one process, bytes, lumps, links, Muon's designs."""

import pytest

from course_lib.parallel.communication.hooks import all_reduce_bytes
from tests.notebooks.conftest import says

PARAMETERS = {"device": "auto", "world_size": 2, "steps": 12, "sync_every": 4, "long": 48}


def test_a_step_waits_for_a_slow_link(lesson):
    wait = 0.05 + all_reduce_bytes(4 * 120_576, 2) / 1.25e6
    assert lesson["waiting_share"] == round(100 * wait / (0.02 + wait), 1) > 90
    assert says(lesson, f"and {1000 * wait:.0f} ms at 10 Mbit/s")


def test_diloco_at_h_1_is_one_process_its_sign_matters_and_its_first_step_goes_beyond_the_mean(lesson):
    assert lesson["diloco_at_one_off"] < 1e-5 and lesson["flipped_rises"] > 1
    off = lesson["libraries_off"]
    assert list(off) == ["library's DiLoCo", "torch's LocalSGD"] and max(off.values()) < 1e-4, "by a few roundings"
    assert lesson["first_outer_step"] == pytest.approx(0.7 * 1.9, rel=1e-3)
    assert says(lesson, "at H = 1 it is one process with Nesterov")


def test_bytes_are_the_formula_and_torchs_hook_sends_as_many(lesson):
    counted = lesson["bytes_counted"]
    assert counted == lesson["bytes_by_formula"]
    assert lesson["torchs_bytes_over_ours"] == 1 and lesson["top_k_share"] == 2.0 == 100 * 0.01 * 2
    assert counted["top-k, 1 %"] < counted["int4"] < counted["PowerSGD"] < counted["int8"] < counted["all-reduce"]
    assert says(lesson, f"int4 sends {counted['int4'] / counted['all-reduce']:.2f} of an all-reduce's bytes")


def test_with_feedback_nothing_is_lost_and_adamw_makes_little_of_a_lump(lesson):
    assert lesson["lost"]["top-k"] < 1e-5 < 0.01 < lesson["lost"]["top-k, no feedback"]
    assert says(lesson, f"AdamW goes {lesson['lumps_go'] / 100:.0%} of the way")


def test_all_ways_are_timed_over_each_link(lesson):
    seconds = {way: list(map(float, of_links)) for way, of_links in lesson["seconds_to_target"].items()}
    best = min(seconds, key=lambda way: seconds[way][-1])
    assert best == lesson["first_at_10"] != "all-reduce" and seconds[best][-1] < seconds["all-reduce"][-1] / 2
    times = seconds["all-reduce"][-1] / seconds[best][-1]
    target = lesson["last_losses"]["all-reduce"] + 0.15
    assert says(lesson, f"At 10 Mbit/s {best} is first at {target:.2f} nats, {times:.0f} times as fast")
    assert {way: of_seeds[0] for way, of_seeds in lesson["seconds_by_seed"].items()} == {
        way: min(seconds[way][-1], 1e6) for way in ("LocalSGD", "LocalSGD, int4")
    }


def test_muon_wants_whole_matrices_and_three_designs_send_what_they_should(lesson):
    assert lesson["newton_schulz_off"] < 1e-5
    assert max(lesson["muon_off"].values()) == 0  # between two ranks sums have one order
    assert all(sent == formula for of_rank in lesson["muon_bytes"] for sent, formula in of_rank)
    assert lesson["muon_shares"] == {"replicated": 1, "gathered": 0.75, "by layers": 1}
    assert says(lesson, f"Muon of two halves is not Muon of the whole: {lesson['halves_largest']:.2f}")
