"""Lesson 01: what a step holds, where its time goes, what padding and naive accumulation do, and a resumed run."""

import pytest

from course_lib.modeling.presets import TINY
from tests.narrow_presets import narrow_presets  # noqa: F401
from tests.notebooks.conftest import says, stored

STEPS, ROWS, LENGTH = 12, 16, 64


PARAMETERS = {
    "model": "tiny-bert",
    "steps": STEPS,
    "batch_size": ROWS,
    "length": LENGTH,
    "micro_batches": 4,
    "world_size": 2,
}


def test_the_loop_from_scratch_is_the_trainers(lesson):
    assert lesson["largest_difference_of_losses"] < 1e-5
    assert lesson["gradient_without_zero_grad"] == pytest.approx(2, rel=1e-4)


def test_16_bytes_per_parameter_to_the_byte_and_activations_at_the_peak(lesson):
    assert lesson["optimizer_state_bytes"] == 2 * lesson["parameter_bytes"] + lesson["bytes_over_8P"]
    assert lesson["peak_bytes"] == pytest.approx(3 * lesson["parameter_bytes"] + lesson["activation_bytes"], rel=1e-4)


def test_activations_by_the_papers_formula_and_by_the_corrected_one(lesson):
    sizes = TINY["tiny-bert"].sizes
    layers, width, heads = (sizes[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    tokens = layers * ROWS * LENGTH
    paper = tokens * (66 * width + 9 * heads * LENGTH)
    assert 1.1 < lesson["activation_bytes"] / paper < 1.25
    assert lesson["own_meter_over_the_librarys"] == 1, "the hooks on the page count what the library's do"
    assert 1.0 < lesson["activation_bytes_without_dropout"] / (tokens * 64 * width) < 1.06


def test_it_says_how_long_the_phases_took(lesson):
    assert min(lesson["forward_ms"], lesson["matmul_rate"], lesson["backward_over_forward"]) > 0
    assert [len(tries) for tries in lesson["backward_over_forward_turns"].values()] == [8, 8]
    assert says(
        lesson,
        f"Here it was {lesson['backward_over_forward_with_dropout']:.2f} with dropout and "
        f"{lesson['backward_over_forward_without_dropout']:.2f} without it, so ",
    )


def test_padding_is_counted_and_what_it_cost_is_said(lesson):
    assert lesson["padding in random batches"] > 0.4 > 0.25 > lesson["padding grouped by length"]
    assert lesson["tokens"]["random"] > 1.3 * lesson["tokens"]["grouped"] and lesson["random_over_grouped_seconds"] > 0
    saved, optimizer = lesson["padding_seconds_that_grouping_saves"], lesson["optimizer_seconds"]
    assert says(
        lesson,
        f"costs {saved:.2f} s per 100 rows on this machine, "
        f"{'more' if saved > optimizer else 'less'} than the optimizer's {optimizer:.2f} s.",
    )


def test_the_committed_run_learned():
    """MiniLM's; twelve steps of a tiny model from scratch teach it nothing yet."""
    committed = stored("01_basic_loop")
    assert committed["loss_of_the_last_five_steps"] < committed["loss_of_the_first_five_steps"] - 0.1
