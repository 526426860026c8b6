"""Collectives inside one block, of tensor, context and expert ranks: how long they take, and what of it nothing hides.

A collective that is cut into chunks moves one chunk while the matmul, or attention, works on another. Of n chunks the
first (or, before a reduction, the last) is there with nothing to move, so that n - 1 chunks move behind n - 1 chunks
of work, and behind the work that they feed or come from alone: a small matmul does not hide a large sum.

Sources: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models" (ASPLOS 2023), sections 5.1 and 5.2 (tensor ranks: what PyTorch calls async TP and Transformer Engine
userbuffers); ring attention, arXiv 2310.01889 section 3; keys and values gathered first, arXiv 2407.21783 section
3.3.2; heads for sequence, DeepSpeed-Ulysses, arXiv 2309.14509 section 3.1.
"""

from course_lib.planning import activations, vocabulary, work
from course_lib.planning.hardware import NETWORK_EFFICIENCY, NETWORK_LATENCY, Cluster
from course_lib.planning.models import Model
from course_lib.planning.plan import Plan

BUS_FACTOR = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
    "hypercube": lambda n: 1.0,
}
"""Bytes that a link carries for each byte of a collective's buffer among n ranks."""
MERGED = (38, 10)
"""Bytes per element of attention's result that putting two blocks of it together moves: in plain PyTorch operations,
and fused. Plain: to fp32 (6), a difference (12), a product (8), a difference (12), as in ``_SDPAMerger`` of
torch/distributed/tensor/experimental/_context_parallel/_attention.py."""
SUMMED = (18, 10)
"""Bytes per element of a gradient that adding a block's part to the sum in fp32 moves; plain: to fp32, and the sum."""


def collective(name: str, size: float, members: int, stride: int, cluster: Cluster) -> float:
    """Seconds of one collective.

    Args:
        name: a key of ``BUS_FACTOR``.
        size: bytes of the whole buffer: the input of a reduction, the output of a gather; of an all-to-all what one
            rank has. Between nodes each rank sends what is for others by its own share of the node's cards.
        members: ranks that take part.
        stride: how far apart they are in the order of ranks.
        cluster: decides whether they share a node.
    """
    if members == 1:
        return 0.0
    here = max(1, cluster.gpus_per_node // stride)
    if name == "all_to_all" and members > here:
        away = (members - here) / members * size / neighbour_rate(cluster, members, stride)
        inside = (here - 1) / members * size / cluster.accelerator.bus
        return max(away, inside) + cluster.latency(members, stride)
    return BUS_FACTOR[name](members) * size / cluster.bus(members, stride) + cluster.latency(members, stride)


def neighbour_rate(cluster: Cluster, members: int, stride: int) -> float:
    """Bytes/s from a rank to the next of its group where they lie furthest apart: the link, or one GPU's network card.

    A collective's rings cross a border of nodes by all cards; one rank's message crosses by its own.
    """
    if members * stride <= cluster.gpus_per_node:
        return cluster.accelerator.bus
    return min(cluster.network * NETWORK_EFFICIENCY / cluster.gpus_per_node, cluster.accelerator.bus)


def calls(plan: Plan) -> tuple[int, int]:
    """Collectives that the host starts in the forward and the backward pass of a block."""
    exchanges = 0 if plan.tensor == 1 else 4 if plan.sequence_parallel else 2
    hops = plan.context - 1
    forward, backward = {"ring": (hops, 2 * hops), "gather": (1, 2), "ulysses": (4, 4)}[plan.context_by]
    if plan.expert > 1:  # how many go where, the tokens there, their outputs back
        return 3, 2
    return (exchanges, exchanges) if plan.context == 1 else (exchanges + forward, exchanges + backward)


def exposed(
    model: Model, plan: Plan, cluster: Cluster, forward: work.Seconds, backward: work.Seconds
) -> tuple[float, float]:
    """Seconds of a block's collectives, in its forward and its backward pass, that nothing hides.

    Args:
        model: the model.
        plan: the layout.
        cluster: the hardware.
        forward: what the block computes in its forward pass.
        backward: in its backward pass.
    """
    sums = _tensor(model, plan, cluster, forward)
    # what is recomputed also communicates; "operators" keeps what the reduce-scatters gave
    again = {"full": 1.0, "alternate": 0.5, "operators": 0.5 if plan.sequence_parallel else 1.0}.get(
        plan.checkpointing, 0.0
    )
    first, second = _context(model, plan, cluster, forward, backward)
    attends_again = {"full": 1.0, "alternate": 0.5}.get(plan.checkpointing, 0.0)
    there_and_back = 2 * collective(
        "all_to_all",
        work.local_tokens(plan) * model.experts_per_token * model.hidden * plan.width,
        plan.expert,
        1,
        cluster,
    )
    first += there_and_back
    return sums + first, (1 + again) * sums + second + there_and_back + attends_again * first


def gathered_logits(model: Model, plan: Plan, cluster: Cluster) -> float:
    """Seconds in which tensor ranks gather a micro-batch's logits, where they do; its backward pass moves nothing."""
    if plan.head != "gathered" or not model.has_head or vocabulary.ranks_of_vocabulary(model, plan) == 1:
        return 0.0
    return collective("all_gather", work.local_tokens(plan) * model.vocab * plan.width, plan.tensor, 1, cluster)


def _tensor(model: Model, plan: Plan, cluster: Cluster, forward: work.Seconds) -> float:
    """Of tensor ranks, in the forward pass; the backward pass has as many, and matmuls as large to hide them."""
    if plan.tensor == 1:
        return 0.0
    size = work.local_tokens(plan) * model.hidden * plan.width
    gather, scatter = (collective(name, size, plan.tensor, 1, cluster) for name in ("all_gather", "reduce_scatter"))
    if not plan.overlap_tensor:
        return 2 * (
            gather + scatter if plan.sequence_parallel else collective("all_reduce", size, plan.tensor, 1, cluster)
        )
    chunks = (plan.tensor - 1) / plan.tensor
    # before queries, keys and values; after the output projection; before the MLP; after it
    moved = (gather, scatter, gather, scatter)
    return sum(
        max(0.0, seconds - forward.matmul * share * chunks)
        for seconds, share in zip(moved, matmul_shares(model), strict=True)
    )


def matmul_shares(model: Model) -> tuple[float, float, float, float]:
    """Shares of a block's matmuls: queries, keys and values; attention's output; into the MLP; out of it."""
    queries, keys, inside = (
        model.attention_width,
        model.kv_heads * model.head_dim,
        model.ffn * model.experts_per_token,
    )
    widths = (queries + 2 * keys, queries, inside * (2 if model.gated else 1), inside)
    first, second, third, fourth = (one / sum(widths) for one in widths)
    return first, second, third, fourth


def _context(
    model: Model, plan: Plan, cluster: Cluster, forward: work.Seconds, backward: work.Seconds
) -> tuple[float, float]:
    """Of context ranks, forward and backward, with the putting together of a ring's blocks."""
    ranks = plan.context
    if ranks == 1:
        return 0.0, 0.0
    tokens = work.local_tokens(plan)
    queries, keys = model.attention_width / plan.tensor, 2 * model.kv_heads * model.head_dim / plan.tensor
    if plan.context_by == "ulysses":
        there = activations.key_copies(model, plan)
        both = sum(
            collective("all_to_all", tokens * elements * plan.width, ranks, plan.tensor, cluster)
            for elements in (queries + there * keys, queries)
        )
        return both, both
    moved = collective("all_gather", ranks * tokens * keys * plan.width, ranks, plan.tensor, cluster)
    if plan.context_by == "gather":
        return moved, 2 * moved
    chunks, hop = (ranks - 1) / ranks, moved / (ranks - 1)
    if ranks * plan.tensor > cluster.gpus_per_node:  # every hop waits for the one that crosses the border
        hop = max(hop, tokens * keys * plan.width / neighbour_rate(cluster, ranks, plan.tensor) + NETWORK_LATENCY)
        moved = (ranks - 1) * hop
    rate = cluster.accelerator.memory_rate
    merging = (ranks - 1) * MERGED[plan.compiled] * tokens * queries / rate
    adding = (ranks - 1) * SUMMED[plan.compiled] * tokens * (queries + keys) / rate
    # the gradient of the last keys and values still has to reach their owner
    return (
        max(0.0, moved - forward.attention * chunks) + merging,
        max(0.0, 2 * moved - backward.attention * chunks) + hop + adding,
    )
