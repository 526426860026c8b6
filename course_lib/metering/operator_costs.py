"""Cost of one call of an operator: its FLOPs, and the bytes that go in and come out.

The rules stand at :class:`course_lib.metering.operators.OperatorCounter`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from course_lib.metering.allocation_log import FUNCTIONAL
from course_lib.metering.collective import ring_bytes
from course_lib.metering.collective_hooks import ARGUMENTS, OPERATORS, PAYLOAD
from course_lib.metering.storages import local_tensors

KINDS = ("matmul", "attention", "convolution", "pointwise", "reduction", "move", "view", "collective")
"""Matmul, attention and convolution: what torch's FLOP counter knows. Pointwise: an element of the result needs those
at its place. Reduction: all else that computes, norms and softmax too. Move: copies, casts, look-ups, fills. View:
nothing is read or written; allocations are among them. Collective: of a process group."""

COPIES = ("_to_copy", "copy_", "clone", "cat", "stack", "repeat", "roll", "flip", "constant_pad_nd", "_foreach_copy_")
COPIED_VIEWS = ("view_copy", "split_with_sizes_copy", "lift_fresh_copy", "_local_scalar_dense")
CHOICES = ("embedding", "index", "index_select", "gather", "index_copy_", "scatter", "slice_scatter", "select_scatter")
SPREADS = ("slice_backward", "select_backward", "unfold_backward")
FILLS = ("fill_", "fill", "zero_", "zeros", "ones", "full", "arange", "scalar_tensor", "_foreach_zero_")
FILLS_ALIKE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
MOVES = frozenset((*COPIES, *COPIED_VIEWS, *CHOICES, *SPREADS, *FILLS, *FILLS_ALIKE))
DRAWS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_")
OVERWRITES = frozenset((*DRAWS, "copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"))
"""In-place operators that do not read what they write over."""
LOOK_UPS = {
    "embedding": "weight",
    "index": "self",
    "index_select": "self",
    "gather": "self",
    "nll_loss_forward": "self",
    "nll_loss_backward": "self",
}
"""Operator: its argument of which only the elements are read that the indices choose."""
FUSED_OPTIMIZERS = {"_fused_adamw_": 8, "_fused_adam_": 8, "_fused_sgd_": 3}
"""FLOPs per parameter, as the unfused operators count: decay, momentum (as many as ``foreach`` needs), update."""


def describe(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[str, str, int, int, str]:
    """Name, kind, FLOPs, bytes and dtype of one call of an operator (``torch._ops.OpOverload``)."""
    name = func._schema.name.partition("::")[2]
    if func.namespace != "aten":
        return _collective(func, name, args, kwargs, result)
    read, written, chosen = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    sizes = [0]  # elements of each argument
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        tensors = list(_tensors(given.get(argument.name)))
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and not (name in FUSED_OPTIMIZERS and argument.name == "grads"):  # which only scaling changes
            written += tensors
        if LOOK_UPS.get(name) == argument.name:
            chosen += tensors
            continue
        sizes.append(sum(tensor.numel() for tensor in tensors))
        if not (writes and (argument.is_out or name in OVERWRITES)):
            read += tensors
    known = {tensor.untyped_storage()._cdata for tensor in (*read, *written, *chosen)}
    results = list(_tensors(result))
    written += [tensor for tensor in results if tensor.untyped_storage()._cdata not in known]
    dtype = next((str(tensor.dtype).removeprefix("torch.") for tensor in (*written, *results, *read)), "")
    if name.startswith(("empty", "new_empty")) or (results and not written):
        return name, "view", 0, 0, dtype
    size = _bytes(read) + _bytes(written)
    for table in chosen:
        picks = {"nll_loss_backward": 0, "nll_loss_forward": given["target"].numel() if "target" in given else 0}
        size += min(_bytes([table]), picks.get(name, sum(t.numel() for t in results)) * table.element_size())
    if name in MOVES:
        return name, "move", 0, size, dtype
    if name.startswith("_scaled_dot_product"):
        return name, "attention", _attention(args, name.endswith("_backward")), size, dtype
    if func._overloadpacket in flop_registry:
        kind = "attention" if "attention" in name else "convolution" if "conv" in name else "matmul"
        return name, kind, flop_registry[func._overloadpacket](*args, **kwargs, out_val=result), size, dtype
    if name in FUSED_OPTIMIZERS:
        return name, "pointwise", FUSED_OPTIMIZERS[name] * sizes[1], size, dtype
    if name == "native_dropout":  # which writes its mask too
        return name, "pointwise", max(sizes), size, dtype
    if torch.Tag.pointwise in func.tags or (name.startswith("_foreach_") and name != "_foreach_norm"):
        return name, "pointwise", sum(tensor.numel() for tensor in written), size, dtype
    return name, "reduction", max(sizes), size, dtype


def _attention(args: Sequence[Any], backward: bool) -> int:
    """FLOPs of fused attention: 2 products forward; backward 5, the scores once more among them.

    ``args``: queries [B, H, S, D], keys [B, K, T, D], values [B, K, T, E], after the output's gradient in a backward.
    """
    queries, _, values = (tensor.shape for tensor in args[backward : 3 + backward])
    scores = math.prod(queries[:3]) * values[2]
    return 2 * scores * (3 * queries[3] + 2 * values[3] if backward else queries[3] + values[3])


def _collective(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> tuple[str, str, int, int, str]:
    """The same of a collective: through a process group, or functional, as DTensor calls it."""
    if func.namespace == "_c10d_functional":
        standard = FUNCTIONAL.get(name.removesuffix("_"), name)
        payload = list(_tensors(result if standard == "all_gather" else args[0]))
        names = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        if standard == "wait_tensor" or not names:
            return standard, "collective", 0, 0, str(payload[0].dtype).removeprefix("torch.")
        group, root = _resolve_process_group(names[-1]), 0  # type: ignore[arg-type]
    else:
        standard = OPERATORS.get(name, name)
        given = dict(zip(ARGUMENTS.get(name, ()), args, strict=False)) | kwargs
        payload = list(_tensors(given.get(PAYLOAD.get(name, ""), ())))
        group, root = dist.ProcessGroup.unbox(given["process_group"]), given.get("root_rank", 0)
    size, ranks = sum(tensor.nbytes for tensor in payload), group.size()
    whole = size * (ranks if standard in ("gather", "scatter") else 1)
    dtype = str(payload[0].dtype).removeprefix("torch.") if payload else ""
    return standard, "collective", 0, ring_bytes(standard, whole, ranks, group.rank(), root), dtype


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in it, of a wrapper those that hold its elements."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from local_tensors(leaf)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the distinct elements that some tensors show."""
    storages: dict[int, dict[tuple, int]] = {}
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # an expanded dimension shows the same elements again, a transposed tensor all of them in another order
        extent = sorted(
            (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if stride and size != 1
        )
        place = (tensor.storage_offset(), *extent)
        shown = math.prod(size for _, size in extent) * tensor.element_size() if tensor.numel() else 0
        storages.setdefault(storage._cdata, {})[place] = shown
        sizes[storage._cdata] = storage.nbytes()
    return sum(min(sizes[key], sum(parts.values())) for key, parts in storages.items())
