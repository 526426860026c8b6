"""The loss as a sum over targets, so that any split of a batch adds up to the whole."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

IGNORE = -100  # the label of a position without a target (torch's default ignore_index)


CHUNK_BYTES = 64 * 2**20
"""How much of the logits of a vocabulary is there in float32 at a time."""


def shifted(labels: torch.Tensor, task: str) -> torch.Tensor:
    """The targets that the logits are scored against.

    In causal language modelling the logits at position t predict the token at t + 1, so the last
    logit has no target; elsewhere the labels are the targets.

    Args:
        labels: int64 [B] (classification) or [B, L].
        task: ``classification``, ``causal_lm`` or ``masked_lm``.
    """
    if task != "causal_lm":
        return labels
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


def count_targets(labels: torch.Tensor, task: str) -> torch.Tensor:
    """Number of targets in a batch, a scalar int64 tensor on the labels' device."""
    return (shifted(labels, task) != IGNORE).sum()


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, task: str, smoothing: float = 0.0) -> torch.Tensor:
    """Cross-entropy summed over all targets, a float32 scalar.

    Args:
        logits: [B, C] (classification) or [B, L, V], any float dtype.
        labels: int64 [B] or [B, L].
        task: as for :func:`shifted`.
        smoothing: share of each target that is spread over all classes or tokens (arXiv 1512.00567, section 7), as
            the Hugging Face Trainer's ``label_smoothing_factor``.
    """
    targets = shifted(labels, task).flatten()
    if task == "classification":
        return _summed(logits, targets, smoothing)
    return _InChunks.apply(logits.flatten(0, -2), targets, smoothing)


def loss_of_rows(logits: torch.Tensor, labels: torch.Tensor, task: str) -> torch.Tensor:
    """Cross-entropy and number of targets of each row.

    Returns:
        float32 [B, 2]: the row's summed loss (nats) and its count of targets.
    """
    targets = shifted(labels, task)
    by_target = torch.cat(
        [
            F.cross_entropy(part.float(), wanted, ignore_index=IGNORE, reduction="none")
            for part, wanted in _chunks(logits.flatten(0, -2), targets.flatten())
        ]
    )
    by_row = by_target.view(len(labels), -1).sum(-1)
    return torch.stack([by_row, (targets.view(len(labels), -1) != IGNORE).sum(-1).float()], dim=-1)


def _chunks(logits: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of some rows at a time of [N, V] logits, and of tensors as long."""
    rows = max(1, CHUNK_BYTES // (4 * logits.shape[-1]))
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


class _InChunks(torch.autograd.Function):
    """Summed cross-entropy of [N, V] logits and int64 [N] targets, in float32 a chunk of rows at a time.

    The gradient, in the logits' dtype, is the only other tensor of their size. ``F.cross_entropy`` of
    ``logits.float()`` has three such tensors in float32 at once: for 8 rows of 1,024 tokens and 50,000 words, 4.9 GB.
    torch's ``F.linear_cross_entropy`` would not even make the logits, but has to be given the head's weight, which FSDP
    and ZeRO-3 gather within the model's own forward alone.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.smoothing = smoothing
        return torch.stack([_summed(part, wanted, smoothing) for part, wanted in _chunks(logits, targets)]).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        by_logit = torch.empty_like(logits)
        for part, wanted, into in _chunks(logits, targets, by_logit):
            with torch.enable_grad():
                again = part.detach().requires_grad_()
                loss = _summed(again, wanted, ctx.smoothing)
            into.copy_(torch.autograd.grad(loss, again, gradient)[0])
        return by_logit, None, None


def _summed(logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
