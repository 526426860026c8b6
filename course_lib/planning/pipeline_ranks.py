"""Share of each pipeline rank: its blocks, the model's ends, and micro-batches in flight."""

from dataclasses import dataclass

from course_lib.parallel.pipeline.partition import blocks_per_stage
from course_lib.planning.plan import Plan


@dataclass(frozen=True)
class PipelineRank:
    """One rank's part of a model.

    Attributes:
        rank: its number.
        blocks: that it holds, of all its stages.
        embeds: whether the embedding is on it.
        predicts: whether the output layer is.
    """

    rank: int
    blocks: int
    embeds: bool
    predicts: bool


def pipeline_ranks(plan: Plan, layers: int) -> tuple[PipelineRank, ...]:
    """Every pipeline rank's part; together they have all layers, once.

    Raises:
        ConfigError: fewer layers than stages.
    """
    ranks = plan.pipeline
    if plan.schedule == "zbv" and ranks > 1:  # a V: down the ranks and up again, so that the first has both ends
        blocks = blocks_per_stage(layers, 2 * ranks)
        return tuple(
            PipelineRank(rank, blocks[rank] + blocks[-1 - rank], rank == 0, rank == 0) for rank in range(ranks)
        )
    blocks = blocks_per_stage(layers, ranks * plan.virtual)
    return tuple(PipelineRank(rank, sum(blocks[rank::ranks]), rank == 0, rank == ranks - 1) for rank in range(ranks))


def distinct(ranks: tuple[PipelineRank, ...]) -> list[PipelineRank]:
    """The first rank of each kind: of those with equal parts it holds the most micro-batches."""
    kinds: dict[tuple, PipelineRank] = {}
    for rank in ranks:
        kinds.setdefault((rank.blocks, rank.embeds, rank.predicts), rank)
    return list(kinds.values())


def in_flight(schedule: str, ranks: int, microbatches: int, virtual: int = 1, rank: int = 0) -> float:
    """Micro-batches whose activations a pipeline rank holds at the peak, in units of its whole share.

    Those of zero-bubble schedules count until their weight gradients are done.

    Source: arXiv 2104.04473 section 2.2 (1F1B, GPipe; interleaved from its warm-up, as in arXiv 2205.05198 section
    4.2.3), arXiv 2401.10241 table 2 and section 6 (zero bubble).
    """
    warm_up = 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1  # stages' forwards before the first backward
    limit = {
        "gpipe": microbatches,
        "1f1b": ranks - rank,
        "zb_h1": ranks,
        "zb_h2": 2 * ranks - 1,
        "zbv": ranks,
        "interleaved": warm_up / virtual,
    }[schedule]
    return min(limit, microbatches)
