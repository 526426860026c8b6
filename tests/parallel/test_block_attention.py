"""Blocks of attention put together, against torch's attention to all keys; by torch's kernel and by scores."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.parallel import block_attention
from course_lib.parallel.block_attention import Block, PartialAttention, PartialGradients, has_kernel

TOKENS, WIDTH = 48, 8
SCALE = WIDTH**-0.5


class CountScores(TorchDispatchMode):
    """How many results of operators end in (queries, keys) of a block."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, tuple | list) else [results]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() >= 4:
                self.count += tensor.shape[-2:] == (TOKENS // 2, TOKENS // 2)
        return results


def inputs(key_heads, dtype=torch.float64, **where):
    torch.manual_seed(0)
    return [torch.randn(2, heads, TOKENS, WIDTH, dtype=dtype, **where) for heads in (4, key_heads, key_heads, 4)]


def halves(masked):
    """Causal attention of all queries in three blocks; with masks that hide nothing more, no kernel takes them."""
    first, second = slice(0, TOKENS // 2), slice(TOKENS // 2, TOKENS)
    mask = torch.ones(2, 1, 1, TOKENS // 2, TOKENS // 2, dtype=torch.bool) if masked else None
    return [(first, first, Block(True, mask)), (second, first, Block(False, mask)), (second, second, Block(True, mask))]


def put_together(query, key, value, gradient, blocks):
    attention = PartialAttention(query, SCALE)
    attention.add(key, value, blocks)
    output = attention.output.to(query.dtype)
    gradients = PartialGradients(gradient, query, output, attention.log_sum, SCALE)
    of_key, of_value = gradients.add(key, value, blocks)
    return output, gradients.of_query, of_key, of_value


@pytest.mark.parametrize("masked", [False, True], ids=["kernel", "scores"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_blocks_put_together_are_the_whole(key_heads, masked):
    *parts, gradient = inputs(key_heads)
    query, key, value = (part.clone().requires_grad_() for part in parts)
    whole = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    whole.backward(gradient)
    assert all(has_kernel(query, block) != masked for _, _, block in halves(masked))
    for ours, torchs in zip(
        put_together(*parts, gradient, halves(masked)), (whole, query.grad, key.grad, value.grad), strict=True
    ):
        torch.testing.assert_close(ours, torchs.detach(), rtol=0, atol=1e-12)


def test_without_a_mask_the_scores_are_never_there():
    counts = {}
    for masked in (False, True):
        with CountScores() as seen:
            put_together(*inputs(4), halves(masked))
        counts[masked] = seen.count
    assert counts[False] == 0 < counts[True]


def test_half_precision_on_a_cpu_is_summed_in_float32():
    query, key, value, _ = inputs(2, torch.bfloat16)
    attention = PartialAttention(query, SCALE)
    attention.add(key, value, halves(False))
    floats = (part.float() for part in (query, key, value))
    wide = scaled_dot_product_attention(*floats, is_causal=True, enable_gqa=True)
    assert attention.output.dtype == torch.float32 and (attention.output - wide).abs().max() < 1e-5


def test_the_operators_for_cuda_take_what_they_are_given(monkeypatch):
    """By their own rules for shapes and dtypes, on tensors without data: there is no GPU here."""
    query, key, value, gradient = inputs(2, torch.bfloat16, device="meta")
    monkeypatch.setattr(block_attention, "has_kernel", lambda *_: True)
    made = put_together(query, key, value, gradient, halves(False))
    assert [tensor.shape for tensor in made] == [query.shape, query.shape, key.shape, value.shape]
    assert [tensor.dtype for tensor in made] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
