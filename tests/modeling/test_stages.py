"""Models cut into stages: chained, the stages compute what the model does, and each holds only its own."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import CONFIG_MAPPING, BertConfig, BertModel

from course_lib.errors import ConfigError
from course_lib.metering.meter import Meter
from course_lib.modeling.dealing import deal_out
from course_lib.modeling.stages import EMBEDDINGS, HEAD, cut, shared_weights, split_at, split_evenly
from testing import tiny_architectures
from tests.modeling.stage_cases import LENGTH, MODELS, batch, build, loss_sum

TIED = {"bert masked", "roberta causal", "distilbert masked", "gpt2 causal", "opt causal", "llama causal"}


def chained(stages, inputs):
    hidden = ()
    for stage in stages.values():
        hidden = (stage(*hidden, **inputs),)
    return hidden[0]


def assert_stages_in_turn_are_the_model(model, inputs, loss, counts, **bounds):
    """Logits and every gradient, with so many stages."""
    logits = model(**inputs).logits
    loss(logits).backward()
    wanted = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    for count in counts:
        model.zero_grad()
        output = chained(cut(model, split_evenly(model, count, by="parameters"), range(count)), inputs)
        assert_close(output, logits, **bounds)
        loss(output).backward()
        assert_close({name: p.grad for name, p in model.named_parameters()}, wanted, **bounds)


@pytest.mark.parametrize("name", MODELS)
def test_the_stages_in_turn_are_the_model(name):
    inputs, targets = batch(name)
    loss = functools.partial(loss_sum, targets=targets)
    assert_stages_in_turn_are_the_model(build(name), inputs, loss, (1, 3, 6), rtol=0, atol=0)


FOUND = {
    **dict.fromkeys(("gemma2", "gpt_neox", "gptj", "bloom", "falcon", "mixtral", "mamba", "qwen3"), "causal_lm"),
    **dict.fromkeys(("modernbert", "roformer", "deberta-v2", "mpnet", "camembert"), "masked_lm"),
    "albert": "classification",
}
"""Architectures whose layout a forward shows, all but two: a block that returns a tuple, positions within the encoder,
a table that all blocks read, one block that runs twice, masks by the kind of attention of each block."""


def mean_square(logits):
    return logits.square().mean()


def small(architecture, task):
    return tiny_architectures.build(CONFIG_MAPPING[architecture], task)


@pytest.mark.parametrize("architecture", FOUND)
def test_stages_by_structure_in_turn_are_the_model(architecture):
    model, inputs = small(architecture, FOUND[architecture]).eval(), tiny_architectures.batch()
    before = torch.get_rng_state()
    assert_stages_in_turn_are_the_model(model, inputs, mean_square, (2, 3), rtol=1e-5, atol=1e-6)
    assert torch.equal(before, torch.get_rng_state())
    assert not model.training and not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_each_stage_needs_the_mask_and_what_the_stage_before_sent(name):
    model, (inputs, _) = build(name), batch(name)
    stages = cut(model, split_evenly(model, 3, by="parameters"), range(3))
    sent = stages[0](**inputs)
    logits = stages[2](stages[1](sent, **inputs), **inputs)
    without = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    assert not torch.allclose(stages[1](sent, **without), stages[1](sent, **inputs))
    other = sent.flip(-1)  # a shift or a factor would be lost in layer norms
    assert not torch.allclose(stages[2](stages[1](other, **inputs), **inputs), logits, rtol=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_each_stage_holds_only_its_own_parameters(name):
    model = build(name)
    whole = {key: parameter.numel() for key, parameter in model.named_parameters(remove_duplicate=False)}
    split = split_evenly(model, 3, by="parameters")
    stages = cut(model, split, range(3))
    names = [set(dict(stage.model.named_parameters(remove_duplicate=False))) for stage in stages.values()]
    assert names[0] | names[1] | names[2] == set(whole)
    assert not names[0] & names[1] and not names[1] & names[2] and not names[0] & names[2]

    shared = shared_weights(model, split)
    assert (name in TIED) == (len(shared) == 1) and len(shared) <= 1
    for weights in shared:
        assert set(weights) == {0, 2}
        assert stages[0].get_parameter(weights[0]) is stages[2].get_parameter(weights[2])

    others = [weakref.ref(parameter) for key, parameter in model.named_parameters() if key not in names[1]]
    middle = stages[1]
    del model, stages
    gc.collect()
    assert others and all(reference() is None for reference in others)
    with Meter(middle) as meter:
        pass
    assert meter.resident["parameters"] == 4 * sum(whole[key] for key in names[1]) < 4 * sum(whole.values()) / 2


def test_a_split_spec_names_blocks():
    model = build("gpt2 causal")
    split = split_at(model, {"transformer.h.2": "beginning", "transformer.h.0": "end"})
    assert [split.units_of(stage) for stage in range(3)] == [
        (EMBEDDINGS, "transformer.h.0"),
        ("transformer.h.1",),
        ("transformer.h.2", "transformer.h.3", HEAD),
    ]
    ends = split_at(model, {"transformer.h.0": "beginning", "transformer.h.3": "end"})
    assert [ends.units_of(stage) for stage in (0, 2)] == [(EMBEDDINGS,), (HEAD,)]
    assert split_at(model, {}).stages == 1
    inputs, _ = batch("gpt2 causal")
    assert torch.equal(chained(cut(model, split, range(3)), inputs), model(**inputs).logits)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"transformer.h.1.attn": "end"}, r"at transformer\.h\.1\.attn: it lies within transformer\.h\.1: cut at"),
        ({"lm_head": "beginning"}, r"at lm_head: it is no block: cut at transformer\.h\.0 \(beginning\) to"),
        ({"transformer.h.4": "end"}, r"has no module transformer\.h\.4: did you mean `transformer\.h\.\d`"),
        ({"transformer.h.1": "middle"}, r"the split at transformer\.h\.1 is `middle`: choose from `beginning`, `end`"),
        ({"transformer.h.1": "end", "transformer.h.2": "beginning"}, r"h\.1 and transformer\.h\.2 are in one place"),
    ],
)
def test_a_split_spec_that_is_none(spec, message):
    with pytest.raises(ConfigError, match=message):
        split_at(build("gpt2 causal"), spec)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: small("t5", "classification"),
            "T5ForSequenceClassification cannot be cut into stages: it has several",
        ),
        (lambda: small("xlnet", "causal_lm"), "XLNetLMHeadModel cannot be cut into stages: in turn they don't compute"),
        (lambda: small("squeezebert", "masked_lm"), "SqueezeBertForMaskedLM .* does not call its blocks as modules"),
        (lambda: nn.Linear(2, 2), "Linear cannot be cut into stages: it is no model of transformers"),
        (
            lambda: BertModel(BertConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)),
            "BertModel cannot be cut into stages: it has no head",
        ),
    ],
)
def test_what_cannot_be_cut_says_why(model, message):
    with pytest.raises(ConfigError, match=message):
        split_evenly(model(), 2)


def test_too_many_stages_and_an_unknown_measure():
    with pytest.raises(ConfigError, match="7 stages from 6 units: take from 1 to 6"):
        split_evenly(build("bert"), 7)
    with pytest.raises(ConfigError, match="cannot balance by `luck`: choose from flops, parameters, blocks"):
        split_evenly(build("bert"), 2, by="luck")


def test_the_dearest_stage_costs_least():
    costs = [0, 1, 1, 1, 1, 3]
    for stages, cuts, dearest in ((1, (), 7), (2, (4,), 4), (3, (3, 5), 3)):
        dealt = deal_out(costs, stages)
        bounds = [0, *dealt, len(costs)]
        assert (dealt, max(sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))) == (cuts, dearest)
    assert deal_out([1.0] * 8, 4) == (2, 4, 6)  # of all with a dearest stage of 2 there is one
    assert deal_out([5, 1, 1, 1, 1], 3) == (1, 3)  # and of those with one of 5, the evenest


def test_flops_count_what_each_unit_computes():
    model = build("gpt2 causal")
    split = split_evenly(model, 3, by="flops", length=LENGTH)
    width, vocabulary = 16, 50
    block = 2 * LENGTH * 12 * width**2 + 2 * 2 * LENGTH**2 * width  # four projections and an MLP; the scores, twice
    assert split.costs == (0, block, block, block, block, 2 * LENGTH * width * vocabulary)
    assert split.excess == pytest.approx(max(split.stage_costs) / (sum(split.costs) / 3) - 1) and split.excess > 0.1
    assert "more than the mean" in str(split) and str(split).startswith("stage 0: embeddings to transformer.h.")


def test_parameters_count_a_tied_weight_where_it_is_held():
    model = build("gpt2 causal")
    costs = split_evenly(model, 2, by="parameters").costs
    assert sum(costs) == sum(parameter.numel() for parameter in model.parameters()) + model.lm_head.weight.numel()
