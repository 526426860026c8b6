"""Pipelines whose stages are split over their data parallel copies, by torch's FSDP2."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer

from course_lib.errors import ConfigError
from course_lib.parallel.sharding import Shard, local, repoint
from course_lib.parallel.torch_engines.fsdp import check_units, shards, split_in_place
from course_lib.parallel.torch_engines.pipeline import own_memory
from course_lib.training.engines.pipeline import PipelineEngine
from course_lib.training.engines.stages_state import StagesState
from course_lib.training.engines.with_torch import leave_out_fused_sgd


class ShardedStagesState(StagesState):
    """State of this rank's stages, of whose parameters it has a run of rows."""

    zero = None

    def own_shards(self) -> dict[str, Shard]:
        return shards(self.model)


class ShardedPipeline(PipelineEngine):
    """``--training_type pipeline --strategy fsdp``: each stage is a root of ``fully_shard``, each of its blocks a unit.

    A stage is gathered before a batch's first forward and reduced after its last backward, not with each micro-batch:
    with M of them it would be gathered 2 M times. (Of more than three stages on a rank torch's runtime frees some in
    between.)
    """

    stored_class = ShardedStagesState

    def take_part(self, model: nn.Module) -> nn.Module:
        own = super().take_part(model)
        for names in self.shared:
            holders = [self.schedule.stage_ranks[stage] for stage in names]
            if len(holders) > len(set(holders)):
                raise ConfigError(
                    f"schedule {self.schedule.name} puts the stages that share {next(iter(names.values()))} on one "
                    "rank, and fully_shard cannot split a parameter that two roots share",
                    "use --strategy zero1, or a schedule that ends on another rank, such as 1f1b",
                )
        return own

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        leave_out_fused_sgd(optimizer)
        stored = self.stored
        stored.copies = {stored.names[parameter] for parameter in self._second_copies()}
        whole = dict(model.named_parameters())
        mesh = DeviceMesh.from_group(self.ranks.groups.dp, self.device.type)
        low = self.precision == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
        for number, stage in self.stages.items():
            stage.register_forward_hook(own_memory)  # before those of fully_shard, which hang on what a stage returns
            check_units(stage, self.stage_blocks[number])
            split_in_place(
                stage,
                self.stage_blocks[number],
                mesh,
                {},
                reshard_after_forward=False,
                mp_policy=policy,
                offload_policy=OffloadPolicy(),
            )
        sharded = dict(model.named_parameters())
        repoint(optimizer, {parameter: sharded[name] for name, parameter in whole.items()})
        stored.names = {sharded[name]: stored.names[parameter] for name, parameter in whole.items()}
        self.score_with(model)

    def gradients(self) -> dict[str, Tensor]:
        return {name: local(p.grad) for p, name in self.stored.names.items() if p.grad is not None}
