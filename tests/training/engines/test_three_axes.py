"""Data, pipeline and tensor parallelism at once, 2 × 2 × 2 on eight ranks: one process trains the same."""

from unittest import mock

import pytest

from course_lib.launching.launch import launch
from course_lib.lessons import parity
from course_lib.parallel import tensor_parallel
from course_lib.training.engines import pipeline

STEPS = 3
LAYOUT = {
    "training_type": "pipeline",
    "data_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "tensor_parallel_size": 2,
    "pipeline_chunks": 2,
}
CASES = {
    "1f1b": {"schedule": "1f1b", "model": "tiny-gpt2"},
    "zbv": {"schedule": "zbv", "model": "tiny-gpt2"},
    "llama": {"schedule": "1f1b", "model": "tiny-llama"},
}
LEFT_OUT = {
    "dp": mock.patch.object(pipeline, "average_gradients", lambda *_: None),
    "pp": mock.patch.object(pipeline, "sum_shared_gradients", lambda *_: None),
    "tp": mock.patch.object(tensor_parallel, "reduce", lambda hidden, _: hidden),
}


def on_the_grid(folder):
    layouts = {(case, "scratch"): LAYOUT | options for case, options in CASES.items()}
    found = dict(zip(CASES, parity.traces(folder, 8, layouts, max_steps=STEPS), strict=True))
    for axis, patch in LEFT_OUT.items():
        with patch:
            (found[f"without {axis}"],) = parity.traces(folder / axis, 8, {("1f1b", "scratch"): LAYOUT}, max_steps=1)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """By model, the plain loop."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        model: parity.trace(parity.task(folder / model, 1, training_type="basic", max_steps=STEPS, model=model))
        for model in {options["model"] for options in CASES.values()}
    }


@pytest.fixture(scope="module")
def grid(tmp_path_factory, plain):
    folder = tmp_path_factory.mktemp("grid")
    return launch(on_the_grid, folder, num_processes=8, timeout=560, device="cpu", stream=False)[0]


@pytest.mark.parametrize("axis", LEFT_OUT)
def test_without_an_axis_exchange_the_gradient_differs(grid, plain, axis):
    assert grid[f"without {axis}"].norms[0] != pytest.approx(plain["tiny-gpt2"].norms[0], rel=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_with_all_three_it_is_one_process(grid, plain, case):
    wanted = plain[CASES[case]["model"]]
    cell = parity.compare(grid[case], wanted, case, "scratch", 8)
    assert cell.agrees and cell.norm < 1e-4 and len(set(wanted.losses)) == STEPS, cell
