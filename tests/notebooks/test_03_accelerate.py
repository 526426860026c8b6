"""What lesson 03 claims, measured anew: objects, rows, gradients, curves, all-reduces, processes."""

import nbformat
import pytest
import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.state import AcceleratorState
from torch import nn

from course_lib.launching.launch import RankError, launch
from tests.notebooks.conftest import NOTEBOOKS, says


@pytest.fixture(scope="module")
def lesson(run_lesson):
    # Two epochs: the order of the second counts too.
    return run_lesson("03_accelerate", device="auto", world_size=2, steps=8)


def test_the_five_lines(lesson):
    assert lesson["rows_computed"] == 16 and lesson["rows_gathered"] == 10
    assert lesson["replaced_without_a_launcher"] == 3
    assert lesson["replaced_on_one_rank"] == lesson["replaced_on_several"] == 4
    assert lesson["weights_are_the_same_objects"]


def test_rows(lesson):
    assert [lesson[f"rows_per_rank_{n}"] for n in (1, 2, 4)] == [8, 4, 2]
    assert lesson["shared_rows_unprepared"] == 1, "without prepare the ranks read the same rows"
    assert lesson["shared_rows_prepared"] == 0 and lesson["same_global_batch"]


def test_gradients(lesson):
    assert lesson["spread_without_averaging"] == pytest.approx(2e-3, rel=0.02), "twice the learning rate"
    assert lesson["spread_averaged_by_hand"] == lesson["spread_with_prepare"] == 0
    assert lesson["by_hand_against_prepare"] < 1e-6


def test_one_curve_on_1_2_and_4_ranks(lesson):
    assert lesson["difference_same_batch_size"] > 1e-2, "another global batch is another training"
    assert lesson["loss_difference"] < 1e-5
    assert says(lesson, f"1, 2 and 4 ranks gave one loss curve, to within {lesson['loss_difference']:.1g} nats")
    assert (lesson["steps_per_epoch_same_global_batch"], lesson["steps_per_epoch_same_batch_size"]) == (4, 2)
    assert lesson["loss_first_and_last"][0] == pytest.approx(1.1, abs=0.1), "three classes: about ln 3"
    assert lesson["speed_up"] > 0


def test_no_sync(lesson):
    assert lesson["gradients_sent_per_step_broken"] == 4 and lesson["gradients_sent_per_step"] == 1
    calls, sizes = lesson["all_reduces_in_three_steps"], lesson["megabytes_by_all_reduce"]
    assert calls["broken"] > 3 * calls["no_sync"]
    assert sizes[0] == pytest.approx(lesson["gradient_megabytes"], abs=0.1), "one bucket in the first backward"
    assert len(sizes) > 3, "several buckets afterwards"
    assert lesson["weights_after_accumulation_differ_by"] < 1e-5


def test_the_script_of_every_day(lesson):
    assert lesson["weights_in_bf16_training"] == "float32", "autocast leaves the weights as they are"
    assert lesson["moves"] == 4 and lesson["makers"] == 1 and lesson["resumed_apart"] == 0
    assert lesson["rows_tested"] == 8 * 4 * 2, "each row once, in batches of three"
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"} <= set(
        lesson["files_of_the_state"])
    assert says(lesson, "moved the weights 4 times in 8 turns")


def test_processes(lesson):
    assert lesson["processes_with_cpu_flag"] == 1, "the trap"
    assert lesson["processes_with_multi_gpu"] == 2
    assert "The following values were not passed to `accelerate launch`" in lesson["warning"]
    assert "--num_machines" in lesson["warning"] and "--num_processes" not in lesson["warning"], "about other options"
    assert (lesson["starts_itself"], lesson["starts_itself_when_launched"]) == (2, 0)


class Half(nn.Module):
    """Has a config, as models of transformers do, and a layer that the loss does not see."""

    config = "mine"

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def ask_the_wrapper():
    return Accelerator().prepare(Half()).config


def two_steps_with_an_unused_layer():
    accelerator = Accelerator()
    model = accelerator.prepare(Half())
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())


def launch_after_an_accelerator():
    Accelerator(cpu=True)
    try:
        notebook_launcher(print, num_processes=2)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("provoke", [
    lambda: launch(ask_the_wrapper, device="cpu", timeout=240),
    lambda: launch(two_steps_with_an_unused_layer, device="cpu", timeout=240),
    launch_after_an_accelerator,
], ids=["wrapped", "unused", "notebook"])
def test_the_errors_it_quotes_are_real(provoke):
    with pytest.raises((RankError, ValueError)) as caught:
        provoke()
    error = caught.value.cause if isinstance(caught.value, RankError) else caught.value
    quoted = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
    cells = nbformat.read(NOTEBOOKS / "03_accelerate.ipynb", as_version=4).cells
    prose = " ".join(" ".join(cell.source for cell in cells if cell.cell_type == "markdown").split())
    assert quoted in prose
