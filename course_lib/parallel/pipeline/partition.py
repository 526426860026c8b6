"""Number of blocks of each pipeline stage: one rule for the planner and for ``--split_by blocks``."""

from course_lib.errors import ConfigError


def blocks_per_stage(blocks: int, stages: int) -> tuple[int, ...]:
    """Even numbers of blocks; what is left over goes to the middle stages, one each.

    The ends have the embedding and the output layer besides: 126 blocks on 128 stages are 0, 1 × 126, 0, as Llama 3
    405B was cut (Llama Team, "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2).

    Args:
        blocks: of the model.
        stages: of the pipeline, all ranks' together.
    Raises:
        ConfigError: more stages than there are blocks and ends.
    """
    if not 1 <= stages <= blocks + 2:
        raise ConfigError(f"{stages} pipeline stages of {blocks} blocks", f"take from 1 to {blocks + 2} stages")
    least, left = divmod(blocks, stages)
    first = (stages - left) // 2  # of those with one more
    return tuple(least + (first <= stage < first + left) for stage in range(stages))
