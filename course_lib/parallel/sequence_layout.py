"""Layout of a sequence over ranks of context parallelism: each rank's tokens, and their labels and loss.

Contiguous: rank r has the r-th of N equal parts. Under a causal mask it then attends to r parts and half of its own, so
that the last rank works about 2N times as long as the first. Zigzag cuts 2N chunks and gives rank r chunk r and its
mirror image 2N - 1 - r: early and late tokens together, the same work for all::

    contiguous, N = 2    0 0 0 0 1 1 1 1        pairs of query and key    10, 26
    zigzag               0 0 1 1 1 1 0 0                                  18, 18

Sources: Brandon et al., "Striped Attention" (arXiv 2311.09431), for the imbalance; Llama Team, "The Llama 3 Herd of
Models" (arXiv 2407.21783), section 3.3.2, for 2N chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.errors import ConfigError

IGNORED = -100
"""Label without a loss, as in torch's cross-entropy."""


@dataclass(frozen=True)
class SequenceLayout:
    """Distribution of ``length`` tokens over ``ranks``.

    Raises:
        ConfigError: the length does not divide into as many chunks.
    """

    length: int
    ranks: int
    zigzag: bool = False

    def __post_init__(self) -> None:
        chunks = self.ranks * (1 + self.zigzag)
        if self.length % chunks:
            raise ConfigError(
                f"a sequence of {self.length} tokens cannot be cut into {chunks} equal chunks",
                f"pad it to a multiple of {chunks}",
            )

    @property
    def chunk(self) -> int:
        """Tokens in a chunk."""
        return self.length // (self.ranks * (1 + self.zigzag))

    def starts(self, rank: int) -> tuple[int, ...]:
        """The first token of each chunk that a rank holds, in the order in which it holds them."""
        if not self.zigzag:
            return (rank * self.chunk,)
        return rank * self.chunk, (2 * self.ranks - 1 - rank) * self.chunk

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """The places in the sequence of a rank's tokens, (length / ranks,) int64: what rotary embeddings need."""
        return torch.cat([torch.arange(start, start + self.chunk, device=device) for start in self.starts(rank)])

    def shard(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's tokens of a tensor that has ``length`` along ``dim``; a copy."""
        return torch.cat([whole.narrow(dim, start, self.chunk) for start in self.starts(rank)], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole from all ranks' parts, by rank."""
        chunks = {
            start: chunk
            for rank, part in enumerate(parts)
            for start, chunk in zip(self.starts(rank), part.split(self.chunk, dim), strict=True)
        }
        return torch.cat([chunks[start] for start in sorted(chunks)], dim)

    def order(self, device: torch.device | str = "cpu") -> Tensor:
        """(length,) int64: where in the ranks' parts, put one after the other, each token of the sequence is."""
        return torch.cat([self.positions(rank, device) for rank in range(self.ranks)]).argsort()

    def pairs(self, rank: int, causal: bool = True) -> int:
        """Pairs of query and key that a rank computes: its share of attention's work."""
        if not causal:
            return self.length * self.length // self.ranks
        return int(self.positions(rank).add(1).sum())


def next_tokens(labels: Tensor, documents: Tensor | None = None) -> Tensor:
    """Labels of each token, from whole sequences: the one after it, none at the end.

    It is done before sequences are cut. A rank that shifts its own part has no label for its last token, which the next
    rank holds, and with zigzag takes the first of its second chunk for it.

    Args:
        labels: (rows, tokens) int64.
        documents: (rows, tokens) int64, equal within a document: none predicts the first token of another.
    """
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    if documents is not None:
        shifted[:, :-1].masked_fill_(documents[:, 1:] != documents[:, :-1], IGNORED)
    return shifted


def share_of_mean(loss_sum: Tensor, targets: int | Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's share of the mean loss over all ranks' targets; the shares add up to it.

    Ranks have different numbers of targets, so that a mean of their means is another number. Gradients of the shares
    are to be summed over the ranks, not averaged.

    Args:
        loss_sum: over this rank's targets, with its graph.
        targets: how many they are; may be 0.
        group: the ranks that have the targets; None: all ranks.
    """
    total = torch.as_tensor(targets, device=loss_sum.device).clone().to(torch.int64)
    dist.all_reduce(total, group=group)
    return loss_sum / total.clamp(min=1)
