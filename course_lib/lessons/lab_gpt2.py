"""The GPT-2 that the labs train: small, without dropout, and with the same weights wherever it is built."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2_config(
    layers: int, width: int, tokens: int, vocabulary: int, *, heads: int = 4, dropout: float = 0.0, **others: Any
) -> GPT2Config:
    """Of a GPT-2 whose runs can be compared.

    Args:
        layers: blocks.
        width: of the hidden state.
        tokens: the most in a row.
        vocabulary: how many tokens there are.
        heads: they divide the width.
        dropout: everywhere where there is any.
        **others: fields of ``GPT2Config``.
    """
    return GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_positions=tokens,
        vocab_size=vocabulary,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        **others,
    )


def gpt2(layers: int, width: int, tokens: int, vocabulary: int, **others: Any) -> GPT2LMHeadModel:
    """The same weights on every call and every rank, on the CPU; it seeds torch with 0.

    The arguments are those of :func:`gpt2_config`.
    """
    torch.manual_seed(0)
    model = GPT2LMHeadModel(gpt2_config(layers, width, tokens, vocabulary, **others))
    model.loss_type = "ForCausalLM"  # the library finds it by the class's name, and not this one's
    return model
