"""Work of one block and of the output layer: FLOPs, memory traffic, and seconds by roofline.

Matmuls run at the share of peak that whole training steps reach, fused attention at its kernel's rate, everything
else moves bytes. A one-input operation reads one tensor and writes one in the forward pass, reads two and writes
one in the backward: so a backward moves 3/2 of its forward. All counts are of 16-bit activations.

Sources: roofline, Williams et al. 2009; matmul FLOPs, arXiv 2104.04473 appendix; attention's backward with its
recomputation, 5 matmuls to the forward's 2, arXiv 2307.08691 section 3.
"""

from dataclasses import dataclass

from course_lib.planning import adapters, vocabulary
from course_lib.planning.hardware import Accelerator
from course_lib.planning.models import Model
from course_lib.planning.plan import Plan

FUSED_BETWEEN = 5
"""Operations of a block beside matmuls and attention where they are fused: two norms with what they feed, rotary
positions, the MLP's inside, the last residual sum."""
BACKWARD_OPERATIONS = 1.8
"""Operations of a backward pass to those of its forward."""
COLLECTIVE_OPERATIONS = 1
"""Operations that a collective counts for, by the same runs as :data:`course_lib.planning.hardware.LAUNCH`."""
MEGATRON_OPERATIONS = 2
"""Host's work of a fused operation in Megatron's blocks to that of one in a compiled block: there are autograd
functions around matmuls, random states that are saved and set, hooks, scripted kernels."""
BACKWARD_TRAFFIC = 1.5
"""Bytes that element-wise work moves in the backward pass, to those of the forward."""


@dataclass(frozen=True)
class Seconds:
    """Time of one pass on one GPU, by what it is spent on."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.matmul + self.attention + self.elementwise

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.matmul + other.matmul, self.attention + other.attention, self.elementwise + other.elementwise
        )

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(self.matmul * factor, self.attention * factor, self.elementwise * factor)


def local_tokens(plan: Plan) -> int:
    """Tokens of one micro-batch on one GPU."""
    return plan.micro_batch * (plan.sequence_length // plan.context)


def traffic(model: Model, plan: Plan) -> float:
    """Bytes that one token moves in the forward pass of one block outside the matmuls and fused attention.

    Fused, each norm, residual sum, activation and rotation is one kernel. In plain PyTorch operations an RMS norm is
    six of them, partly in fp32 (36 bytes per element), a rotation five (20), SwiGLU two (10), a written-out GELU
    eight (36).
    """
    h, f = model.hidden, model.ffn * model.experts_per_token
    rotated = model.head_dim * (model.heads + model.kv_heads) if model.rotary else 0
    if plan.compiled:
        norm, rotate, inside = 4, 4, 6 if model.gated else 4
    else:
        norm, rotate = (36 if model.rms_norm else 4), 20
        inside = 10 if model.gated else 36 if model.activation == "gelu_new" else 4
    whole = h * (2 * norm + 2 * 6 + (2 * (1 if plan.compiled else 5) if model.dropout else 0))
    split = f * inside + rotated * rotate
    return whole / (plan.tensor if plan.sequence_parallel else 1) + split / plan.tensor


def block(model: Model, plan: Plan, chip: Accelerator) -> tuple[Seconds, Seconds]:
    """Forward and backward of one block on one micro-batch, nothing recomputed, nothing communicated."""
    tokens, t = local_tokens(plan), plan.tensor
    rate = chip.matmul_rate(plan.precision)
    weights = model.layer_matmul / t
    loaded = 2 * (weights + tokens * (2 * model.hidden + (model.attention_width + model.ffn) / t)) / chip.memory_rate
    matmul = max(2 * weights * tokens / rate, loaded)
    elementwise = traffic(model, plan) * tokens / chip.memory_rate

    scores = model.heads * plan.sequence_length * tokens / t  # one for each query, head and key
    flops = 4 * model.head_dim * scores
    if plan.flash:
        seen = 0.5 if model.causal else 1.0  # the kernel skips what the mask hides
        forward, backward = seen * flops / chip.attention[0], 2.5 * seen * flops / chip.attention[1]
    else:
        # written by the first matmul, softmax and dropout each read and written, a byte of mask, read by the second
        moved = (2 + 4 + (5 if model.dropout else 0) + 2) * scores / chip.memory_rate
        forward, backward = flops / rate + moved, 2 * flops / rate + BACKWARD_TRAFFIC * moved
    if not plan.lora_rank:
        return (Seconds(matmul, forward, elementwise), Seconds(2 * matmul, backward, BACKWARD_TRAFFIC * elementwise))
    # Frozen matrices have no gradient of their own; in 4 bits they are made 16 bits for each of their products.
    beside = 2 * adapters.of_a_block(model, plan.lora_rank) / t * tokens / rate
    again = (adapters.NF4 + 4) * weights / chip.memory_rate if plan.base_bits == 4 else 0.0
    return (
        Seconds(matmul + beside, forward, elementwise + again),
        Seconds(matmul + 2 * beside, backward, BACKWARD_TRAFFIC * elementwise + again),
    )


def operations(model: Model, plan: Plan) -> tuple[float, float]:
    """GPU operations that the host starts for one block and one micro-batch: forward, backward.

    In plain PyTorch operations: each matmul and fused attention one, an RMS norm 8 (with its casts to and from fp32), a
    LayerNorm 1, rotary positions of queries and keys 10, SwiGLU 2, a written-out GELU 8, a dropout 1, two residual
    sums, attention without a fused kernel 5; autocast casts once more before each matmul and twice beside each norm.
    Fused, all between two matmuls is one, and counts twice under Megatron. The backward has 1.8 times as many, as
    counted on transformers' Llama block (40 and 73; tests/planning/test_launching.py counts again).
    """
    matmuls = 7 if model.gated else 6
    attention = 1 if plan.flash else 5 + (1 if model.dropout else 0)
    if plan.compiled:
        forward = matmuls + attention + FUSED_BETWEEN
        if plan.engine == "megatron":
            forward *= MEGATRON_OPERATIONS
    else:
        norm = 8 if model.rms_norm else 1
        inside = 2 if model.gated else 8 if model.activation == "gelu_new" else 1
        forward = (
            matmuls + attention + 2 * norm + (10 if model.rotary else 0) + inside + 2 + (2 if model.dropout else 0)
        )
        if plan.engine == "ddp" and plan.precision in ("bf16", "fp16"):
            forward += matmuls + 4
    return forward, BACKWARD_OPERATIONS * forward


def launching(
    model: Model, plan: Plan, tensor_collectives: tuple[int, int], launch: float
) -> tuple[float, float, float]:
    """Seconds in which the host starts one block's work on one micro-batch: forward, backward, and what is done again.

    The host runs ahead of the GPU, and what it needs is seen only where the GPU has less to do: small models, small
    micro-batches, work split over many tensor ranks.

    Args:
        model: the model.
        plan: the layout.
        tensor_collectives: that tensor and context parallelism call in the forward and in the backward pass.
        launch: seconds of the host for one operation.
    """
    forward, backward = (
        count + COLLECTIVE_OPERATIONS * calls
        for count, calls in zip(operations(model, plan), tensor_collectives, strict=True)
    )
    if plan.stage == 3 and plan.pipeline == 1 and plan.shards > 1:  # gathered twice, scattered once
        forward, backward = forward + COLLECTIVE_OPERATIONS, backward + 2 * COLLECTIVE_OPERATIONS
    again = {"full": 1.0, "alternate": 0.5, "operators": 1.0}.get(plan.checkpointing, 0.0) * forward
    return launch * forward, launch * backward, launch * again


def recomputed(model: Model, plan: Plan, chip: Accelerator) -> Seconds:
    """Work that the backward pass of an average block computes once more."""
    forward, _ = block(model, plan, chip)
    if plan.checkpointing in ("full", "alternate"):
        return forward * (1.0 if plan.checkpointing == "full" else 0.5)
    if plan.checkpointing == "operators":
        return Seconds(
            forward.matmul * second_matmuls(model), 0.0 if plan.flash else forward.attention, forward.elementwise
        )
    if plan.checkpointing == "selective" and not plan.flash:
        return Seconds(attention=forward.attention)
    return Seconds()


def second_matmuls(model: Model) -> float:
    """Share of a block's matmul FLOPs that "operators" recomputes: every second one, but not what ends the block.

    In the order of a Llama block: queries, keys, values, output, gate, up, down; keys, output and up are not kept.
    Source: torchtitan, ``_apply_ac_to_transformer_block`` in torchtitan/parallelisms/parallelize_llama.py.
    """
    queries, keys = model.attention_width, model.kv_heads * model.head_dim
    widths = [queries, keys, keys, queries, *[model.ffn * model.experts_per_token] * (3 if model.gated else 2)]
    return sum(widths[1:-1:2]) / sum(widths)


def output_layer(model: Model, plan: Plan, chip: Accelerator) -> tuple[Seconds, Seconds]:
    """Forward and backward of the last norm, the logits and the loss of one micro-batch.

    The loss in plain PyTorch casts the logits to fp32 and takes their log-softmax: 14 bytes per logit each way; fused,
    6 and 4. In chunks the backward pass does the forward's again. Together with the output layer all is done in the
    forward pass, by fused kernels. Matmuls in 16 bits, also where the blocks' are in 8.
    """
    tokens = local_tokens(plan)
    dtype = plan.precision if plan.precision != "fp8" else chip.half_precision()
    split = vocabulary.ranks_of_vocabulary(model, plan)
    matmul = 2 * model.head_matmul / split * tokens / chip.matmul_rate(dtype)
    logits = tokens * (vocabulary.columns(model, plan) if model.has_head else 0) / chip.memory_rate
    there, back = {"plain": (6, 4) if plan.compiled else (14, 14), "chunked": (14, 28), "linear": (6, 4)}[plan.loss]
    return Seconds(matmul, 0, there * logits), Seconds(2 * matmul, 0, back * logits)
