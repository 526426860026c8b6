"""Lesson 01: what a step holds, where its time goes, what padding and naive accumulation do, and a resumed run."""

import pytest

from course_lib.lessons.notebook import recorded
from course_lib.modeling.presets import TINY
from tests.narrow_presets import narrow_presets  # noqa: F401
from tests.notebooks.conftest import NOTEBOOKS, says

STEPS, ROWS, LENGTH = 12, 16, 64


@pytest.fixture(scope="module")
def values(run_lesson):
    return run_lesson(
        "01_basic_loop", model="tiny-bert", steps=STEPS, batch_size=ROWS, length=LENGTH, micro_batches=4, world_size=2
    )


def test_the_loop_from_scratch_is_the_trainers(values):
    assert values["largest_difference_of_losses"] < 1e-5
    assert values["gradient_without_zero_grad"] == pytest.approx(2, rel=1e-4)


def test_16_bytes_per_parameter_to_the_byte(values):
    assert values["optimizer_state_bytes"] == 2 * values["parameter_bytes"] + values["bytes_over_8P"]


def test_activations_by_the_papers_formula_and_by_the_corrected_one(values):
    sizes = TINY["tiny-bert"].sizes
    layers, width, heads = (sizes[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    tokens = layers * ROWS * LENGTH
    paper = tokens * (66 * width + 9 * heads * LENGTH)
    assert 1.1 < values["activation_bytes"] / paper < 1.25
    assert values["own_meter_over_the_librarys"] == 1, "the hooks on the page count what the library's do"
    assert 1.0 < values["activation_bytes_without_dropout"] / (tokens * 64 * width) < 1.06


def test_the_peak_is_weights_states_and_activations(values):
    assert values["peak_bytes"] == pytest.approx(3 * values["parameter_bytes"] + values["activation_bytes"], rel=1e-4)


def test_it_says_how_long_the_phases_took(values):
    assert min(values["forward_ms"], values["matmul_rate"], values["backward_over_forward"]) > 0
    assert [len(tries) for tries in values["backward_over_forward_turns"].values()] == [8, 8]
    assert says(
        values,
        f"Here it was {values['backward_over_forward_with_dropout']:.2f} with dropout and "
        f"{values['backward_over_forward_without_dropout']:.2f} without it, so ",
    )


def test_padding_is_counted_and_what_it_cost_is_said(values):
    assert values["padding in random batches"] > 0.4 > 0.25 > values["padding grouped by length"]
    assert values["tokens"]["random"] > 1.3 * values["tokens"]["grouped"] and values["random_over_grouped_seconds"] > 0
    saved, optimizer = values["padding_seconds_that_grouping_saves"], values["optimizer_seconds"]
    assert says(
        values,
        f"costs {saved:.2f} s per 100 rows on this machine, "
        f"{'more' if saved > optimizer else 'less'} than the optimizer's {optimizer:.2f} s.",
    )


def test_the_committed_run_learned():
    """MiniLM's; twelve steps of a tiny model from scratch teach it nothing yet."""
    committed = recorded(NOTEBOOKS / "01_basic_loop.ipynb")
    assert committed["loss_of_the_last_five_steps"] < committed["loss_of_the_first_five_steps"] - 0.1
