"""Adapters by every strategy and engine: what one process trains, what moves, what stays on a rank, what is stored."""

from collections import Counter

import pytest
import torch

from course_lib.config import ModelConfig
from course_lib.lessons import parity
from course_lib.modeling import loading, lora, nf4
from course_lib.training.engines.compose import keep_low
from tests.forked_process import import_deepspeed
from tests.training.engines.layouts import agree, alone, on

pytestmark = pytest.mark.usefixtures("two_blocks")

ADAPTERS = {"lora_r": 4, "learning_rate": 1e-2}
STRATEGIES = {pair: parity.ROWS[pair] for pair in parity.PAIRS}


def tiny(name="tiny-gpt2", task="causal_lm"):
    return loading.load(
        ModelConfig(model=name), task, label_names=["no", "yes"], texts=["a b c d"] * 9, seed=0, max_length=32
    ).model


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
    cells = parity.matrix(tmp_path, (world_size,), STRATEGIES, steps=4, **ADAPTERS)
    assert Counter(cell.engine for cell in cells) == {"torch": 5, "scratch": 5, "deepspeed": 3}
    assert [cell for cell in cells if not cell.agrees] == []


def test_adapters_beside_four_bits_are_those_of_one_process(tmp_path):
    """Packed bytes are replicated under ddp and ZeRO-1 and 2, and sharded and gathered under ZeRO-3 and FSDP."""
    rows = {row: options for row, options in STRATEGIES.items() if row[1] != "deepspeed"}
    cells = parity.matrix(tmp_path, (2,), rows, steps=3, load_in_4bit=True, **ADAPTERS)
    assert len(cells) == 10 and [cell for cell in cells if not cell.agrees] == []
    plain, packed = (
        alone(tmp_path / f"packed-{four}", max_steps=3, load_in_4bit=four, **ADAPTERS) for four in (False, True)
    )
    assert 1e-5 < max(abs(a - b) for a, b in zip(plain.losses, packed.losses, strict=True)) < 0.1


def test_adapters_beside_bf16_by_engines(tmp_path):
    """Rounding differs by engine; that weights beside the adapters are of 16 bits and these of 32 does not."""
    import_deepspeed()
    options = {"max_steps": 3, "mixed_precision": "bf16", **ADAPTERS}
    one = alone(tmp_path / "one", **options)
    rows = {"-".join(row): layout for row, layout in STRATEGIES.items() if row[0] != "zero1"}
    for deepspeed in (True, False):  # it takes the whole process to itself
        cases = {name: layout for name, layout in rows.items() if (layout["engine"] == "deepspeed") == deepspeed}
        for name, run in on(2, tmp_path, cases, **options).items():
            assert run.losses == pytest.approx(one.losses, abs=0.03), name
            assert {tensor.dtype for tensor in run.weights.values()} == {torch.float32}, name


def test_ranks_that_share_tokens_train_the_same_adapters(tmp_path):
    options = {"max_steps": 3, "context_parallel_size": 2, **ADAPTERS}
    cases = {
        "ddp": {"engine": "torch", "context_parallel": "zigzag"},
        "fsdp": {"strategy": "fsdp", "engine": "scratch", "context_parallel": "ring"},
    }
    one = alone(tmp_path / "one", max_steps=3, **ADAPTERS)
    for found in on(2, tmp_path, cases, **options).values():
        agree(found, one)
