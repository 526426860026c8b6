"""Engines: one class per way to train.

The trainer counts the targets, computes the losses and moves the learning rate. The engine wraps the model and the
optimizer, carries the gradients, clips and updates. Its ``ranks`` talk to each other; its ``stored`` says which shard
of every tensor lies on this rank, so that a checkpoint can be written and read by any number of ranks.
"""

from course_lib.config import Config
from course_lib.config.parallel import LOCAL
from course_lib.training.engines.base import StepEngine


def build_engine(config: Config) -> StepEngine:
    """The engine that a config names, its ranks joined; what it cannot do here it refuses."""
    return engine_class(config).start(config)


def engine_class(config: Config) -> type[StepEngine]:
    """The class of the engine that a config names, its module imported."""
    strategy, engine = config.parallel.strategy, config.parallel.chosen_engine
    # Each module is imported where it is used: DeepSpeed alone takes seconds.
    if config.run.training_type == "basic":
        from course_lib.training.engines.single_process import SingleProcess

        return SingleProcess
    if config.run.training_type == "pipeline" and strategy == "fsdp":
        from course_lib.training.engines.sharded_pipeline import ShardedPipeline

        return ShardedPipeline
    if config.run.training_type == "pipeline":
        from course_lib.training.engines.pipeline import PipelineEngine

        return PipelineEngine
    if engine == "deepspeed":
        from course_lib.training.engines.with_deepspeed import DeepSpeedZero

        return DeepSpeedZero
    if engine == "accelerate":
        from course_lib.training.engines.with_torch import AccelerateFSDP

        return AccelerateFSDP
    if engine == "scratch":
        return _from_scratch(config)
    if strategy == "zero1":
        from course_lib.training.engines.with_torch import TorchZero1

        return TorchZero1
    if strategy != "ddp":
        from course_lib.training.engines.with_torch import TorchFSDP

        return TorchFSDP
    from course_lib.training.engines.accelerate_ddp import AccelerateDDP

    return AccelerateDDP


def _from_scratch(config: Config) -> type[StepEngine]:
    if config.communication.communication == "all_reduce":
        from course_lib.training.engines import from_scratch

        return from_scratch.BY_STRATEGY[config.parallel.strategy]
    from course_lib.training.engines.less_communication import Compressing, Local

    return Local if config.communication.communication in LOCAL else Compressing
