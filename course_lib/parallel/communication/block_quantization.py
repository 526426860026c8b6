"""Numbers in 8 or 4 bits: a whole number each, and a float32 scale per block.

A block of B numbers x has the scale s = max |x| / L, with L = 127 for 8 bits and 7 for 4; each travels as round(x / s),
from -L to L, and arrives as a multiple of s, at most s / 2 off. The blocks are small because one large number makes
all others of its block coarse.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), section 2.1; symmetric and
linear as in ZeRO++ (arXiv 2306.10209), section 3.1.
"""

import torch
from torch import Tensor

from course_lib.errors import ConfigError


def quantize(values: Tensor, bits: int, block: int) -> Tensor:
    """Rows of numbers as rows of bytes: first the scales, then the codes.

    Args:
        values: (R, E) of a floating-point dtype; E is a multiple of ``block``.
        bits: 8, or 4, where two codes share a byte.
        block: B; even for 4 bits.
    Returns:
        (R, :func:`quantized_bytes` of E) uint8. A block with a number that is not finite comes back as NaN.
    Raises:
        ConfigError: other bits, or a block that does not fit.
    """
    check(bits, block)
    blocks = values.float().view(values.shape[0], -1, block)  # (R, E / B, B)
    scales = blocks.abs().amax(-1, keepdim=True) / levels(bits)  # (R, E / B, 1)
    codes = (blocks / scales.masked_fill(scales == 0, 1)).round()  # of a block of zeros: zeros
    codes = codes.nan_to_num(0).to(torch.int8).view(values.shape[0], -1)  # what is not finite is in the scale: 0 * inf
    if bits == 4:
        low, high = (codes + 8).view(torch.uint8).view(values.shape[0], -1, 2).unbind(-1)  # 1 to 15
        packed = low | (high << 4)
    else:
        packed = codes.view(torch.uint8)
    return torch.cat([scales.view(values.shape[0], -1).view(torch.uint8), packed], dim=1)


def dequantize(packed: Tensor, bits: int, block: int) -> Tensor:
    """The inverse of :func:`quantize`, except for what rounding has lost.

    Args:
        packed: (R, bytes) uint8.
        bits: as for :func:`quantize`.
        block: as for :func:`quantize`.
    Returns:
        (R, E) float32.
    """
    rows, size = packed.shape
    elements = size * block // quantized_bytes(block, bits, block)
    split = elements // block * 4
    scales, codes = packed[:, :split].contiguous().view(torch.float32), packed[:, split:]  # (R, E / B), (R, …)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).view(torch.int8) - 8
    else:
        codes = codes.contiguous().view(torch.int8)
    return (codes.reshape(rows, -1, block) * scales.unsqueeze(-1)).view(rows, elements)


def levels(bits: int) -> int:
    """The largest code: 127 for 8 bits, 7 for 4."""
    return 2 ** (bits - 1) - 1


def quantized_bytes(elements: int, bits: int, block: int) -> int:
    """Bytes of so many numbers, a multiple of the block: bits / 8 each, and 4 for each block."""
    return elements * bits // 8 + elements // block * 4


def check(bits: int, block: int) -> None:
    """Refuse what cannot be packed.

    Raises:
        ConfigError: bits other than 8 and 4, or a block of odd size.
    """
    if bits not in (8, 4):
        raise ConfigError(f"quantization to {bits} bits", "use 8 or 4")
    if block < 2 or block % 2:
        raise ConfigError(f"quantization in blocks of {block}", "use an even number of 2 or more")
