"""Bytes of activations that one block keeps for its backward pass.

Korthikanti et al., arXiv 2205.05198 section 4, counted the same way for gated MLPs, grouped queries, fused attention
and autocast, which that paper does not have; for a GPT block they are its table 2 to the byte.
"""

from course_lib.planning.models import Model
from course_lib.planning.optimizers import JOINT
from course_lib.planning.plan import Checkpointing, Plan


def of_block(
    model: Model,
    micro_batch: int,
    sequence_length: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    checkpointing: Checkpointing = "none",
    flash: bool = False,
    fused: bool = True,
    width: int = 2,
    autocast: bool = False,
) -> float:
    """Bytes that one block keeps for its backward pass, of one micro-batch on one tensor rank.

    Args:
        model: its sizes; ``dropout`` adds the masks, one byte per element.
        micro_batch: sequences, b.
        sequence_length: tokens per sequence, s; a context rank's share where a sequence is split.
        tensor: tensor-parallel ranks, t.
        sequence_parallel: norms, residuals and masks are split over them too.
        checkpointing: "selective" keeps no attention scores, "full" only the block's input, "operators" that, what
            attention gave and the matmuls that :func:`course_lib.planning.work.second_matmuls` leaves; "alternate"
            is no block's own.
        flash: fused attention: the scores are never kept, but one sum per row and head.
        fused: False: in plain PyTorch operations an RMS norm also keeps its input in fp32 and its result before the
            weight, and a GELU that is written out keeps three steps on the way.
        width: bytes of an activation: 2 or 4.
        autocast: what runs between the blocks stays in fp32, where norms keep it, and each matmul keeps a copy of its
            own in 16 bits.

    Source: arXiv 2205.05198 section 4 and table 2.
    """
    h, tokens, between = model.hidden, micro_batch * sequence_length, 4 if autocast else width
    if checkpointing == "full":
        return between * h * tokens / (tensor if sequence_parallel else 1)
    queries, keys = model.attention_width, model.kv_heads * model.head_dim
    inside = model.ffn * model.experts_per_token
    if checkpointing == "operators":
        kept = width * (2 * queries + keys + inside) + 4 * model.heads  # of gate and up the first
        down = width * h if model.gated else 0  # a seventh matmul is kept, a sixth is not; each rank's part of the sum
        ends = between * h + (2 * width * h if tensor > 1 else 0)  # the input, and what two reduce-scatters gave
        return tokens * (down + ends / (tensor if sequence_parallel else 1) + kept / tensor)
    masks = 1 if model.dropout else 0
    norm = between
    if model.rms_norm and not fused:
        norm = 4 + (4 if autocast else width)  # its input in fp32, and its result before the weight
    fed = 2 * width  # what two norms feed
    if autocast and not fused:
        fed = width * ((1 if model.family in JOINT else 3) + (2 if model.gated else 1))  # a copy for each matmul
    whole = 2 * norm * h + fed * h + 2 * h * masks
    plain = {"relu": width, "gelu_new": (2 if fused else 5) * width}  # ReLU's backward needs its result alone
    mlp = inside * (4 * width if model.gated else plain.get(model.activation, 2 * width))
    split = width * (2 * queries + 2 * keys) + mlp  # q, k and v, what attention gives, the MLP's inside
    if flash:
        split += 4 * model.heads
    elif checkpointing == "none":
        split += (width + (1 + width) * masks) * model.heads * sequence_length  # softmax; its mask, what is left of it
    return tokens * (whole / (tensor if sequence_parallel else 1) + split / tensor)


def key_copies(model: Model, plan: Plan) -> float:
    """Times that Ulysses copies keys and values: as often as there are more ranks than key heads."""
    ranks = plan.context * plan.tensor
    return max(model.kv_heads, ranks) / model.kv_heads if plan.context_by == "ulysses" and plan.context > 1 else 1.0
