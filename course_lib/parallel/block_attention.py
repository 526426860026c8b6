"""Attention to one block of keys and values, so that blocks can be put together: the parts of ring attention.

A softmax over all keys is the softmaxes over parts of them, each worth its share of the sum of exponentials. So a block
gives back its output and the logarithm of that sum (:func:`attend`), and :func:`merge` makes one of two. Backward needs
no partial results: with the logarithm over *all* keys, each block's weights come out as they were in the whole
(:func:`attend_backward`).

Where nothing is masked but what comes later, torch's own flash kernel computes a block and keeps no scores. With
documents or padding they are there, (queries, keys) of one block at a time.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867); Dao, "FlashAttention-2"
(arXiv 2307.08691), section 3.1.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Block(NamedTuple):
    """Keys of a block that its queries see.

    Attributes:
        diagonal: query i sees the keys 0 to i; queries and keys are equally many.
        mask: broadcastable to (rows, key heads, queries per key head, queries, keys) bool, besides; None: nothing else.
    """

    diagonal: bool = False
    mask: Tensor | None = None

    def hide(self, scores: Tensor, value: float) -> Tensor:
        """(rows, key heads, queries per key head, queries, keys), with a value where a query does not see a key."""
        if self.diagonal:
            lower = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~lower, value)
        return scores if self.mask is None else scores.masked_fill(~self.mask, value)


def attend(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """Attention within one block of keys.

    Args:
        query: (rows, heads, queries, width).
        key: (rows, key heads, keys, width); the heads are a multiple of the key heads.
        value: as ``key``.
        block: which of the keys each query sees.
        scale: of the scores.
    Returns:
        output: as ``query``, as if there were no other keys, in float32 or wider; 0 where none is seen.
        log_sum: (rows, heads, queries), logarithm of the sum of the scores' exponentials; -inf where none is seen.
    """
    wide = torch.promote_types(query.dtype, torch.float32)  # sums of many small numbers
    if has_kernel(query, block):
        output, log_sum, *_ = _flash(query)(*_for_kernel(query, key, value), 0.0, block.diagonal, scale=scale)
        return output.to(wide), log_sum.to(wide)
    scores = block.hide((_grouped(query, key).to(wide) @ key[:, :, None].to(wide).mT) * scale, -torch.inf)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.masked_fill(log_sum.isinf(), 0.0)[..., None]).exp()
    return (weights @ value[:, :, None].to(wide)).view_as(query), log_sum.flatten(1, 2)


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that one block adds.

    Args:
        gradient: of the output over all keys, as ``query``.
        query: as for :func:`attend`.
        key: as for :func:`attend`.
        value: as ``key``.
        output: over all keys, as ``query``.
        log_sum: over all keys, (rows, heads, queries).
        block: as for :func:`attend`.
        scale: of the scores.
    Returns:
        Of query, key and value, in their shapes; in float32 or wider where no kernel computes them.
    """
    if has_kernel(query, block):
        return _flash_backward(gradient, query, key, value, output, log_sum, block, scale)
    wide = log_sum.dtype
    q, up, out = (_grouped(tensor, key).to(wide) for tensor in (query, gradient, output))
    k, v = (part[:, :, None].to(wide) for part in (key, value))
    # The softmax's backward takes the same number from every score of a row: FlashAttention-2's D.
    taken = (up * out).sum(-1, keepdim=True)
    finite = _grouped(log_sum.masked_fill(log_sum.isinf(), 0.0)[..., None], key)  # rows that see nothing are masked
    # --- the weights again, from the saved logarithms: (…, queries, keys) ---
    weights = block.hide((q @ k.mT * scale - finite).exp(), 0.0)
    of_scores = weights * (up @ v.mT - taken) * scale
    # the queries of a group share their key: summed over the group
    return (of_scores @ k).view_as(query), (of_scores.mT @ q).sum(2), (weights.mT @ up).sum(2)


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


class PartialAttention:
    """Attention over the blocks that have been added so far.

    Args:
        query: (rows, heads, tokens, width), of all blocks.
        scale: of the scores.
    Attributes:
        output: as ``query``, in float32 or wider; 0 for a query that has seen no key.
        log_sum: (rows, heads, tokens) of the same dtype; -inf there.
    """

    def __init__(self, query: Tensor, scale: float):
        self.query, self.scale = query, scale
        wide = torch.promote_types(query.dtype, torch.float32)
        self.output = torch.zeros_like(query, dtype=wide)
        self.log_sum = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)

    def add(self, key: Tensor, value: Tensor, blocks: Iterable[tuple[slice, slice, Block]]) -> None:
        """Attend to some more keys, (rows, key heads, tokens, width): which queries, to which of them, how."""
        for queries, keys, block in blocks:
            partial, sums = attend(self.query[:, :, queries], key[:, :, keys], value[:, :, keys], block, self.scale)
            self.output[:, :, queries], self.log_sum[:, :, queries] = merge(
                self.output[:, :, queries], self.log_sum[:, :, queries], partial, sums
            )


class PartialGradients:
    """Gradients from the blocks that have been added so far.

    Args:
        gradient: of the attention's output.
        query, output, log_sum: of the forward, over all blocks.
        scale: of the scores.
    Attributes:
        of_query: as ``query``, in the dtype of ``log_sum``.
    """

    def __init__(self, gradient: Tensor, query: Tensor, output: Tensor, log_sum: Tensor, scale: float):
        self.of_output = gradient, query
        self.output, self.log_sum, self.scale = output, log_sum, scale
        self.of_query = torch.zeros_like(query, dtype=log_sum.dtype)

    def add(self, key: Tensor, value: Tensor, blocks: Iterable[tuple[slice, slice, Block]]) -> Tensor:
        """This query's share of the gradients of some keys and values: (2, rows, key heads, tokens, width)."""
        share = torch.zeros(2, *key.shape, dtype=self.log_sum.dtype, device=key.device)
        for queries, keys, block in blocks:
            gradient, query = (tensor[:, :, queries] for tensor in self.of_output)
            of_query, of_key, of_value = attend_backward(
                gradient,
                query,
                key[:, :, keys],
                value[:, :, keys],
                self.output[:, :, queries],
                self.log_sum[:, :, queries],
                block,
                self.scale,
            )
            self.of_query[:, :, queries] += of_query
            share[0][:, :, keys] += of_key
            share[1][:, :, keys] += of_value
        return share


def has_kernel(query: Tensor, block: Block) -> bool:
    """Whether torch's flash kernel computes this block: on a CPU any, on CUDA half precision of common widths."""
    if block.mask is not None:
        return False
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cpu" or (
        query.device.type == "cuda" and half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    )


def _flash(query: Tensor) -> torch._ops.OpOverloadPacket:
    """The operator: its first arguments and its first two results are the same for both devices."""
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu
    return aten._scaled_dot_product_flash_attention


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    given = (gradient.contiguous(), *_for_kernel(query, key, value), output, log_sum.contiguous())
    if query.device.type == "cpu":
        given = tuple(tensor.to(log_sum.dtype) for tensor in given)
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, block.diagonal, scale=scale)
    else:  # cumulative lengths are for packed rows, and a seed for dropout: neither is here
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        gradients = aten._scaled_dot_product_flash_attention_backward(
            *given, None, None, query.shape[2], key.shape[2], 0.0, block.diagonal, seed, seed[:0], scale=scale
        )
    of_query, of_key, of_value = gradients
    return of_query, *(part.unflatten(1, (key.shape[1], -1)).sum(2) for part in (of_key, of_value))


def _for_kernel(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Keys and values for each head, since the kernels know no groups; on a CPU in float32 or wider.

    There each block's result would be rounded to the inputs' dtype before it is merged. On a GPU it is: the kernel has
    no other.
    """
    times = query.shape[1] // key.shape[1]
    given = [query, key, value] if times == 1 else [query, *(t.repeat_interleave(times, 1) for t in (key, value))]
    wide = torch.promote_types(query.dtype, torch.float32)
    return [tensor.to(wide) for tensor in given] if query.device.type == "cpu" else given


def _grouped(tensor: Tensor, key: Tensor) -> Tensor:
    """(rows, heads, …) as (rows, key heads, queries per key head, …)."""
    return tensor.unflatten(1, (key.shape[1], -1))
