"""What the host needs to start a block's operations: counted on transformers' own blocks, and seen in a step's time."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, BertConfig, LlamaConfig

from course_lib.planning import cost, hardware, models, work
from course_lib.planning.plan import Plan

VIEWS = {"view", "_unsafe_view", "t", "transpose", "expand", "unsqueeze", "slice", "detach", "alias", "permute"}
VIEWS |= {"select", "as_strided", "squeeze", "reshape", "empty", "empty_like"}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


class CountOperations(TorchDispatchMode):
    """Operations that start a kernel on a GPU: all but views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.partition("::")[2] not in VIEWS
        return func(*args, **(kwargs or {}))


def counted(config):
    """Forward and backward of one block: what two layers have more than one."""
    found = []
    for layers in (1, 2):
        config.num_hidden_layers = layers
        model = AutoModel.from_config(config, attn_implementation="sdpa").train().bfloat16()
        with CountOperations() as forward:
            output = model(torch.ones(2, 16, dtype=torch.int64), use_cache=False).last_hidden_state
        with CountOperations() as backward:
            output.sum().backward()
        found.append((forward.count, backward.count))
    return [two - one for one, two in zip(*found, strict=True)]


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, num_key_value_heads=2),
        BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    ],
    ids=["llama", "bert"],
)
def test_operations_are_those_of_transformers_blocks(config):
    forward, backward = counted(config)
    model = models.from_config(config.to_dict())
    mine = work.operations(model, Plan(16, "fsdp", 3, precision="bf16"))
    assert mine[0] == pytest.approx(forward, rel=0.15) and mine[1] == pytest.approx(backward, rel=0.25)


def step(name, gpus=1, **plan):
    model, cluster = models.load(name), hardware.cluster("H100", gpus)
    return cost.estimate(model, Plan(**{"sequence_length": 512, "data": gpus // plan.get("tensor", 1)} | plan), cluster)


def test_a_small_model_with_one_row_waits_for_the_host_and_a_large_one_does_not():
    one, many = step("gpt2", micro_batch=1), step("gpt2", micro_batch=64)
    assert one.launch > one.compute and many.launch == 0
    assert one.step == pytest.approx(one.compute + one.launch + one.recompute + one.optimizer)
    assert many.tokens_per_second > 2 * one.tokens_per_second
    assert step("llama-70b", 64, engine="fsdp", stage=3, sequence_length=4096).launch == 0


def test_splitting_a_small_model_over_tensor_ranks_does_not_make_it_faster():
    whole, split = step("gpt2", 8, micro_batch=4), step("gpt2", 8, tensor=8, micro_batch=4, engine="megatron")
    assert split.compute < whole.compute / 4 and split.launch > split.compute
    assert split.step > whole.step / 2, "eight GPUs on one replica take more than half of the time of one"


def test_fused_operations_are_fewer_and_autocast_adds_casts():
    model = models.load("llama-8b")
    plain, fused = (
        work.operations(model, Plan(512, compiled=compiled, engine="fsdp", stage=3))[0] for compiled in (False, True)
    )
    assert fused < plain / 2
    assert work.operations(model, Plan(512))[0] - plain == 7 + 4, "a cast for each matmul, and two beside each norm"
