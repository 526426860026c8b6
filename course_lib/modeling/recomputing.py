"""Activations that are computed again in the backward pass, under both names that transformers has had for it."""

from typing import Any


def recompute_activations(model: Any) -> None:
    """Keep each block's input alone for the backward pass, which computes the rest again.

    Args:
        model: of transformers. Its method has this name since 5.23; the former one is an alias of it until 6.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
