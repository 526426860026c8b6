"""FlashAttention-2 as Triton kernels, which Triton's interpreter runs here: exact, forward and backward."""

import os
import subprocess
import sys

import pytest

CASES = """
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from course_lib.modeling.flash_kernels import flash_attention

class Largest(TorchDispatchMode):
    elements = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if torch.is_tensor(tensor) and tensor.is_floating_point():  # the interpreter copies bytes
                Largest.elements = max(Largest.elements, tensor.numel())
        return result

def inputs(H, KV, T, D):
    torch.manual_seed(0)
    return [torch.randn(2, heads, T, D, requires_grad=True) for heads in (H, KV, KV)]

def with_gradients(out, given):
    return [out, *torch.autograd.grad(out, given, torch.linspace(-1, 1, out.numel()).view_as(out))]

def apart(H, KV, T, D, causal, padding, size):
    q, k, v = inputs(H, KV, T, D)
    keep = torch.ones(2, T, dtype=torch.bool)
    keep[0, T - padding:] = False
    seen = keep[:, None, None, :] & torch.ones(T, T, dtype=torch.bool).tril(0 if causal else T)
    right = with_gradients(F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True), (q, k, v))
    ours = with_gradients(flash_attention(q, k, v, keep, causal, size), (q, k, v))
    return max((a - b).abs().max().item() for a, b in zip(ours, right, strict=True))
"""


def interpreted(code):
    """What a process prints whose Triton interprets; the variable has to be there before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", CASES + code],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()


def test_equal_to_torchs_attention_and_never_a_matrix_of_scores():
    cases = [
        (2, 2, 32, 16, False, 0, 16),
        (2, 2, 40, 16, True, 0, 16),
        (4, 2, 40, 16, True, 0, 32),
        (4, 1, 33, 32, True, 7, 16),
        (2, 2, 20, 16, False, 9, 32),
    ]
    code = f"""
for case in {cases}:
    print(apart(*case))
q, k, v = inputs(1, 1, 96, 16)
with Largest():
    with_gradients(flash_attention(q[:1], k[:1], v[:1]), (q, k, v))
print(Largest.elements < 96 * 96 / 2)
"""
    *off, small = interpreted(code)
    assert len(off) == len(cases) and max(map(float, off)) < 3e-6 and small == "True"


def test_a_query_that_sees_no_key_gives_zeros_and_no_nan():
    code = """
q, k, v = inputs(2, 2, 20, 16)
keep = torch.zeros(2, 20, dtype=torch.bool)
keep[1] = True
out, *gradients = with_gradients(flash_attention(q, k, v, keep, True, 16), (q, k, v))
print(out[0].abs().max().item(), all(g.isfinite().all() and not g[0].any() for g in gradients))
"""
    assert interpreted(code) == ["0.0 True"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("inputs(3, 2, 16, 16)", "3 heads of queries cannot share 2 heads of keys"),
        ("inputs(2, 2, 16, 24)", "D is 24, and a block of the kernels needs a power of two, 16 or more"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(call, said):
    code = f"""
try:
    flash_attention(*{call})
except ValueError as error:
    print(error)
"""
    assert interpreted(code) == [said]
