"""Masks made from what the host knows: the same to the bit as those that transformers makes by looking."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from course_lib.data.collating import Collator
from course_lib.modeling import inputs
from course_lib.modeling.inputs import padding_known

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
OF_GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "use_cache": False}
MODELS = {
    "bert": lambda **how: BertForMaskedLM(BertConfig(**SIZES, **how)),
    "gpt2": lambda **how: GPT2LMHeadModel(GPT2Config(**OF_GPT2, bos_token_id=0, eos_token_id=0, **how)),
    "llama": lambda **how: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, use_cache=False, **how)),
}


class Looks(TorchDispatchMode):
    """Counts what would wait for a GPU: an element that Python asks for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("lengths", [(7, 7, 7), (3, 7, 5)], ids=["unpadded", "padded"])
def test_the_same_to_the_bit_without_a_look(model, how, lengths):
    torch.manual_seed(0)
    net = MODELS[model](attn_implementation=how).train(False)
    batch = Collator("causal_lm", 0)([{"input_ids": list(range(5, 5 + length))} for length in lengths])
    results, looks = [], []
    for unpadded in (None, batch.unpadded):
        net.zero_grad()
        with padding_known(unpadded), Looks() as seen:
            logits = net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
        looks.append(seen.count)
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert looks[1] == 0
    assert looks[0] > 0 or (model, how) in {("gpt2", "eager"), ("llama", "eager")}, "nothing to cure"


def test_a_wrong_word_shows():
    """The word is taken: rows that are said to have no padding are read with it."""
    net = MODELS["bert"](attn_implementation="sdpa").train(False)
    batch = Collator("causal_lm", 0)([{"input_ids": list(range(5, 5 + length))} for length in (3, 7)])
    logits = []
    for unpadded in (batch.unpadded, (True, True)):
        with padding_known(unpadded), torch.no_grad():
            logits.append(net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits)
    assert batch.unpadded == (False, True)
    assert not torch.allclose(logits[0][0, :3], logits[1][0, :3]) and torch.allclose(logits[0][1], logits[1][1])


def test_what_is_known_ends_with_the_block():
    with contextlib.suppress(KeyError), padding_known((True,)):
        with padding_known((True, False)):
            assert inputs._current.has_padding is True
        assert inputs._current.has_padding is False
        raise KeyError
    assert inputs._current.has_padding is None
