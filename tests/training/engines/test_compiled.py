"""Blocks that were compiled before an engine wrapped them: hooks still shard and reduce, and the losses are equal."""

import functools

import pytest
import torch
from torch.testing import assert_close

from course_lib.lessons import parity
from tests.training.engines.layouts import runs

pytestmark = pytest.mark.usefixtures("two_blocks")

PAIRS = [("ddp", "torch"), ("zero2", "scratch"), ("fsdp", "torch"), ("zero3", "scratch"), ("fsdp", "scratch")]


def compiled(folder, pairs):
    """Losses of each pair without and with compiled blocks; traced and differentiated, without Inductor's code."""
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    torch.compile = functools.partial(torch.compile, backend=counting)
    cases = {"-".join(pair): parity.ROWS[pair] | {"max_steps": 2} for pair in pairs}
    if pairs == PAIRS:
        cases["recomputed"] = cases["fsdp-scratch"] | {"activation_checkpointing": True}
    plain = runs(folder / "plain", cases)
    assert graphs == []
    found = runs(folder / "compiled", cases, torch_compile=True)
    assert graphs
    return {name: trace.losses for name, trace in plain.items()}, {name: trace.losses for name, trace in found.items()}


@pytest.mark.parametrize("pairs", [PAIRS[-1:], pytest.param(PAIRS, marks=pytest.mark.long)], ids=["some", "all"])
def test_compiled_blocks_train_as_plain_ones_under_every_kind_of_engine(tmp_path, ranks, pairs):
    plain, found = ranks(2, timeout=1520)(compiled, tmp_path, pairs)[0]
    assert_close(found, plain, rtol=0, atol=parity.LOSS_TOLERANCE)
