"""Data, pipeline and tensor parallelism at once, 2 × 2 × 2 on eight ranks: one process trains the same."""

from unittest import mock

import pytest

from course_lib.parallel import tensor_parallel
from course_lib.training.engines import pipeline
from tests.training.engines.layouts import agree, alone, on

STEPS = 3
LAYOUT = {
    "training_type": "pipeline",
    "data_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "tensor_parallel_size": 2,
    "pipeline_chunks": 2,
}
CASES = {
    "1f1b": LAYOUT | {"schedule": "1f1b", "model": "tiny-gpt2"},
    "zbv": LAYOUT | {"schedule": "zbv", "model": "tiny-gpt2"},
    "llama": LAYOUT | {"schedule": "1f1b", "model": "tiny-llama"},
}


@pytest.fixture(scope="module")
def plain(folder):
    """By model, the plain loop."""
    return {model: alone(folder / model, max_steps=STEPS, model=model) for model in ("tiny-gpt2", "tiny-llama")}


@pytest.mark.parametrize(
    ("place", "name", "without"),
    [
        (pipeline, "average_gradients", lambda *_: None),
        (pipeline, "sum_shared_gradients", lambda *_: None),
        (tensor_parallel, "reduce", lambda hidden, _: hidden),
    ],
    ids=["data", "pipeline", "tensor"],
)
def test_without_an_axis_exchange_the_gradient_differs(tmp_path, plain, place, name, without):
    with mock.patch.object(place, name, without):
        found = on(8, tmp_path, {"x": LAYOUT}, max_steps=1)["x"]
    assert found.norms[0] != pytest.approx(plain["tiny-gpt2"].norms[0], rel=1e-3)


def test_with_all_three_it_is_one_process(tmp_path, plain):
    for name, found in on(8, tmp_path, CASES, max_steps=STEPS).items():
        wanted = plain[CASES[name]["model"]]
        agree(found, wanted, relative_norm=1e-4 / max(wanted.norms))
        assert len(set(wanted.losses)) == STEPS
