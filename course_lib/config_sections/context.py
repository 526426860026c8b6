"""Rules of rows whose tokens several ranks share."""

import dataclasses
import math

from course_lib.config_sections.learning import DataConfig, ModelConfig, RunConfig
from course_lib.config_sections.parallel import ParallelConfig
from course_lib.errors import ConfigError


def lengths_to_cut(parallel: ParallelConfig, run: RunConfig, data: DataConfig, model: ModelConfig) -> DataConfig:
    """The data with lengths that can be cut, where ``context_parallel_size`` is above 1; else as they are.

    Raises:
        ConfigError: what is asked for beside it has no way to share tokens.
    """
    ranks, tensor = parallel.context_parallel_size, parallel.tensor_parallel_size
    if ranks == 1:
        return data
    if run.training_type == "basic":
        raise ConfigError(
            f"training_type basic runs one process, and {ranks} are to share each row",
            "use --training_type accelerated",
        )
    if run.training_type == "pipeline":
        raise ConfigError(
            "pipelines send whole rows from stage to stage, and context_parallel_size cuts them",
            "use --training_type accelerated",
        )
    if run.num_processes and run.num_processes % (ranks * tensor):
        beside = f" × tensor_parallel_size {tensor}" if tensor > 1 else ""
        raise ConfigError(
            f"num_processes {run.num_processes} is no multiple of context_parallel_size {ranks}{beside}",
            "choose sizes that divide",
        )
    if data.task == "classification":
        raise ConfigError(
            "context parallelism is for losses of every token, and classification reads one of a row",
            "leave out --context_parallel_size, or use --task causal_lm or masked_lm",
        )
    if parallel.expert_parallel_size > 1:
        raise ConfigError(
            "expert_parallel_size shares experts among ranks with rows of their own, and those of "
            "context_parallel_size have the same rows",
            "leave one of the two out",
        )
    if model.torch_compile:
        raise ConfigError("torch_compile does not know the exchanges of context_parallel_size", "leave it out")
    chunks = ranks * (2 if parallel.context_parallel in ("zigzag", "allgather") else 1)  # both deal tokens in zigzag
    if parallel.sequence_parallel:
        chunks = math.lcm(chunks, ranks * tensor)  # a rank's tokens are shared once more between the matrices
    if data.has_one_length and data.max_length % chunks:
        raise ConfigError(
            f"max_length {data.max_length} cannot be cut into {chunks} equal chunks, as "
            f"context_parallel {parallel.context_parallel} on {ranks} ranks does",
            f"use a multiple of {chunks}",
        )
    return dataclasses.replace(data, pad_to_multiple_of=math.lcm(chunks, data.pad_to_multiple_of or 1))
