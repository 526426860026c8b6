"""What lesson 03 says beside its claims (tests/notebooks/claims): steps, files, warnings, and the errors it quotes."""

import pytest
import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.state import AcceleratorState
from torch import nn

from course_lib.launching.launch import RankError, launch
from tests.notebooks.conftest import assert_quoted

# Two epochs: the order of the second counts too.
PARAMETERS = {"device": "auto", "world_size": 2, "steps": 8}


def test_the_curves_and_the_saved_state(lesson):
    assert lesson["loss_first_and_last"][0] == pytest.approx(1.1, abs=0.1), "three classes: about ln 3"
    assert lesson["rows_tested"] == 8 * 4 * 2 and lesson["makers"] == 1


def test_processes(lesson):
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


@pytest.mark.parametrize("provoke", [ask_the_wrapper, two_steps_with_an_unused_layer, launch_after_an_accelerator])
def test_the_errors_it_quotes_are_real(provoke):
    with pytest.raises((RankError, ValueError)) as caught:
        provoke() if provoke is launch_after_an_accelerator else launch(provoke, device="cpu", timeout=240)
    error = caught.value.cause if isinstance(caught.value, RankError) else caught.value
    assert_quoted("03_accelerate", f"{type(error).__name__}: {error}")
