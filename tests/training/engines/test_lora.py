"""Adapters by every strategy and engine: what one process trains, what moves, what stays on a rank, what is stored."""

from collections import Counter

import pytest
import torch

from course_lib.config import ModelConfig
from course_lib.lessons import parity
from course_lib.modeling import loading, lora, nf4
from course_lib.training.engines.compose import keep_low
from tests.forked_process import import_deepspeed

pytestmark = pytest.mark.usefixtures("two_blocks")

ADAPTERS = {"lora_r": 4, "learning_rate": 1e-2}


def tiny(name="tiny-gpt2", task="causal_lm"):
    return loading.load(ModelConfig(model=name), task, label_names=["no", "yes"], texts=["a b c d"] * 9, seed=0,
                        max_length=32).model


def test_frozen_weights_are_kept_in_the_low_precision_and_adapters_in_fp32():
    model = tiny()
    assert keep_low(model, "bf16") == frozenset() and model.dtype == torch.float32, "nothing is frozen for good here"
    nf4.quantize_linear(model, lora.linear_layers(model)[:1])
    lora.add_lora(model, 2)
    frozen = keep_low(model, "bf16")
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {model.get_parameter(name).dtype for name in frozen} == {torch.bfloat16, torch.uint8}
    assert "lm_head.weight" in frozen and "transformer.wte.weight" in frozen, "a tied weight under both names"


@pytest.mark.parametrize("world_size", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 4))])
def test_adapters_by_every_pair_are_those_of_one_process(tmp_path, world_size):
    import_deepspeed()
    cells = parity.matrix(tmp_path, (world_size,), steps=4, **ADAPTERS)
    assert Counter(cell.engine for cell in cells) == {"torch": 5, "scratch": 5, "deepspeed": 3}
    assert [cell for cell in cells if not cell.agrees] == []
