"""Looks at what a model of transformers does with a few tokens, and leaves no trace in it."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

TOKENS = 8
"""Of the row that a model is looked at with."""


def probe_row(model: nn.Module) -> dict[str, Tensor]:
    """One row, (1, TOKENS), on the model's device, without padding; its last token is where T5 and BART answer."""
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    ids = torch.arange(5, 5 + TOKENS, device=next(model.parameters()).device)[None] % config.vocab_size
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int):
        ids[0, -1] = end
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Without dropout; afterwards each module's mode and torch's random states are as before."""
    was = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            for module, training in was.items():
                module.training = training
