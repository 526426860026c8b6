"""Attention of models of transformers over rows whose tokens two ranks share: losses and gradients of one process."""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
)

from course_lib.errors import ConfigError, ModelError
from course_lib.launching.launch import launch
from course_lib.modeling import context
from course_lib.modeling.context import ATTENTION, METHODS, ContextParallel, check
from course_lib.training.loss import count_targets, summed_loss

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": ("causal_lm", lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=64))),
    "gpt2": (
        "causal_lm",
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
        ),
    ),
    "gpt_neox": ("causal_lm", lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, intermediate_size=64))),
    "olmoe": (
        "causal_lm",
        lambda: OlmoeForCausalLM(
            OlmoeConfig(
                **SIZES, intermediate_size=32, num_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1
            )
        ),
    ),
    "bert": (
        "masked_lm",
        lambda: BertForMaskedLM(
            BertConfig(**SIZES, intermediate_size=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        ),
    ),
}

ALIKE = ("mistral", "mixtral", "olmo", "olmo2", "qwen2", "qwen3")
"""Further model types whose attention is known, each in one way."""
MODELS |= {
    kind: (
        "causal_lm",
        functools.partial(
            lambda kind: AutoModelForCausalLM.from_config(
                AutoConfig.for_model(
                    kind, **SIZES, num_key_value_heads=2, intermediate_size=32, pad_token_id=0, eos_token_id=1
                )
            ),
            kind,
        ),
    )
    for kind in ALIKE
}


def made(name):
    torch.manual_seed(0)
    return MODELS[name][1]().train()


@functools.cache
def padded():
    """Three rows: one of 16 tokens, one of 11, one of 5, so that the second rank has none of the last one's."""
    ids, mask = torch.randint(1, 64, (3, 16), generator=torch.manual_seed(1)), torch.ones(3, 16, dtype=torch.long)
    mask[1, 11:], mask[2, 5:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def alone(name):
    """Loss and gradients of one process, by the model's own attention."""
    task, batch, model = MODELS[name][0], padded(), made(name)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = summed_loss(logits, batch["labels"], task) / count_targets(batch["labels"], task)
    loss.backward()
    return loss.item(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def difference(name, way, wanted, summed=True):
    """Of the two ranks' losses together, and of each gradient, from one process's: the largest."""
    task, batch, model = MODELS[name][0], padded(), made(name)
    sequences = ContextParallel(model, task, dist.group.WORLD, way)
    inputs, labels = sequences.cut(batch)
    loss = summed_loss(model(**inputs).logits, labels, sequences.scored_as)
    loss = loss / count_targets(batch["labels"], task)
    loss.backward()
    total, worst = loss.detach(), 0.0
    dist.all_reduce(total)
    for key, parameter in model.named_parameters():
        if key in wanted[1]:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if summed:
                dist.all_reduce(gradient)
            worst = max(worst, (gradient - wanted[1][key]).abs().max().item())
    return abs(total.item() - wanted[0]), worst


def refusals():
    said = {}
    for name, model, task in (
        ("dropout", BertForMaskedLM(BertConfig(**SIZES, intermediate_size=64)), "masked_lm"),
        (
            "unknown",
            DistilBertForMaskedLM(DistilBertConfig(vocab_size=64, dim=32, n_layers=1, n_heads=2, hidden_dim=32)),
            "masked_lm",
        ),
        ("one token", made("bert"), "classification"),
        (
            "heads",
            LlamaForCausalLM(LlamaConfig(**SIZES | {"num_attention_heads": 1}, num_key_value_heads=1)),
            "causal_lm",
        ),
    ):
        with pytest.raises((ConfigError, ModelError)) as error:
            ContextParallel(model, task, dist.group.WORLD, "ulysses")
        said[name] = str(error.value)
    return said


def every_difference():
    dist.init_process_group("gloo")
    found = {"refused": refusals()}
    for name in MODELS:
        wanted = alone(name)
        found |= {(name, way): difference(name, way, wanted) for way in (["zigzag"] if name in ALIKE else METHODS)}
    wanted = alone("llama")
    found["gradients not summed"] = difference("llama", "zigzag", wanted, summed=False)
    with (
        mock.patch.object(context, "next_tokens", lambda labels: labels),
        mock.patch.object(ContextParallel, "scored_as", "causal_lm"),
    ):  # each rank shifts its own part
        found["labels cut, then shifted"] = difference("llama", "ring", wanted)
    with mock.patch.object(
        context.SequenceLayout, "positions", lambda layout, rank, device: torch.arange(layout.length // layout.ranks)
    ):
        found["positions from 0"] = difference("llama", "ulysses", wanted)
    return found


@pytest.fixture(scope="module")
def found():
    return launch(every_difference, num_processes=2, timeout=400)[0]


def test_two_ranks_share_the_tokens_and_find_one_process_s_loss_and_gradients(found):
    of_models = {key: value for key, value in found.items() if isinstance(key, tuple)}
    assert set(MODELS) == set(ATTENTION) and len(of_models) == 5 * len(METHODS) + len(ALIKE) == 26
    assert {key: value for key, value in of_models.items() if max(value) > 1e-6} == {}


def test_without_each_part_of_it_the_comparison_would_notice(found):
    assert found["gradients not summed"][0] < 1e-6 < 1e-3 < found["gradients not summed"][1]
    assert min(found["labels cut, then shifted"]) > 1e-3 and min(found["positions from 0"]) > 1e-4


def test_what_would_not_be_computed_is_refused_in_one_line(found):
    said = found["refused"]
    assert all("\n" not in line for line in said.values()) and len(said) == 4
    assert "this model's is 0.1: give --attention_dropout 0" in said["dropout"]
    assert "does not know the attention of distilbert: use a model of type bert, gpt2," in said["unknown"]
    assert "classification reads one of a row" in said["one token"]
    assert "1 heads with 1 key heads do not divide among context_parallel_size 2" in said["heads"]


def test_heads_that_tensor_parallelism_has_shared_are_what_ulysses_can_deal():
    config = copy.copy(made("llama").config)  # 4 heads, 2 key heads
    check(config, "causal_lm", 2, "ulysses", tensor_ranks=2)
    with pytest.raises(ConfigError, match="2 heads with 1 key heads do not divide among context_parallel_size 4"):
        check(config, "causal_lm", 4, "ulysses", tensor_ranks=2)
