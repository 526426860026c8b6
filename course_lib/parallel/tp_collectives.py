"""The exchanges of tensor and sequence parallelism: collectives that autograd knows, in conjugate pairs.

A layer's region of split work lies between two exchanges. Each is an autograd function whose backward is the other's
forward, its conjugate:

============== =============== =============== ==================================================================
exchange       forward         backward        stands where
============== =============== =============== ==================================================================
copy           nothing         all-reduce      the same tensor enters the region on every rank (f in Megatron-LM)
reduce         all-reduce      nothing         partial sums leave the region (g)
scatter        own slice       all-gather      a replicated tensor becomes slices
gather         all-gather      own slice       slices become a replicated tensor
all_gather     all-gather      reduce-scatter  slices of the sequence enter the region (g of sequence parallelism)
reduce_scatter reduce-scatter  all-gather      partial sums leave it as slices of the sequence
============== =============== =============== ==================================================================

Sources: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4.2.2.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import torch_names  # noqa: F401
from course_lib.errors import ConfigError

Group: TypeAlias = dist.ProcessGroup | None
SEQUENCE = 1
"""Dimension of the tokens in a hidden state of shape (rows, tokens, width)."""
PAD_SEQUENCES = "pad the sequences to a multiple of the ranks, as a collator does with pad_to_multiple_of"


# --- What moves: plain collectives, out of place, along any dimension ---


def _nothing(tensor: Tensor, group: Group, dim: int) -> Tensor:
    # (…) -> (…). Autograd wants another tensor than the one that it gave: a function that returns its input as it is
    # would not be seen by the graph.
    return tensor.view_as(tensor)


def _all_reduce(tensor: Tensor, group: Group, dim: int) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)  # all-reduce is in place, and others use the tensor
    dist.all_reduce(total, group=group)  # (…) -> (…), the sum on every rank
    return total


def gathered(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """All ranks' tensors, which have one shape, put together along ``dim``, on every rank; autograd sees nothing."""
    ranks = dist.get_world_size(group)
    # The collective puts them one after the other in memory, which is along the first dimension. So for another one
    # they are taken apart and put together anew: (N rows, tokens, width) -> (rows, N tokens, width) for dim 1.
    stacked = tensor.new_empty(ranks * len(tensor), *tensor.shape[1:])
    dist.all_gather_single(stacked, tensor.contiguous(), group=group)  # (rows, …) -> (N rows, …)
    return torch.cat(stacked.chunk(ranks), dim)


def _own_slice(tensor: Tensor, group: Group, dim: int) -> Tensor:
    # (rows, tokens, width) -> (rows, tokens / N, width) for dim 1; nothing is sent, every rank has the whole
    return _slices(tensor, group, dim)[dist.get_rank(group)].contiguous()


def _reduce_scatter(tensor: Tensor, group: Group, dim: int) -> Tensor:
    slices = _slices(tensor, group, dim)  # N of (rows, tokens / N, width) for dim 1
    own_sum = torch.empty_like(slices[0], memory_format=torch.contiguous_format)
    # (N rows, tokens / N, width) -> (rows, tokens / N, width). The collective gives rank r the r-th N-th of the memory,
    # so the slices are put one after the other first.
    dist.reduce_scatter_single(own_sum, torch.cat(slices), group=group)
    return own_sum


def _slices(tensor: Tensor, group: Group, dim: int) -> tuple[Tensor, ...]:
    ranks = dist.get_world_size(group)
    check_divides(f"dimension {dim} of a {tuple(tensor.shape)} tensor", tensor.shape[dim], ranks, PAD_SEQUENCES)
    return tensor.chunk(ranks, dim)


def check_divides(what: str, size: int, ranks: int, instead: str) -> None:
    """Refuse a size that the ranks cannot share evenly.

    Raises:
        ConfigError: it is not a multiple of the number of ranks.
    """
    if size % ranks:
        raise ConfigError(f"{what} is {size}, which {ranks} tensor-parallel ranks cannot share evenly", instead)


# --- The exchanges: a collective forward, its conjugate backward ---


class _Exchange(torch.autograd.Function):
    """One function forward, its conjugate backward. Neither needs to keep a tensor for the other."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Callable, backward: Callable, group: Group, dim: int) -> Tensor:
        ctx.conjugate, ctx.group, ctx.dim = backward, group, dim
        return forward(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        # One for each argument of forward: the tensor has a gradient, functions, group and dimension have none.
        return ctx.conjugate(gradient, ctx.group, ctx.dim), None, None, None, None


def copy(tensor: Tensor, group: Group = None) -> Tensor:
    """Forward nothing, backward all-reduce: each rank's part of the work brings a part of the gradient."""
    return _Exchange.apply(tensor, _nothing, _all_reduce, group, 0)


def reduce(tensor: Tensor, group: Group = None) -> Tensor:
    """Forward all-reduce, backward nothing: the sum's gradient is each summand's."""
    return _Exchange.apply(tensor, _all_reduce, _nothing, group, 0)


def scatter(tensor: Tensor, group: Group = None, dim: int = -1) -> Tensor:
    """Forward this rank's slice along ``dim``, backward all-gather.

    Raises:
        ConfigError: the dimension does not divide by the number of ranks.
    """
    return _Exchange.apply(tensor, _own_slice, gathered, group, dim)


def gather(tensor: Tensor, group: Group = None, dim: int = -1) -> Tensor:
    """Forward all-gather along ``dim``, backward this rank's slice: what follows is the same on every rank."""
    return _Exchange.apply(tensor, gathered, _own_slice, group, dim)


def all_gather(tensor: Tensor, group: Group = None, dim: int = SEQUENCE) -> Tensor:
    """Forward all-gather of the sequence, backward reduce-scatter: what follows is different work on each rank."""
    return _Exchange.apply(tensor, gathered, _reduce_scatter, group, dim)


def reduce_scatter(tensor: Tensor, group: Group = None) -> Tensor:
    """Forward reduce-scatter along the sequence, backward all-gather.

    Raises:
        ConfigError: the dimension does not divide by the number of ranks.
    """
    return _Exchange.apply(tensor, _reduce_scatter, gathered, group, SEQUENCE)


def sum_gradients(parameters: Iterable[nn.Parameter], group: Group) -> None:
    """All-reduce the parameters' gradients in each backward, before they are accumulated."""
    for parameter in parameters:
        if parameter.requires_grad:
            # On the tensor, not on its accumulation: the hook is given this backward's gradient alone. Summing `.grad`
            # would sum what earlier micro-batches left there once more.
            parameter.register_hook(lambda gradient: _all_reduce(gradient, group, 0))
