"""Vocabulary on one rank: its part of the embedding and of the output layer, and the logits.

Logits in plain PyTorch: as they come, cast to fp32, their log-softmax in fp32. In chunks: as they come and their
gradient, and a chunk of rows in fp32 (``course_lib/training/loss.py``). Joined with the output layer: a chunk of rows
alone, and the gradient of the layer's input and weight, which are made in the forward pass (Liger Kernel, arXiv
2410.10989 section 3.2; ``torch.nn.functional.linear_cross_entropy`` does the same).
"""

from math import ceil, log2

from course_lib.planning.models import Model
from course_lib.planning.pipeline_ranks import PipelineRank
from course_lib.planning.plan import Plan

CHUNK = 64 * 2**20
"""Bytes of the rows that the loss in chunks has in fp32 at a time: ``CHUNK_BYTES`` of course_lib/training/loss.py."""
OF_A_CHUNK = 3
"""Tensors of a chunk in fp32 at the same time: the logits, their log-softmax, their gradient."""


def ranks_of_vocabulary(model: Model, plan: Plan) -> int:
    """Tensor ranks that share embedding and output layer.

    Megatron-LM pads a vocabulary that they do not divide (arXiv 2104.04473 section 5.1); ``course train`` leaves it
    whole then.
    """
    return plan.tensor if plan.head == "parallel" or model.vocab % plan.tensor == 0 else 1


def ends(model: Model, plan: Plan, rank: PipelineRank) -> float:
    """Parameters that a rank has outside the blocks. Positions and norms are whole on each tensor rank."""
    matrix, shared = model.vocab * model.hidden, ranks_of_vocabulary(model, plan)
    held = 0.0
    for there, size in ((rank.embeds, model.embedding), (rank.predicts, model.head)):
        split = matrix if size >= matrix else 0
        held += (split / shared + size - split) if there else 0
    if rank.predicts and not rank.embeds and model.has_head and model.head < matrix:
        held += matrix / shared  # a tied matrix is kept at both ends of a pipeline
    return held


def columns(model: Model, plan: Plan) -> float:
    """Logits of one token that a rank has at the same time."""
    return model.vocab / (plan.tensor if plan.head == "parallel" else 1)


def chunk_rows(model: Model, tokens: int) -> int:
    """Tokens of a chunk whose logits are about as large as all tokens' hidden states: Liger Kernel's rule."""
    return min(tokens, 2 ** ceil(log2(ceil(tokens / ceil(model.vocab / model.hidden)))))


def logits(model: Model, plan: Plan, tokens: int, width: int) -> float:
    """Bytes at the loss, of one micro-batch.

    Args:
        model: the model.
        plan: which loss, and over how many ranks.
        tokens: of the micro-batch on one rank.
        width: bytes of an activation.
    """
    if not model.has_head:
        return 0.0
    here = columns(model, plan)
    if plan.loss == "linear":
        weight = width * model.vocab * model.hidden / ranks_of_vocabulary(model, plan)
        return chunk_rows(model, tokens) * here * width + tokens * model.hidden * width + weight
    if plan.loss == "chunked":
        return 2 * width * tokens * here + OF_A_CHUNK * min(CHUNK, 4 * tokens * here)
    # Compiled: as they come, in fp32, their softmax. In plain operations the gradient takes the place of the first.
    return tokens * here * (width + 8 if plan.compiled else 12)
