"""Blocks that were compiled before an engine wrapped them: hooks still shard and reduce, and the losses are equal."""

import functools

import pytest
import torch

from course_lib.launching.launch import launch
from course_lib.lessons import parity
from tests.training.engines.test_strategies import run_pairs

pytestmark = pytest.mark.usefixtures("two_blocks")

PAIRS = [("ddp", "torch"), ("zero2", "scratch"), ("fsdp", "torch"), ("zero3", "scratch"), ("fsdp", "scratch")]
SOME = [("fsdp", "scratch")]
"""In `make test`; all are in `make long`."""


def compiled(folder, pairs):
    """Losses of each pair without and with compiled blocks; traced and differentiated, without Inductor's code."""
    graphs, real = [], torch.compile

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    torch.compile = functools.partial(real, backend=counting)
    options = {"max_steps": 2, "eval_steps": 0}
    plain = run_pairs(folder / "plain", 2, pairs, **options)
    none = len(graphs)
    found = run_pairs(folder / "compiled", 2, pairs, **options, torch_compile=True)
    again = {}
    if pairs == PAIRS:
        again = run_pairs(
            folder / "recomputed", 2, PAIRS[-1:], **options, torch_compile=True, activation_checkpointing=True
        )
    return plain, found, again, none, len(graphs)


@pytest.mark.parametrize("pairs", [SOME, pytest.param(PAIRS, marks=pytest.mark.long)], ids=["some", "all"])
def test_compiled_blocks_train_as_plain_ones_under_every_kind_of_engine(tmp_path, pairs):
    plain, found, again, none, graphs = launch(compiled, tmp_path, pairs, num_processes=2, timeout=1520)[0]
    assert len(found) == len(pairs) and none == 0 and graphs >= 1
    for pair, losses in found.items():
        assert losses == pytest.approx(plain[pair], abs=parity.LOSS_TOLERANCE) and len(losses) == 2
    for pair, losses in again.items():
        assert losses == pytest.approx(plain[pair], abs=parity.LOSS_TOLERANCE)
    assert len(again) == (pairs == PAIRS)
