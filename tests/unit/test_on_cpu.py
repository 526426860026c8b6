"""Cheaper dropout draws the same distribution, and attention with it is attention."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from course_lib.training import on_cpu


@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3])
def test_dropout_keeps_the_mean_and_drops_the_share(p):
    torch.manual_seed(0)
    x = torch.full((1000, 1003), 2.0, requires_grad=True)  # a size that no word divides
    y = on_cpu.dropout(x, p)
    share = (y == 0).float().mean().item()
    assert share == pytest.approx(p, abs=0.002) and y.mean().item() == pytest.approx(2.0, abs=0.01)
    assert set(y.unique().tolist()) == {0.0, y.max().item()} and y.max().item() == pytest.approx(2 / (1 - p), rel=1e-4)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0), "the gradient passes where the value passed"


def test_it_follows_torchs_generator_and_is_off_in_evaluation():
    x = torch.ones(501)
    torch.manual_seed(3)
    first = on_cpu.dropout(x, 0.5)
    second = on_cpu.dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(on_cpu.dropout(x, 0.5), first) and not torch.equal(first, second)
    assert torch.equal(on_cpu.Dropout16(0.5).eval()(x), x) and torch.equal(on_cpu.Dropout16(0.0).train()(x), x)


def models():
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
             "vocab_size": 99}
    yield BertForSequenceClassification(BertConfig(**small))
    yield GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99, bos_token_id=0, eos_token_id=0))
    yield LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=2, attention_dropout=0.1))


@pytest.mark.parametrize("model", list(models()), ids=lambda model: type(model).__name__)
def test_a_model_computes_what_it_computed(model):
    ours = copy.deepcopy(model)
    on_cpu.cheaper_dropout(ours)
    assert not [m for m in ours.modules() if type(m) is nn.Dropout]
    assert ours.config._attn_implementation == on_cpu.NAME and model.config._attn_implementation == "sdpa"
    ids, mask = torch.randint(0, 99, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    for training in (False, True):
        for each in (model, ours):
            each.train(training)
            for module in each.modules():
                almost = 1e-6 if each is ours else 0.0  # ours drops nothing, and takes the path with dropout
                if isinstance(module, nn.Dropout):
                    module.p = almost
                if isinstance(getattr(module, "attention_dropout", None), float):
                    module.attention_dropout = almost
        wanted, got = (each(input_ids=ids, attention_mask=mask).logits for each in (model, ours))
        if wanted.ndim == 3:
            wanted, got = wanted[mask.bool()], got[mask.bool()]
        assert torch.allclose(wanted, got, atol=1e-6)
    for module in ours.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    assert not torch.allclose(ours(input_ids=ids).logits, ours(input_ids=ids).logits)


def test_words_are_splitmix64s(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "random_", lambda tensor, *_: tensor.fill_(1234567 + on_cpu._GOLDEN))
    # The published first values for the seed 1234567 (https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64).
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [word % 2**64 for word in on_cpu.random_words(5).tolist()] == wanted


def test_every_bit_of_the_words_is_fair_and_none_follows_another():
    torch.manual_seed(0)
    words = on_cpu.random_words(2**16)
    bits = torch.stack([words >> i & 1 for i in range(64)]).double()
    assert (bits.mean(1) - 0.5).abs().max() < 5 * 0.5 / 2**8
    assert (torch.corrcoef(bits) - torch.eye(64)).abs().max() < 6 / 2**8
    assert (torch.corrcoef(torch.stack([bits[:, :-1].flatten(), bits[:, 1:].flatten()]))[0, 1]).abs() < 5 / 2**11
