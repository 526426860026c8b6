"""The GPT-2 that the labs train: small, without dropout, and with the same weights wherever it is built."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2_config(
    layers: int, width: int, tokens: int, vocabulary: int, *, heads: int = 4, dropout: float = 0.0, **others: Any
) -> GPT2Config:
    """Config of a GPT-2 whose runs can be compared.

    Args:
        layers: number of blocks.
        width: of the hidden state.
        tokens: the most in a row.
        vocabulary: number of tokens.
        heads: of attention; they divide the width.
        dropout: probability, wherever GPT-2 has dropout.
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


def gpt2(layers: int, width: int, tokens: int, vocabulary: int, *, seed: int = 0, **others: Any) -> GPT2LMHeadModel:
    """GPT-2 with the same weights on every call and every rank, on the CPU; it seeds torch.

    The other arguments are those of :func:`gpt2_config`.
    """
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(gpt2_config(layers, width, tokens, vocabulary, **others))
    model.loss_type = "ForCausalLM"  # the library finds it by the class's name, and not this one's
    return model


def affine_chains(rows: int, tokens: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Rows that a model can learn, int64 [rows, tokens]: an affine map continues each from its first token."""
    ids = [torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))]
    for _ in range(tokens - 1):
        ids.append((5 * ids[-1] + 3) % vocabulary)
    return torch.stack(ids, dim=1)
