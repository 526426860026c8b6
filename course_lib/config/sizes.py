"""Rules of sizes that have to divide: ranks by axis, rows by micro-batch, tokens by rank."""

import dataclasses
import math

from course_lib.config.learning import DataConfig, RunConfig
from course_lib.config.parallel import ParallelConfig, PipelineConfig
from course_lib.errors import ConfigError


def check_ranks(parallel: ParallelConfig, pipeline: PipelineConfig, run: RunConfig) -> None:
    """Refuse axes whose ranks do not multiply to the number of processes.

    Raises:
        ConfigError: the sizes that do not.
    """
    if run.training_type == "basic" and (run.num_processes or 1) > 1:
        raise ConfigError(
            f"training_type basic runs one process, not num_processes={run.num_processes}",
            "use --training_type accelerated",
            cure={"training_type": "accelerated"},
        )
    sizes = {
        name: getattr(parallel, name)
        for name in ("expert_parallel_size", "context_parallel_size", "tensor_parallel_size")
        if getattr(parallel, name) > 1
    }
    if run.num_processes and run.num_processes % math.prod(sizes.values()):
        shown = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"num_processes {run.num_processes} is no multiple of {shown}", "choose sizes that divide")
    if run.training_type == "pipeline":
        _check_pipelines(parallel, pipeline, run)


def _check_pipelines(parallel: ParallelConfig, pipeline: PipelineConfig, run: RunConfig) -> None:
    sizes = pipeline.data_parallel_size, pipeline.pipeline_parallel_size, parallel.tensor_parallel_size
    if all(sizes) and run.num_processes and math.prod(map(int, filter(None, sizes))) != run.num_processes:
        shared = f" × tensor_parallel_size {sizes[2]}" if sizes[2] > 1 else ""
        raise ConfigError(
            f"data_parallel_size {sizes[0]} × pipeline_parallel_size {sizes[1]}{shared} is not "
            f"num_processes {run.num_processes}",
            "leave one of the sizes out",
        )
    if pipeline.pipeline_chunks and pipeline.pipeline_chunks > run.batch_size:
        raise ConfigError(
            f"batch_size {run.batch_size} cannot be cut into {pipeline.pipeline_chunks} pipeline_chunks",
            "raise batch_size, or lower pipeline_chunks",
        )


def lengths_to_cut(parallel: ParallelConfig, data: DataConfig) -> DataConfig:
    """The data with lengths that divide where ranks share a row's tokens; else as they are.

    Raises:
        ConfigError: rows of one length, which does not divide.
    """
    tensor, context = parallel.tensor_parallel_size, parallel.context_parallel_size
    chunks = context * (2 if context > 1 and parallel.context_parallel in ("zigzag", "allgather") else 1)
    if parallel.sequence_parallel:
        chunks = math.lcm(chunks, context * tensor)  # a rank's tokens are shared once more between the matrices
    if chunks == 1:
        return data
    if data.has_one_length and data.max_length % chunks:
        way = f"context_parallel {parallel.context_parallel} on {context} ranks" if context > 1 else ""
        shared = f"sequence_parallel with tensor_parallel_size {tensor}" if parallel.sequence_parallel else ""
        raise ConfigError(
            f"max_length {data.max_length} cannot be cut into {chunks} equal chunks, as "
            f"{' and '.join(filter(None, (way, shared)))} does",
            f"use a multiple of {chunks}",
        )
    return dataclasses.replace(data, pad_to_multiple_of=math.lcm(chunks, data.pad_to_multiple_of or 1))
