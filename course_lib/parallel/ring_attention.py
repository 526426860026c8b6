"""Ring attention: the keys and values travel round the ranks, each of which keeps its own queries.

Every rank holds some tokens of each sequence. Step by step the block of keys and values of another rank comes by; the
rank attends to it, and merges what it finds into what it has, by the sums of the exponentials (the online softmax), so
that the result is exact. No rank ever holds more than two blocks, whatever their number::

    step 0         step 1         step 2            rank r has its own block first, then that of rank r - 1, …
    q0 with kv0    q0 with kv2    q0 with kv1       while it computes with one, the next is on its way
    q1 with kv1    q1 with kv0    q1 with kv2
    q2 with kv2    q2 with kv1    q2 with kv0

Backward goes round once more. The gradient of a block's keys and values travels one step behind the block: each rank
adds its share, and after N steps it is at home, whole.

Sources: Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889), section 3; the merge and the
backward by the saved logarithms: Dao, "FlashAttention-2" (arXiv 2307.08691), section 3.1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.parallel.sequence_layout import SequenceLayout

Group = dist.ProcessGroup | None
NOWHERE = -1
"""Document of a padding token: nobody attends to it, and it attends to nobody."""


@dataclass(frozen=True)
class Sight:
    """Which keys a query may see.

    Attributes:
        layout: where each rank's tokens are.
        causal: none after itself.
        documents: by rank (rows, tokens) int64, equal within a document and NOWHERE for padding: none of another one.
            None: all tokens are of one document.
    """

    layout: SequenceLayout
    causal: bool
    documents: tuple[Tensor, ...] | None = None

    def blocks(self, rank: int, owner: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """The pairs of chunks, a rank's queries and an owner's keys, that see each other at all.

        Yields:
            queries, keys: where they are in what the two ranks hold.
            mask: broadcastable to (rows, key heads, queries per key head, queries, keys) bool; None where all is seen.
        """
        size = self.layout.chunk
        for i, query in enumerate(self.layout.starts(rank)):
            for j, key in enumerate(self.layout.starts(owner)):
                if self.causal and key > query:
                    continue  # all of these keys come after all of these queries: not masked, but left out
                queries, keys = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
                yield queries, keys, self._mask(rank, owner, queries, keys, diagonal=self.causal and key == query)

    def _mask(self, rank: int, owner: int, queries: slice, keys: slice, diagonal: bool) -> Tensor | None:
        mask = None
        if self.documents is not None:
            of_query, of_key = self.documents[rank][:, queries, None], self.documents[owner][:, None, keys]
            mask = ((of_query == of_key) & (of_query != NOWHERE))[:, None, None]  # (rows, 1, 1, queries, keys)
        if diagonal:
            device = self.documents[rank].device if self.documents is not None else None
            size = self.layout.chunk
            lower = torch.ones(size, size, dtype=torch.bool, device=device).tril()
            mask = lower if mask is None else mask & lower
        return mask


def ring_attention(query: Tensor, key: Tensor, value: Tensor, sight: Sight, group: Group = None,
                   scale: float | None = None) -> Tensor:
    """Attention of this rank's queries to all ranks' keys and values; with its own backward.

    Sends, of blocks of 2 x key's bytes, N - 1 in the forward and N - 1 in the backward, and in the backward N blocks of
    gradients in float32 (float64 for float64 inputs).

    Args:
        query: (rows, heads, tokens, width), this rank's tokens in the layout's order.
        key: (rows, key heads, tokens, width); the heads are a multiple of the key heads, as in grouped queries.
        value: as ``key``.
        sight: the same on every rank, but for documents.
        group: whose ranks hold the sequence.
        scale: of the scores; 1 / sqrt(width) by default.
    Returns:
        As ``query``; 0 where a query sees no key.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _RingAttention.apply(query, key, value, sight, group, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sight: Sight, group: Group,
                scale: float) -> Tensor:
        ring = Ring(group)
        grouped = _grouped(query, key)  # (rows, key heads, queries per key head, tokens, width)
        wide = torch.promote_types(query.dtype, torch.float32)  # sums of many small numbers
        output = torch.zeros_like(grouped, dtype=wide)
        log_sum = torch.full(grouped.shape[:-1], -torch.inf, dtype=wide, device=query.device)
        block = torch.stack((key, value))  # (2, rows, key heads, tokens, width): one message

        for step in range(ring.ranks):
            owner = (ring.rank - step) % ring.ranks
            # --- the next block sets out before this one is computed with ---
            coming = ring.pass_on(block) if step + 1 < ring.ranks else None
            for queries, keys, mask in sight.blocks(ring.rank, owner):
                partial, sums = _attend(grouped[..., queries, :], block[0][..., keys, :], block[1][..., keys, :],
                                        mask, scale, wide)
                output[..., queries, :], log_sum[..., queries] = merge(
                    output[..., queries, :], log_sum[..., queries], partial, sums)
            if coming is not None:
                block = coming.arrived()

        result = output.to(query.dtype).view_as(query)
        ctx.save_for_backward(query, key, value, result, log_sum)
        ctx.sight, ctx.group, ctx.scale = sight, group, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        query, key, value, result, log_sum = ctx.saved_tensors
        ring, scale = Ring(ctx.group), ctx.scale
        wide = log_sum.dtype
        grouped, upstream, result = (_grouped(tensor, key).to(wide) for tensor in (query, gradient, result))
        # The softmax's backward takes the same number from every score of a row: FlashAttention-2's D.
        taken = (upstream * result).sum(-1, keepdim=True)
        log_sum = log_sum.masked_fill(log_sum.isinf(), 0.0)[..., None]  # rows that see nothing are masked below
        of_query = torch.zeros_like(grouped)
        block = torch.stack((key, value))
        returning = None

        for step in range(ring.ranks):
            owner = (ring.rank - step) % ring.ranks
            coming = ring.pass_on(block) if step + 1 < ring.ranks else None
            share = torch.zeros_like(block, dtype=wide)  # of the gradient of this block
            for queries, keys, mask in ctx.sight.blocks(ring.rank, owner):
                q, up = grouped[..., queries, :], upstream[..., queries, :]
                k, v = (part[:, :, None, keys].to(wide) for part in block)
                # --- the weights again, from the saved logarithms: (…, queries, keys) ---
                scores = q @ k.mT * scale
                weights = (scores - log_sum[..., queries, :]).exp()
                if mask is not None:
                    weights = weights.masked_fill(~mask, 0.0)
                of_scores = weights * (up @ v.mT - taken[..., queries, :]) * scale
                of_query[..., queries, :] += of_scores @ k
                share[0][..., keys, :] += (of_scores.mT @ q).sum(2)  # the queries of a group share their key
                share[1][..., keys, :] += (weights.mT @ up).sum(2)
            # --- what the ranks before this one have added comes one step behind the block, and goes on with ours ---
            if returning is not None:
                share += returning.arrived()
            returning = ring.pass_on(share) if ring.ranks > 1 else None
            if coming is not None:
                block = coming.arrived()

        home = returning.arrived() if returning is not None else share
        return of_query.to(query.dtype).view_as(query), home[0].to(key.dtype), home[1].to(value.dtype), None, None, None


def _grouped(tensor: Tensor, key: Tensor) -> Tensor:
    """(rows, heads, …) as (rows, key heads, queries per key head, …)."""
    return tensor.unflatten(1, (key.shape[1], -1))


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, wide: torch.dtype
            ) -> tuple[Tensor, Tensor]:
    """Attention within one block of keys.

    Returns:
        output: (…, queries, width), as if there were no other keys; 0 where none is seen.
        log_sum: (…, queries), logarithm of the sum of the scores' exponentials; -inf where none is seen.
    """
    scores = (query.to(wide) @ key[:, :, None].to(wide).mT) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.masked_fill(log_sum.isinf(), 0.0)[..., None]).exp()
    return weights @ value[:, :, None].to(wide), log_sum


def merge(output: Tensor, log_sum: Tensor, partial: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """One attention out of two over different keys: each is worth its share of the sum of exponentials.

    Args:
        output: (…, queries, width).
        log_sum: (…, queries).
        partial: as ``output``, over other keys.
        sums: as ``log_sum``.
    """
    total = torch.logaddexp(log_sum, sums)
    safe = total.masked_fill(total.isinf(), 0.0)  # -inf less -inf is not a number
    return (log_sum - safe).exp()[..., None] * output + (sums - safe).exp()[..., None] * partial, total


@dataclass
class Coming:
    """A message on its way, with what it is sent from, which has to stay until it has left."""

    tensor: Tensor
    works: list[dist.Work]
    sent: Tensor

    def arrived(self) -> Tensor:
        """What the rank before has sent, as soon as it is here."""
        for work in self.works:
            work.wait()
        return self.tensor


class Ring:
    """This rank's place in a group, and its two neighbours."""

    def __init__(self, group: Group):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def pass_on(self, tensor: Tensor) -> Coming:
        """Send to the next rank what the rank before sends the like of; both go together, or NCCL would lock up."""
        received = torch.empty_like(tensor)
        messages = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(self.rank + 1) % self.ranks),
                    dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank - 1) % self.ranks)]
        return Coming(received, dist.batch_isend_irecv(messages), tensor)
