"""FlashAttention-2 as Triton kernels: attention in blocks that never holds a matrix of scores.

Dao, "FlashAttention-2" (2023), algorithms 1 and 2. Each program of a kernel has one block of queries, or of keys, and
goes through the blocks of the other. On a GPU Triton compiles the kernels; with ``TRITON_INTERPRET=1`` in the
environment before Triton is imported, its interpreter runs them on a CPU, slowly and alike.
"""

from typing import Any

import torch
import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)
"""Maximum of no scores: finite, so that a row that sees no key so far gives zeros rather than NaN."""


@triton.jit
def load(start, rows, T, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a (T, D) matrix; zeros beyond the last."""
    return tl.load(start + rows[:, None] * D + tl.arange(0, D)[None, :], mask=rows[:, None] < T, other=0.0)


@triton.jit
def store(start, rows, values, T, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse of :func:`load`."""
    tl.store(start + rows[:, None] * D + tl.arange(0, D)[None, :], values, mask=rows[:, None] < T)


@triton.jit
def scores(q, k, rows, cols, keep, T, scale, causal: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scaled products of a block of queries and one of keys, in fp32; -inf where a query does not see a key."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = tl.load(keep + cols, mask=cols < T, other=0)[None, :] != 0
    if causal:
        seen = seen & (rows[:, None] >= cols[None, :])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def forward_kernel(
    q_in,
    k_in,
    v_in,
    keep,
    o_out,
    lse_out,
    T,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,  # type: ignore
    D: tl.constexpr,
    SIZE: tl.constexpr,
    causal: tl.constexpr,
):
    """Output and log-sum-exp of the scores of one block of queries of one head: a pass over the blocks of keys."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k_in, v_in, keep = k_in + head // G * T * D, v_in + head // G * T * D, keep + head // H * T
    rows = block * SIZE + tl.arange(0, SIZE)
    q = load(q_in + head * T * D, rows, T, D)
    m, total = tl.full([SIZE], NOTHING, tl.float32), tl.zeros([SIZE], tl.float32)
    o = tl.zeros([SIZE, D], tl.float32)
    for start in range(0, (block + 1) * SIZE if causal else T, SIZE):
        cols = start + tl.arange(0, SIZE)
        s = scores(q, load(k_in, cols, T, D), rows, cols, keep, T, scale, causal)
        new = tl.maximum(m, tl.max(s, 1))
        p, old = tl.exp(s - new[:, None]), tl.exp(m - new)  # what was summed so far was relative to another maximum
        v = load(v_in, cols, T, D)
        o = old[:, None] * o + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m, total = new, old * total + tl.sum(p, 1)
    total = tl.maximum(total, 1e-30)
    store(o_out + head * T * D, rows, o / total[:, None], T, D)
    tl.store(lse_out + head * T + rows, m + tl.log(total), mask=rows < T)


@triton.jit
def queries_kernel(
    q_in,
    k_in,
    v_in,
    keep,
    do_in,
    lse_in,
    delta_in,
    dq_out,
    T,
    scale,
    H: tl.constexpr,  # type: ignore
    G: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    causal: tl.constexpr,
):
    """Gradient of one block of queries of one head: a pass over the blocks of keys."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k_in, v_in, keep = k_in + head // G * T * D, v_in + head // G * T * D, keep + head // H * T
    rows = block * SIZE + tl.arange(0, SIZE)
    q, do = load(q_in + head * T * D, rows, T, D), load(do_in + head * T * D, rows, T, D)
    lse = tl.load(lse_in + head * T + rows, mask=rows < T, other=0.0)[:, None]
    delta = tl.load(delta_in + head * T + rows, mask=rows < T, other=0.0)[:, None]
    dq = tl.zeros([SIZE, D], tl.float32)
    for start in range(0, (block + 1) * SIZE if causal else T, SIZE):
        cols = start + tl.arange(0, SIZE)
        k, v = load(k_in, cols, T, D), load(v_in, cols, T, D)
        p = tl.exp(scores(q, k, rows, cols, keep, T, scale, causal) - lse)  # computed again, not kept
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    store(dq_out + head * T * D, rows, scale * dq, T, D)


@triton.jit
def keys_kernel(
    q_in,
    k_in,
    v_in,
    keep,
    do_in,
    lse_in,
    delta_in,
    dk_out,
    dv_out,
    T,
    scale,  # type: ignore
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    causal: tl.constexpr,
):
    """Gradients of one block of keys and values: a pass over the blocks of queries of the heads that share them."""
    block, shared = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k_in, v_in, keep = k_in + shared * T * D, v_in + shared * T * D, keep + shared * G // H * T
    cols = block * SIZE + tl.arange(0, SIZE)
    k, v = load(k_in, cols, T, D), load(v_in, cols, T, D)
    dk, dv = tl.zeros([SIZE, D], tl.float32), tl.zeros([SIZE, D], tl.float32)
    for head in range(shared * G, (shared + 1) * G):
        for start in range(block * SIZE if causal else 0, T, SIZE):
            rows = start + tl.arange(0, SIZE)
            q, do = load(q_in + head * T * D, rows, T, D), load(do_in + head * T * D, rows, T, D)
            lse = tl.load(lse_in + head * T + rows, mask=rows < T, other=0.0)[:, None]
            delta = tl.load(delta_in + head * T + rows, mask=rows < T, other=0.0)[:, None]
            p = tl.exp(scores(q, k, rows, cols, keep, T, scale, causal) - lse)
            ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
            dv += tl.dot(tl.trans(p).to(do.dtype), do, input_precision="ieee")
            dk += tl.dot(tl.trans(ds).to(q.dtype), q, input_precision="ieee")
    store(dk_out + shared * T * D, cols, scale * dk, T, D)
    store(dv_out + shared * T * D, cols, dv, T, D)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, causal: bool, size: int
    ) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        B, H, T, D = q.shape
        o, lse = torch.empty_like(q), torch.empty(B, H, T, device=q.device)
        ctx.numbers = T, D**-0.5
        ctx.shape = {"H": H, "G": H // k.shape[1], "D": D, "SIZE": size, "causal": causal}
        forward_kernel[triton.cdiv(T, size), B * H](q, k, v, keep, o, lse, *ctx.numbers, **ctx.shape)
        ctx.save_for_backward(q, k, v, keep, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, keep, o, lse = ctx.saved_tensors
        grad, (B, KV), blocks = grad.contiguous(), k.shape[:2], triton.cdiv(q.shape[2], ctx.shape["SIZE"])
        delta = (grad.float() * o.float()).sum(-1)  # of a row: the sum over its keys of p times dp
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        given = q, k, v, keep, grad, lse, delta
        queries_kernel[blocks, B * q.shape[1]](*given, dq, *ctx.numbers, **ctx.shape)
        keys_kernel[blocks, B * KV](*given, dk, dv, *ctx.numbers, **ctx.shape)
        return dq, dk, dv, None, None, None


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor | None = None,
    causal: bool = True,
    size: int = 32,
) -> torch.Tensor:
    """Attention of queries to keys and values, exact; its memory grows with the tokens, not with their square.

    Args:
        q: (B, H, T, D), of any floating dtype.
        k: (B, H / G, T, D), each head for G heads of queries that follow each other.
        v: as k.
        keep: (B, T), False for keys that nobody sees, as those of padding; default: all are seen.
        causal: whether a query sees the keys up to its own alone.
        size: queries and keys in a block.
    Returns:
        (B, H, T, D); zeros where a query sees no key.
    Raises:
        ValueError: D or size is no power of two from 16 on, or the heads do not divide.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads of queries cannot share {k.shape[1]} heads of keys")
    for name, number in (("D", q.shape[-1]), ("size", size)):
        if number < 16 or number & (number - 1):
            raise ValueError(f"{name} is {number}, and a block of the kernels needs a power of two, 16 or more")
    keep = q.new_ones(q.shape[0], q.shape[2], dtype=torch.int8) if keep is None else keep.to(torch.int8).contiguous()
    return _Flash.apply(q, k, v, keep, causal, size)
