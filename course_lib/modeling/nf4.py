"""NF4: frozen weights in 4 bits, one of 16 levels times the largest magnitude of their block of 64.

The levels are quantiles of the normal distribution, so that weights, which are about normal, use all of them alike.
The blocks' magnitudes are kept in 8 bits in their turn (double quantization), in blocks of 256 about their mean. Of n
weights n / 2 + n / 64 + 4 n / (64 * 256) bytes are left, 4.127 bits each. Dettmers et al. 2023, *QLoRA* (arXiv
2305.14314), section 3 and appendix E. The 8-bit numbers are float8_e4m3fn, where bitsandbytes has a table of its own:
the levels are the same, and files are not exchanged. On GPUs bitsandbytes and torchao do this in fused kernels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

BLOCK, SCALES = 64, 256
"""Weights that share a magnitude, and magnitudes that share a step."""
MAX8 = torch.finfo(torch.float8_e4m3fn).max


def levels() -> Tensor:
    """The 16 levels, fp32, from -1 to 1, zero among them: 8 quantiles of a half of the normal distribution and 7 of
    the other, each half divided by its own largest (appendix E; the tail left out is the mean of 1/32 and 1/30)."""
    end = 0.9677083  # 1 - (1/32 + 1/30) / 2, as far as the published code has it
    above, below = (torch.special.ndtri(torch.linspace(end, 0.5, n).double())[:-1] for n in (9, 8))
    both = torch.cat([above, -below, torch.zeros(1, dtype=torch.float64)]).sort().values
    return (both / both.max()).float()


LEVELS = levels()
BETWEEN = (LEVELS[1:] + LEVELS[:-1]) / 2
"""Where one level's values end and the next one's begin."""
PAIRS = torch.stack([LEVELS[torch.arange(256) // 16], LEVELS[torch.arange(256) % 16]], dim=1)
"""The two levels that a byte holds, (256, 2)."""


def size_in_bytes(numel: int) -> int:
    """Bytes of a quantized tensor: levels, 8-bit scales, their steps, and their mean."""
    blocks = -(-numel // BLOCK)
    return blocks * BLOCK // 2 + blocks + 4 * -(-blocks // SCALES) + 4


def quantize(weight: Tensor) -> Tensor:
    """A tensor as bytes, uint8, 1-D: two levels a byte, scales (float8), their steps and their mean (fp32)."""
    flat = weight.detach().float().flatten()
    rows = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    largest = rows.abs().amax(1)  # (blocks,)
    codes = torch.bucketize(
        rows / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None], BETWEEN.to(rows.device)
    ).view(-1, 2)
    mean = largest.mean()
    about = F.pad(largest - mean, (0, -largest.numel() % SCALES)).view(-1, SCALES)
    steps = about.abs().amax(1) / MAX8
    scales = (about / steps.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).to(torch.float8_e4m3fn)
    return torch.cat(
        [
            (16 * codes[:, 0] + codes[:, 1]).to(torch.uint8),
            scales.view(-1)[: largest.numel()].view(torch.uint8),
            steps.view(torch.uint8),
            mean.view(1).view(torch.uint8),
        ]
    )


def dequantize(packed: Tensor, shape: torch.Size) -> Tensor:
    """Inverse of :func:`quantize` except for rounding: a tensor of that shape, fp32."""
    blocks = -(-shape.numel() // BLOCK)
    sizes = [blocks * BLOCK // 2, blocks, 4 * -(-blocks // SCALES), 4]
    codes, scales, steps, mean = packed.split(sizes)
    steps, mean = (part.clone().view(torch.float32) for part in (steps, mean))  # a copy begins at a multiple of 4
    about = scales.view(torch.float8_e4m3fn).float() * steps.repeat_interleave(SCALES)[:blocks]
    rows = PAIRS.to(packed.device)[codes.int()].view(-1, BLOCK) * (about + mean)[:, None]
    return rows.view(-1)[: shape.numel()].view(shape)


class _Product(torch.autograd.Function):
    """x W^T of packed W, which is unpacked in the forward, and again in the backward: only its bytes are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return F.linear(x, dequantize(packed, shape).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ dequantize(packed, ctx.shape).to(gradient.dtype), None, None


class Nf4Linear(nn.Module):
    """A frozen linear layer with its weight in NF4.

    Args:
        layer: ``nn.Linear`` or GPT-2's ``Conv1D``. Its bias stays as it is.

    Attributes:
        packed: uint8, 1-D, what :func:`quantize` made of the weight (m, n).
    """

    def __init__(self, layer: nn.Linear | Conv1D):
        super().__init__()
        self.kind = type(layer)
        weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        self.out_features, self.in_features = int(weight.shape[0]), int(weight.shape[1])
        self.packed = nn.Parameter(quantize(weight), requires_grad=False)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """Unpacked, fp32 (m, n)."""
        return dequantize(self.packed, torch.Size([self.out_features, self.in_features]))

    def forward(self, x: Tensor) -> Tensor:
        out = _Product.apply(x, self.packed, torch.Size([self.out_features, self.in_features]))
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def dequantized(self) -> nn.Linear | Conv1D:
        """A layer of the kind that it was, with the unpacked weight."""
        if issubclass(self.kind, Conv1D):
            layer: nn.Linear | Conv1D = Conv1D(self.out_features, self.in_features)
            layer.weight, layer.bias = nn.Parameter(self.weight.T.contiguous()), self.bias
        else:
            layer = nn.Linear(self.in_features, self.out_features, bias=False)
            layer.weight, layer.bias = nn.Parameter(self.weight), self.bias
        return layer.requires_grad_(False)


def quantize_linear(model: nn.Module, names: list[str]) -> None:
    """Put the weights of some linear layers into NF4, in place, one layer after another."""
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Nf4Linear(model.get_submodule(name)))  # type: ignore[arg-type]
