"""What lesson 18 claims, measured anew: waits, DiLoCo beside one process, bytes, feedback, links, Muon's designs."""

import pytest

from course_lib.parallel.communication.hooks import all_reduce_bytes
from tests.notebooks.conftest import says


@pytest.fixture(scope="module")
def lesson(run_lesson):
    return run_lesson("18_talking_less", device="auto", world_size=2, steps=12, sync_every=4, long=48)


def test_a_step_waits_for_a_slow_link(lesson):
    wait = 0.05 + all_reduce_bytes(4 * 120_576, 2) / 1.25e6
    assert lesson["waiting_share"] == round(100 * wait / (0.02 + wait), 1) > 90
    assert says(lesson, f"and {1000 * wait:.0f} ms at 10 Mbit/s")


def test_diloco_at_h_1_is_one_process_and_its_sign_matters(lesson):
    assert lesson["diloco_at_one_off"] < 1e-5 and lesson["sign_flipped"] == "it rises"
    off = lesson["libraries_off"]
    assert list(off) == ["library's DiLoCo", "torch's LocalSGD"] and max(off.values()) < 1e-5
    assert says(lesson, "at H = 1 it is one process with Nesterov")


def test_bytes_are_the_formula_and_torchs_hook_sends_as_many(lesson):
    counted = lesson["bytes_counted"]
    assert counted == lesson["bytes_by_formula"] and len(counted) == 5
    assert lesson["torchs_bytes_over_ours"] == 1 and lesson["top_k_share"] == 2.0 == 100 * 0.01 * 2
    assert counted["top-k, 1 %"] < counted["int4"] < counted["PowerSGD"] < counted["int8"] < counted["all-reduce"]
    assert says(lesson, f"int4 sends {counted['int4'] / counted['all-reduce']:.2f} of an all-reduce's bytes")


def test_with_feedback_nothing_is_lost_and_more_of_the_elements_travel(lesson):
    assert lesson["lost"]["top-k"] < 1e-5 < 0.01 < lesson["lost"]["top-k, no feedback"]
    assert 1 <= lesson["ever_sent"] < lesson["ever_sent_with_feedback"] < 13
    assert says(lesson, f"{100 - lesson['ever_sent']:.0f} % of the elements were never sent")


def test_over_the_slow_link_another_way_is_first(lesson):
    seconds = {way: list(map(float, of_links)) for way, of_links in lesson["seconds_to_target"].items()}
    assert len(seconds) == 6 and len(lesson["last_losses"]) == 6
    best = min(seconds, key=lambda way: seconds[way][-1])
    assert best == lesson["first_at_10"] != "all-reduce" and seconds[best][-1] < seconds["all-reduce"][-1] / 2
    assert says(lesson, f"at 10 Mbit/s {best}, {seconds['all-reduce'][-1] / seconds[best][-1]:.0f} times as fast")


def test_muon_wants_whole_matrices_and_three_designs_send_what_they_should(lesson):
    assert lesson["newton_schulz_off"] < 1e-5
    assert lesson["halves_largest"] > 1.2 * lesson["whole_largest"] and lesson["whole_largest"] < 1.2
    assert max(lesson["muon_off"].values()) == 0  # between two ranks sums have one order
    assert all(sent == formula for of_rank in lesson["muon_bytes"] for sent, formula in of_rank)
    assert lesson["muon_shares"] == {"replicated": 1, "gathered": 0.75, "by layers": 1}
    assert says(lesson, f"Muon of two halves is not Muon of the whole: {lesson['halves_largest']:.2f}")
