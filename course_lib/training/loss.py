"""The loss as a sum over targets, so that any split of a batch adds up to the whole."""

import torch
import torch.nn.functional as F

IGNORE = -100  # the label of a position without a target (torch's default ignore_index)


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


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, task: str) -> torch.Tensor:
    """Cross-entropy summed over all targets, a float32 scalar.

    Args:
        logits: [B, C] (classification) or [B, L, V], any float dtype.
        labels: int64 [B] or [B, L].
    """
    targets = shifted(labels, task)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def loss_of_rows(logits: torch.Tensor, labels: torch.Tensor, task: str) -> torch.Tensor:
    """Cross-entropy and number of targets of each row.

    Returns:
        float32 [B, 2]: the row's summed loss (nats) and its count of targets.
    """
    targets = shifted(labels, task)
    each = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="none")
    by_row = each.view(len(labels), -1).sum(-1)
    return torch.stack([by_row, (targets.view(len(labels), -1) != IGNORE).sum(-1).float()], dim=-1)
