"""Context parallelism: attention over a sequence whose tokens are spread over ranks, in three ways.

All else in a transformer works on one token at a time; only attention needs the others. With N ranks, each with s of
the sequence's N s tokens, h heads and g key heads of d numbers in rows r, a rank sends in a forward, in numbers,

========== ================================ ============================================= ======================
method     sends                            holds                                         needs
========== ================================ ============================================= ======================
ring       2 (N - 1) r g s d                two blocks of keys and values
all-gather 2 (N - 1) r g s d                all keys and values
ulysses    2 (N - 1) / N r (h + g') s d     all tokens of h / N heads                     heads divisible by N
========== ================================ ============================================= ======================

where g' is g, or N where there are fewer key heads than ranks. Backward, all-gather and ulysses send as much again;
the ring sends the blocks again and N blocks of gradients.

Sources: Liu et al., "Ring Attention" (arXiv 2310.01889); Llama Team, "The Llama 3 Herd of Models" (arXiv 2407.21783),
section 3.3.2, for the all-gather; Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509), section 3.
"""

import functools
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from course_lib.errors import ConfigError
from course_lib.parallel.block_attention import PartialAttention, PartialGradients
from course_lib.parallel.ring_attention import NOWHERE, Sight, ring_attention
from course_lib.parallel.sequence_layout import SequenceLayout
from course_lib.parallel.tp_collectives import Group, all_gather, gathered

Method = Literal["ring", "allgather", "ulysses"]
METHODS: tuple[Method, ...] = ("ring", "allgather", "ulysses")
TOKENS = 2
"""Dimension of the tokens in (rows, heads, tokens, width)."""


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    method: Method = "ring",
    causal: bool = True,
    zigzag: bool = False,
    documents: Tensor | None = None,
    group: Group = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks' tokens; differentiable.

    Args:
        query: (rows, heads, tokens, width): this rank's tokens, as `SequenceLayout` deals them.
        key: (rows, key heads, tokens, width); the heads are a multiple of the key heads.
        value: as ``key``.
        method: ``ring``, ``allgather`` or ``ulysses``.
        causal: a query sees no key after itself.
        zigzag: how the tokens are dealt.
        documents: (rows, tokens) int64, this rank's: a query sees only keys of its own document, and NOWHERE marks
            padding. None: each row is one document.
        group: whose ranks hold the sequence.
        scale: of the scores; 1 / sqrt(width) by default.
    Returns:
        As ``query``; 0 where a query sees no key.
    Raises:
        ConfigError: an unknown method, or heads that do not divide as it needs.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r} of context parallelism", f"use {', '.join(METHODS)}")
    if query.shape[1] % key.shape[1]:
        raise ConfigError(
            f"{query.shape[1]} heads cannot share {key.shape[1]} key heads evenly", "give a multiple of the key heads"
        )
    layout = SequenceLayout(query.shape[TOKENS] * dist.get_world_size(group), dist.get_world_size(group), zigzag)
    everywhere = None if documents is None else gathered(documents, group, 1).chunk(layout.ranks, 1)
    sight = Sight(layout, causal, everywhere)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if method == "ring":
        return ring_attention(query, key, value, sight, group, scale)
    if method == "allgather":
        return _with_all_keys(query, key, value, sight, group, scale)
    return _with_some_heads(query, key, value, sight, group, scale)


def _with_all_keys(query: Tensor, key: Tensor, value: Tensor, sight: Sight, group: Group, scale: float) -> Tensor:
    """Gather the keys and values of all ranks, and attend with the own queries."""
    # (rows, key heads, tokens, width) -> (rows, key heads, N tokens, width), in the order of the ranks; backward is a
    # reduce-scatter, since each rank's queries bring a part of the gradient.
    key, value = (all_gather(tensor, group, TOKENS) for tensor in (key, value))
    return _OfAllRanks.apply(query, key, value, sight, dist.get_rank(group), scale)


class _OfAllRanks(torch.autograd.Function):
    """The ring's work without its messages: all ranks' keys and values are here."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sight: Sight, rank: int, scale: float) -> Tensor:
        attention = PartialAttention(query, scale)
        for owner, (keys, values) in enumerate(_by_rank(sight, key, value)):
            attention.add(keys, values, sight.blocks(rank, owner))
        result = attention.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, attention.log_sum)
        ctx.sight, ctx.rank, ctx.scale = sight, rank, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        query, key, value, result, log_sum = ctx.saved_tensors
        gradients = PartialGradients(gradient, query, result, log_sum, ctx.scale)
        shares = [
            gradients.add(keys, values, ctx.sight.blocks(ctx.rank, owner))
            for owner, (keys, values) in enumerate(_by_rank(ctx.sight, key, value))
        ]
        of_key, of_value = (torch.cat(parts, TOKENS) for parts in zip(*shares, strict=True))
        return gradients.of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def _by_rank(sight: Sight, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(*(tensor.chunk(sight.layout.ranks, TOKENS) for tensor in (key, value)), strict=True)


def _with_some_heads(query: Tensor, key: Tensor, value: Tensor, sight: Sight, group: Group, scale: float) -> Tensor:
    """Exchange tokens for heads, attend to whole sequences with a few heads, and exchange back."""
    ranks, heads, key_heads = sight.layout.ranks, query.shape[1], key.shape[1]
    if heads % ranks:
        raise ConfigError(f"{heads} heads cannot be shared evenly by {ranks} ranks", "use the ring, or fewer ranks")
    if key_heads % ranks:
        if ranks % key_heads:
            raise ConfigError(f"{key_heads} key heads fit {ranks} ranks neither way", "use the ring, or other ranks")
        # Fewer key heads than ranks: each is sent to all the ranks whose queries share it.
        key, value = (tensor.repeat_interleave(ranks // key_heads, 1) for tensor in (key, value))
    order = sight.layout.order(query.device)
    # (rows, heads, tokens, width) -> (rows, heads / N, N tokens, width), then from the ranks' order to the sequence's
    query, key, value = (_to_heads(tensor, group).index_select(TOKENS, order) for tensor in (query, key, value))
    documents = None if sight.documents is None else torch.cat(sight.documents, 1).index_select(1, order)
    result = _attend(query, key, value, sight.causal, documents, scale)
    return _to_tokens(result.index_select(TOKENS, order.argsort()), group)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, documents: Tensor | None, scale: float) -> Tensor:
    """torch's attention to whole sequences, in their order."""
    attention = functools.partial(
        F.scaled_dot_product_attention, query, key, value, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    if documents is None:
        return attention(is_causal=causal)
    mask = ((documents[:, :, None] == documents[:, None]) & (documents != NOWHERE)[:, :, None])[:, None]
    if causal:
        mask = mask & torch.ones(mask.shape[-2:], dtype=torch.bool, device=query.device).tril()
    blind = ~mask.any(-1, keepdim=True)  # a row without a key would be not a number
    return attention(mask | blind).masked_fill(blind, 0.0)


class _Swap(torch.autograd.Function):
    """An all-to-all that splits one dimension over the ranks and puts another together; backward swaps them back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: int, join: int, group: Group) -> Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        return _swapped(tensor, split, join, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        return _swapped(gradient, ctx.join, ctx.split, ctx.group), None, None, None


def _swapped(tensor: Tensor, split: int, join: int, group: Group) -> Tensor:
    ranks = dist.get_world_size(group)
    sent = torch.stack(tensor.chunk(ranks, split))  # (N, …): the i-th is for rank i
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), join)


def _to_heads(tensor: Tensor, group: Group) -> Tensor:
    return _Swap.apply(tensor, 1, TOKENS, group)


def _to_tokens(tensor: Tensor, group: Group) -> Tensor:
    return _Swap.apply(tensor, TOKENS, 1, group)


def bytes_sent(
    method: Method,
    ranks: int,
    rows: int,
    heads: int,
    key_heads: int,
    tokens: int,
    width: int,
    itemsize: int,
    backward: bool = False,
) -> int:
    """Bytes that a rank sends in one forward, or one backward, without documents.

    Args:
        method: as for :func:`context_attention`.
        ranks: that hold the sequence.
        rows: sequences of the batch.
        heads: of the query.
        key_heads: of key and value.
        tokens: of one rank.
        width: of a head.
        itemsize: bytes of a number of the query, at most 4 or, for the ring's gradients, 8.
        backward: count a backward, not a forward.
    """
    block = 2 * rows * key_heads * tokens * width
    if method == "ulysses":
        shared = key_heads if key_heads % ranks == 0 else ranks
        return 2 * (ranks - 1) * rows * (heads + shared) * tokens * width * itemsize // ranks
    if method == "ring" and backward and ranks > 1:
        return (ranks - 1) * block * itemsize + ranks * block * max(4, itemsize)
    return (ranks - 1) * block * itemsize
