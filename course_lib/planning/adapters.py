"""LoRA and QLoRA: what is trained, what stays as it is, and in how many bytes.

LoRA: arXiv 2106.09685 section 4.1: beside a frozen matrix of n x m two of n x r and r x m are trained. QLoRA: arXiv
2305.14314 sections 3 and 4: adapters on all linear layers of the blocks; these are kept in 4 bits with an 8-bit scale
for each block of 64, and an fp32 scale for 256 of those.
"""

from course_lib.planning.models import Model
from course_lib.planning.optimizers import matrices

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per quantized parameter: 4 bits, and 0.127 for scales (arXiv 2305.14314 section 3, double quantization)."""
ADAPTER = 4
"""Bytes of an adapter's weight: PEFT keeps them in fp32 (``autocast_adapter_dtype``)."""


def of_a_block(model: Model, rank: int) -> int:
    """Trained parameters of one block: adapters on all its matrices, on each expert's too, but not on a router."""
    return rank * sum(
        (rows + columns) * count
        for rows, columns, count in matrices(model)
        if model.experts == 1 or rows != model.experts
    )


def frozen_bytes(model: Model, quantized: bool, width: int) -> float:
    """Bytes of one block's own weights."""
    inside = sum(
        rows * columns * count
        for rows, columns, count in matrices(model)
        if model.experts == 1 or rows != model.experts
    )
    return width * (model.layer - inside) + (NF4 if quantized else width) * inside


def kept(model: Model, rank: int, tokens: int, width: int) -> float:
    """Bytes that a block's adapters keep for their backward pass beyond the inputs, which the block keeps anyway."""
    used = sum(
        count if model.experts == 1 or count == 1 else count // model.experts * model.experts_per_token
        for rows, _, count in matrices(model)
        if model.experts == 1 or rows != model.experts
    )
    return width * rank * used * tokens


def dequantized(model: Model) -> int:
    """Parameters of the largest matrix, which is there in 16 bits while it is multiplied with."""
    return max(rows * columns for rows, columns, _ in matrices(model))
