"""Optimizers' state per parameter, and the cost of their step. Bytes, FLOPs.

Sources: Adam in mixed precision, ZeRO, arXiv 1910.02054 section 3.1; Adafactor, arXiv 1804.04235 section 3 (a sum for
each row and each column, and no momentum); block-wise 8-bit Adam, arXiv 2110.02861 section 2 with bitsandbytes' blocks
of 256; Muon, arXiv 2502.16982 section 2 (Muon for the blocks' matrices, AdamW for all else).
"""

from course_lib.planning.models import Model

JOINT = ("gpt2", "bloom", "gpt_neox", "falcon", "phi3")
"""Architectures whose queries, keys and values come from one matrix."""
QUANTIZED = 2 * (1 + 4 / 256)
"""Two moments of a byte each, and for every block of 256 an fp32 scale each."""
WITHOUT_STATES = 14
"""Bytes that an update moves per parameter beside its states: fp32 weight read and written, the gradient read, the
16-bit weight written. States are read and written too: Adam moves 30."""
NEWTON_SCHULZ = 5
"""Iterations that make a momentum orthogonal: Muon's default."""


def matrices(model: Model) -> list[tuple[int, int, int]]:
    """Rows, columns and number of the weight matrices of one block, each expert's by itself."""
    h, queries, keys, inside = model.hidden, model.attention_width, model.kv_heads * model.head_dim, model.ffn
    projections = [(queries + 2 * keys, h, 1)] if model.family in JOINT else [(queries, h, 1), (keys, h, 2)]
    joined = model.experts > 1 or model.family == "phi3"  # gate and up in one
    into = ([(2 * inside, h, model.experts)] if joined else [(inside, h, 2)]) if model.gated else [(inside, h, 1)]
    router = [(model.experts, h, 1)] if model.experts > 1 else []
    return [*projections, (h, queries, 1), *into, (h, inside, model.experts), *router]


def bytes_per_parameter(optimizer: str, model: Model) -> tuple[float, float]:
    """Bytes of state: averages over a block's parameters, and over those outside the blocks; masters not counted.

    Args:
        optimizer: of :data:`course_lib.planning.plan.OPTIMIZERS`.
        model: the model.
    """
    if optimizer in ("adafactor", "muon"):
        known = matrices(model)
        inside = sum(rows * columns * count for rows, columns, count in known)
        vectors = model.layer - inside
        if optimizer == "muon":
            return (4 * inside + 8 * vectors) / model.layer, 8.0
        sums = sum((rows + columns) * count for rows, columns, count in known)
        outside = 0
        for size in (model.embedding, model.head):
            for rows in (model.vocab, model.context):  # the matrices of tokens and of positions
                if rows and size >= rows * model.hidden:
                    outside, size = outside + rows + model.hidden, size - rows * model.hidden
            outside += size
        return 4 * (sums + vectors) / model.layer, 4 * outside / (model.embedding + model.head)
    same = {"adamw": 8.0, "adamw-8bit": QUANTIZED, "sgd-momentum": 4.0, "sgd": 0.0}[optimizer]
    return same, same


def traffic(optimizer: str, model: Model) -> float:
    """Bytes per parameter that an update moves, as an average over the model."""
    block, outside = bytes_per_parameter(optimizer, model)
    blocks = model.layers * model.layer / model.parameters
    return WITHOUT_STATES + 2 * (blocks * block + (1 - blocks) * outside)


def flops(optimizer: str, model: Model) -> float:
    """FLOPs of a step beyond moving bytes, of the whole model: Muon's, which multiplies whole matrices.

    An iteration on m x n, m the smaller, is two products of m x m x n and one of m x m x m.
    """
    if optimizer != "muon":
        return 0.0
    total = 0.0
    for rows, columns, count in matrices(model):
        m, n = sorted((rows, columns))
        total += NEWTON_SCHULZ * (4 * m * m * n + 2 * m**3) * count
    return model.layers * total
