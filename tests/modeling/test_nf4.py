"""NF4: the published levels, exact where it can be, its error bounded by a step, its bytes counted."""

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from course_lib.modeling import nf4

PUBLISHED = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
"""Appendix E of arXiv 2305.14314, and bitsandbytes."""


def there_and_back(weight):
    return nf4.dequantize(nf4.quantize(weight), weight.shape)


def test_the_levels_are_the_published_ones():
    assert torch.allclose(nf4.LEVELS, torch.tensor(PUBLISHED), rtol=0, atol=1e-7)
    assert (nf4.LEVELS.diff() > 0).all() and (nf4.LEVELS == 0).sum() == 1


def test_values_of_levels_come_back_exactly():
    """Each block with the same magnitude, so that nothing is left for the 8 bits to round."""
    codes = torch.randint(0, 16, (512, 64), generator=torch.Generator().manual_seed(0))
    codes[:, 0] = 15
    weight = 0.375 * nf4.LEVELS[codes]
    assert torch.equal(there_and_back(weight), weight)
    assert torch.equal(there_and_back(torch.zeros(3, 50)), torch.zeros(3, 50))


@pytest.mark.parametrize("shape", [(1024, 1024), (48, 100), (7, 3)])
def test_the_error_is_half_a_step_and_the_bytes_are_counted(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    largest = rows.abs().amax(1, keepdim=True)
    packed = nf4.quantize(weight)
    back = torch.nn.functional.pad(nf4.dequantize(packed, weight.shape).flatten(), (0, -weight.numel() % 64))
    half = nf4.LEVELS.diff().max() / 2
    deviation = (largest - largest.mean()).abs().max()
    scale = deviation / 16  # float8_e4m3fn has three bits after the first
    assert ((back.view(-1, 64) - rows).abs() <= half * largest + scale + 1e-6).all()
    assert packed.dtype == torch.uint8 and packed.numel() == nf4.size_in_bytes(weight.numel())
    if weight.numel() == 2**20:
        assert 8 * packed.numel() / weight.numel() == 4 + 8 / 64 + 32 / (64 * 256) + 32 / 2**20
        assert 8 * packed.numel() / weight.numel() == pytest.approx(4.127, abs=1e-3)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_a_layer_computes_as_with_its_unpacked_weight_and_keeps_bytes_alone(kind):
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 96) if kind == "linear" else Conv1D(96, 48)
    packed = nf4.Nf4Linear(layer)
    plain = packed.dequantized()
    assert type(plain) is type(layer) and not torch.equal(plain.weight, layer.weight)
    saved = []
    x = torch.randn(5, 48, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = packed(x)
    assert [(t.dtype, t.numel()) for t in saved] == [(torch.uint8, nf4.size_in_bytes(48 * 96))]
    other = x.detach().clone().requires_grad_()
    expected = plain(other)
    assert torch.allclose(out, expected, atol=1e-6)
    seed = torch.randn_like(out)
    out.backward(seed)
    expected.backward(seed)
    assert torch.allclose(x.grad, other.grad, atol=1e-6)
    assert all(not p.requires_grad and p.grad is None for p in packed.parameters())
