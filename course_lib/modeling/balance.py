"""FLOPs of each unit of a model. dealing.py deals the units out to stages."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_flops(model: nn.Module, front: Sequence[str], blocks: Sequence[str], length: int) -> list[float]:
    """FLOPs of one sequence's forward: of the front, each block, and what comes after them.

    Matrix products and attention scores are counted, by running the model; lookups and sums are not.

    Args:
        model: takes ``input_ids``.
        front: names of the modules before the blocks.
        blocks: names of the blocks.
        length: tokens.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # others hide the scores
        _forward(model, length)
    counts = {name.partition(".")[2]: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    before, within = sum(counts.get(name, 0) for name in front), [float(counts[name]) for name in blocks]
    return [float(before), *within, counter.get_total_flops() - before - sum(within)]


def _forward(model: nn.Module, length: int) -> None:
    """One sequence of the same token, without gradients."""
    with torch.no_grad():
        model(input_ids=torch.ones(1, length, dtype=torch.long, device=next(model.parameters()).device))
