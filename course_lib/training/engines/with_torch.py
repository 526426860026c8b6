"""torch's own: ZeroRedundancyOptimizer for zero1, FSDP2 for the rest; and Accelerate's FSDP plugin."""

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from course_lib.config import Config
from course_lib.errors import ConfigError
from course_lib.parallel.blocks import blocks
from course_lib.parallel.sharding import Shard, local
from course_lib.parallel.torch_engines.fsdp import hybrid_mesh, shard_with_torch, shards
from course_lib.training.checkpoints.sharded_state import ShardedState, SplitState
from course_lib.training.engines.accelerate_ddp import ddp_options
from course_lib.training.engines.sharded import ShardedEngine, WholeGradients
from course_lib.training.unwrapping import take_back_forward


class DealtOutState(SplitState):
    """State of an optimizer that has whole parameters of its own; all ranks have all parameters and gradients."""

    @property
    def state_owner(self) -> Optimizer:
        return self.optimizer.optim  # type: ignore[attr-defined]


class TorchZero1(WholeGradients):
    """DDP, and an optimizer that keeps the state of its share of the parameters (whole tensors, dealt out)."""

    stored_class = DealtOutState
    optimizer: ZeroRedundancyOptimizer

    @classmethod
    def plugins(cls, config: Config, device: torch.device, precision: str) -> dict[str, Any]:
        return {"kwargs_handlers": [ddp_options(config)]}

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        groups = [
            {key: value for key, value in group.items() if key != "initial_lr"} for group in optimizer.param_groups
        ]
        known = inspect.signature(type(optimizer)).parameters  # defaults hold more than the class takes
        options = {key: value for key, value in optimizer.defaults.items() if key in known}
        group, self.accelerator = self.ranks.gradient_group, self.ranks.accelerator
        self.optimizer = ZeroRedundancyOptimizer(groups, type(optimizer), process_group=group, **options)
        if self.tensor is None:
            self.accelerator.ddp_handler.find_unused_parameters = self.finds_unused
            self.wrapped = self.accelerator.prepare(model)
            take_back_forward(model)
        else:  # Accelerate's DDP is over all ranks
            self.wrapped = DistributedDataParallel(
                model,
                process_group=group,
                gradient_as_bucket_view=True,
                bucket_cap_mb=self.config.parallel.bucket_bytes / 2**20,
                find_unused_parameters=self.finds_unused,
            )

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        # alone on a GPU the model is not wrapped, and has no no_sync() of its own
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.wrapped)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        (loss * self.ranks.gradient_ranks).backward()  # DDP takes the mean over the ranks


def leave_out_fused_sgd(optimizer: Optimizer) -> None:
    """Let SGD step by torch's other kernels: its fused one does not know the DTensors of FSDP2, as AdamW's does."""
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            group["fused"] = False


class DTensorState(ShardedState):
    """State in DTensors, of which a rank has a run of rows."""

    def own_shards(self) -> dict[str, Shard]:
        return shards(self.model)


class TorchFSDP(ShardedEngine):
    """``fully_shard`` (FSDP2), a unit a block; under zero2 a unit stays gathered until its backward, else not."""

    stored_class = DTensorState

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        leave_out_fused_sgd(optimizer)
        group_size, mesh, everyone = self.config.parallel.shard_group_size, None, self.ranks.num_processes
        if group_size:
            if everyone % group_size:
                raise ConfigError(f"shard_group_size {group_size} does not divide {everyone} ranks", "use a divisor")
            mesh = hybrid_mesh(self.device.type, everyone // group_size, group_size)
        if self.tensor is not None:
            assert self.ranks.gradient_group is not None
            mesh = DeviceMesh.from_group(self.ranks.gradient_group, self.device.type)
        low = self.precision == "bf16"
        self.wrapped = shard_with_torch(
            model,
            optimizer,
            apart=self._experts_apart(),
            mesh=mesh,
            reshard_after_forward=self.strategy != "zero2",
            param_dtype=torch.bfloat16 if low else None,
            reduce_dtype=torch.float32 if low else None,
            cpu_offload=self.config.parallel.offload != "none",
        )

    def _experts_apart(self) -> dict[nn.Module, DeviceMesh]:
        """This rank's experts of each layer, and the ranks that have the same ones."""
        if self.experts is None:
            return {}
        same = self.experts.groups.same
        assert same is not None
        mesh = DeviceMesh.from_group(same, self.device.type)
        return {layer.experts: mesh for layer in self.experts.layers}

    def autocast(self) -> AbstractContextManager:
        return contextlib.nullcontext()  # MixedPrecisionPolicy casts; Accelerate gives its plugin the like

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        (loss * self.ranks.gradient_ranks).backward()  # FSDP2 takes the mean over the ranks

    def clip(self, max_norm: float) -> torch.Tensor:
        gradients = {name: local(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        if self.tensor is not None:
            return self.clip_together(gradients, max_norm)
        if self.experts is not None:
            return self.clip_with_experts(self.experts, gradients, max_norm)
        return self.wrapped.clip_grad_norm_(max_norm)

    def update(self) -> None:
        self.wrapped.step()

    def zero_grad(self) -> None:
        self.wrapped.zero_grad()


class AccelerateFSDP(TorchFSDP):
    """FSDP2 through Accelerate's plugin, which takes GPUs alone."""

    @classmethod
    def plugins(cls, config: Config, device: torch.device, precision: str) -> dict[str, Any]:
        return {
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=True,
                auto_wrap_policy="transformer_based_wrap",
                cpu_offload=config.parallel.offload != "none",
            )
        }

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        leave_out_fused_sgd(optimizer)
        self.accelerator = self.ranks.accelerator
        plugin = self.accelerator.state.fsdp_plugin
        plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks(model).values()})
        self.wrapped, self.scaled_optimizer = self.accelerator.prepare(model, optimizer)
        self.model, self.optimizer = self.wrapped, self.scaled_optimizer.optimizer

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.accelerator.backward(loss * self.ranks.gradient_ranks)

    def clip(self, max_norm: float) -> torch.Tensor:
        return self.accelerator.clip_grad_norm_(self.wrapped.parameters(), max_norm)

    def update(self) -> None:
        self.scaled_optimizer.step()

    def zero_grad(self) -> None:
        self.scaled_optimizer.zero_grad()
