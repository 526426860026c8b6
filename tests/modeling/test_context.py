"""Attention of models of transformers over rows whose tokens two ranks share: losses and gradients of one process."""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from course_lib.errors import ConfigError, ModelError
from course_lib.modeling import context
from course_lib.modeling.context import ATTENTION, METHODS, ContextParallel, check
from course_lib.training.loss import count_targets, summed_loss
from tests.ranks import on_ranks

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = SIZES | {"intermediate_size": 64}
OF_BERT = DENSE | {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
GROUPED = SIZES | {"num_key_value_heads": 2, "intermediate_size": 32, "pad_token_id": 0, "eos_token_id": 1}
ALIKE = ("mistral", "mixtral", "olmo", "olmo2", "qwen2", "qwen3")
"""Model types whose attention is known in one way each; of the others every way is tried."""
MODELS = {
    "llama": DENSE | {"num_key_value_heads": 2},
    "gpt2": {**SIZES, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0},
    "gpt_neox": DENSE,
    "olmoe": GROUPED | {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    "bert": OF_BERT,
    **dict.fromkeys(ALIKE, GROUPED),
}


def task_of(name):
    return "masked_lm" if "bert" in name else "causal_lm"


def made(name, **changed):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **MODELS.get(name, {}) | changed)
    return (AutoModelForMaskedLM if "bert" in name else AutoModelForCausalLM).from_config(config).train()


@functools.cache
def padded():
    """Three rows: one of 16 tokens, one of 11, one of 5, so that the second rank has none of the last one's."""
    ids, mask = torch.randint(1, 64, (3, 16), generator=torch.manual_seed(1)), torch.ones(3, 16, dtype=torch.long)
    mask[1, 11:], mask[2, 5:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


@functools.cache
def alone(name):
    """Loss and gradients of one process, by the model's own attention."""
    task, batch, model = task_of(name), padded(), made(name)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = summed_loss(logits, batch["labels"], task) / count_targets(batch["labels"], task)
    loss.backward()
    return loss.item(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def difference(name, way, summed=True):
    """Of the two ranks' losses together, and of each gradient, from one process's: the largest."""
    task, batch, model = task_of(name), padded(), made(name)
    wanted_loss, wanted = alone(name)
    sequences = ContextParallel(model, task, dist.group.WORLD, way)
    inputs, labels = sequences.cut(batch)
    loss = summed_loss(model(**inputs).logits, labels, sequences.scored_as)
    loss = loss / count_targets(batch["labels"], task)
    loss.backward()
    total, worst = loss.detach(), 0.0
    dist.all_reduce(total)
    for key, parameter in model.named_parameters():
        if key in wanted:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if summed:
                dist.all_reduce(gradient)
            worst = max(worst, (gradient - wanted[key]).abs().max().item())
    return abs(total.item() - wanted_loss), worst


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_two_ranks_share_the_tokens_and_find_one_process_s_loss_and_gradients(name):
    for way in ["zigzag"] if name in ALIKE else METHODS:
        assert max(difference(name, way)) < 1e-6, way


def test_every_model_whose_attention_is_known_is_tried():
    assert set(MODELS) == set(ATTENTION)


@on_ranks(2)
def test_without_each_part_of_it_the_comparison_would_notice():
    loss, gradients = difference("llama", "zigzag", summed=False)
    assert loss < 1e-6 < 1e-3 < gradients
    with (
        mock.patch.object(context, "next_tokens", lambda labels: labels),
        mock.patch.object(ContextParallel, "scored_as", "causal_lm"),
    ):  # each rank shifts its own part
        assert min(difference("llama", "ring")) > 1e-3

    def from_zero(layout, rank, device):
        return torch.arange(layout.length // layout.ranks)

    with mock.patch.object(context.SequenceLayout, "positions", from_zero):
        assert min(difference("llama", "ulysses")) > 1e-4


ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
SMALL_DISTILBERT = {"vocab_size": 64, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}


@pytest.mark.parametrize(
    ("name", "changed", "task", "says"),
    [
        ("bert", {"attention_probs_dropout_prob": 0.1}, "masked_lm", "model's is 0.1: give --attention_dropout 0"),
        ("distilbert", SMALL_DISTILBERT, "masked_lm", "does not know the attention of distilbert: use a model of"),
        ("bert", {}, "classification", "classification reads one of a row"),
        ("llama", ONE_HEAD, "causal_lm", "1 heads with 1 key heads do not divide among context_parallel_size 2"),
    ],
)
@on_ranks(2)
def test_what_would_not_be_computed_is_refused(name, changed, task, says):
    with pytest.raises((ConfigError, ModelError), match=says):
        ContextParallel(made(name, **changed), task, dist.group.WORLD, "ulysses")


def test_heads_that_tensor_parallelism_has_shared_are_what_ulysses_can_deal():
    config = copy.copy(made("llama").config)  # 4 heads, 2 key heads
    check(config, "causal_lm", 2, "ulysses", tensor_ranks=2)
    with pytest.raises(ConfigError, match="2 heads with 1 key heads do not divide among context_parallel_size 4"):
        check(config, "causal_lm", 4, "ulysses", tensor_ranks=2)
