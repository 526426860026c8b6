"""Rules of experts that several ranks share (``expert_parallel_size``), which join fields of several sections."""

import dataclasses

from course_lib.config_sections.learning import ModelConfig, OptimConfig, RunConfig
from course_lib.config_sections.parallel import ParallelConfig
from course_lib.config_sections.watching import TrackingConfig
from course_lib.errors import ConfigError

STRATEGIES = ("ddp", "zero1", "zero2")
"""That leave a rank its experts whole, of which each is one run of what checkpoints store."""


def check_experts(
    parallel: ParallelConfig, run: RunConfig, model: ModelConfig, optim: OptimConfig, tracking: TrackingConfig
) -> ParallelConfig:
    """The section of parallelism, with the engine filled in where ranks share experts.

    Raises:
        ConfigError: beside something that cannot be had with it; the rule.
    """
    ranks = parallel.expert_parallel_size
    if ranks == 1:
        return parallel
    if run.training_type == "basic":
        raise ConfigError(
            f"training_type basic runs one process, and {ranks} are to share the experts",
            "use --training_type accelerated",
        )
    if run.training_type == "pipeline":
        raise ConfigError(
            "expert_parallel_size sends tokens in each layer, forward and backward, on all its ranks "
            "alike, and the stages of a pipeline take turns",
            "leave one of the two out",
        )
    if parallel.tensor_parallel_size > 1:
        raise ConfigError(
            "expert_parallel_size shares experts among ranks with rows of their own, and those of "
            "tensor_parallel_size have the same rows",
            "leave one of the two out",
        )
    if run.num_processes and run.num_processes % ranks:
        raise ConfigError(
            f"num_processes {run.num_processes} is no multiple of expert_parallel_size {ranks}",
            "choose sizes that divide",
        )
    if parallel.strategy not in STRATEGIES:
        raise ConfigError(
            f"{parallel.strategy} gathers whole layers on every rank, and expert_parallel_size keeps experts apart",
            f"use --strategy {', '.join(STRATEGIES[:-1])} or {STRATEGIES[-1]}",
        )
    engine = parallel.engine or "scratch"
    if engine != "scratch":
        raise ConfigError(f"engine {engine} has no expert_parallel_size here", "use --engine scratch")
    _check_beside(parallel, run, model, optim, tracking)
    return dataclasses.replace(parallel, engine=engine)


def _check_beside(
    parallel: ParallelConfig, run: RunConfig, model: ModelConfig, optim: OptimConfig, tracking: TrackingConfig
) -> None:
    """What experts that several ranks share do not go together with."""
    if parallel.offload != "none" or parallel.shard_group_size:
        raise ConfigError("offload and shard_group_size are not for expert_parallel_size", "leave them out")
    if model.torch_compile:
        raise ConfigError("torch_compile does not know the exchanges of expert_parallel_size", "leave it out")
    if optim.optimizer == "muon":
        raise ConfigError(
            "muon is for whole copies of a model, and expert_parallel_size leaves a rank some experts",
            "use --optimizer adamw or sgd",
        )
    if optim.optimizer not in ("adamw", "sgd"):
        raise ConfigError(
            f"{optim.optimizer}'s state is not stored in pieces, as that of expert_parallel_size is",
            "use --optimizer adamw or sgd",
        )
    if run.mixed_precision == "fp16":
        raise ConfigError(
            "fp16 needs a scaler that knows the ranks of expert_parallel_size", "use --mixed_precision bf16 or no"
        )
    if tracking.watch in ("gradients", "all"):
        raise ConfigError(
            f"watch {tracking.watch}: expert_parallel_size leaves a rank some experts' gradients",
            "use --watch parameters",
        )
