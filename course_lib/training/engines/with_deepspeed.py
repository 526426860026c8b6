"""DeepSpeed's ZeRO through Accelerate, on GPUs and on CPU processes over gloo."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import torch
from accelerate.utils import DeepSpeedPlugin
from torch import nn
from torch.optim import Optimizer
from transformers.integrations import unset_hf_deepspeed_config

from course_lib.config import Config
from course_lib.errors import ConfigError, LaunchError
from course_lib.parallel.sharding import Shard
from course_lib.training.checkpoints.formats import device_of_step
from course_lib.training.checkpoints.sharded_state import ShardedState
from course_lib.training.engines.sharded import ShardedEngine
from course_lib.training.unused_parameters import leave_undecayed, never_reached

DEFAULT_BUCKET = 500_000_000
"""Elements that DeepSpeed reduces and gathers together, by its own default."""


def deepspeed_config(config: Config, precision: str, elements: int | None = None) -> dict[str, Any]:
    """DeepSpeed's JSON for a run, complete: `deepspeed` and Accelerate take it as it is.

    Args:
        config: strategy zero1, zero2 or zero3.
        precision: ``no``, ``fp16`` or ``bf16``.
        elements: see :func:`zero_settings`.
    """
    run = config.run
    return {
        "train_micro_batch_size_per_gpu": run.batch_size,
        "gradient_accumulation_steps": run.gradient_accumulation_steps,
        "gradient_clipping": config.optim.max_grad_norm,
        "zero_optimization": zero_settings(config, elements),
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": config.parallel.offload != "none",
        "steps_per_print": 2**31 - 1,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the device twice a step
    }


def zero_settings(config: Config, elements: int | None) -> dict[str, Any]:
    """The part of it that says what is split, and what travels together.

    What is not named has DeepSpeed's own default, which takes memory for speed: under stage 3, parameters of up to 10^5
    elements stay whole on every rank, and what is used again soon is kept. With ``lean_buffers`` nothing does.

    Args:
        config: strategy zero1, zero2 or zero3.
        elements: trained ones of the model, where it is known; of a small one a default bucket is an eighth.
    """
    parallel = config.parallel
    bucket = parallel.bucket_bytes // 4  # counted in elements
    if parallel.bucket_mb is None and not parallel.lean_buffers:
        # A bucket as large as the model would leave when backward is over, and take the model's memory twice again.
        bucket = DEFAULT_BUCKET if elements is None else min(DEFAULT_BUCKET, max(bucket, elements // 8))
    zero: dict[str, Any] = {
        "stage": int(parallel.strategy[-1]),
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "contiguous_gradients": True,
    }
    if not parallel.lean_buffers:
        zero["overlap_comm"] = True
    elif parallel.strategy == "zero3":
        # No parameter is small enough to stay whole on every rank: a rank holds 1/N of everything.
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 0,
        }
    if parallel.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": config.data.pin_memory}
    if parallel.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": config.data.pin_memory}
    return zero


class _Home(NamedTuple):
    """Place where DeepSpeed keeps this rank's run of a parameter: the flat master, and the run's place in it."""

    flat: torch.Tensor
    offset: int
    shard: Shard


class DeepSpeedState(ShardedState):
    """State in DeepSpeed's flat fp32 groups, of which a rank has a run of each parameter.

    Attributes:
        zero: DeepSpeed's optimizer.
        strategy: ``zero1``, ``zero2`` or ``zero3``.
        offloads: whether the optimizer steps on the host.
    """

    zero: Any
    strategy: str
    offloads: bool

    def homes(self) -> dict[str, _Home]:
        """Place of each trained parameter's run on this rank, for those that have one here."""
        rank, homes = self.ranks.rank, {}
        parameter: Any
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            if self.strategy == "zero3":
                group, offset, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
                flat, start = self.zero.fp32_partitioned_groups_flat[group], rank * length
                length = max(0, min(length, self.state_shapes[name].numel() - start))
            elif parameter._hp_mapping is None:
                continue
            else:
                mapping = parameter._hp_mapping
                flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
                offset, length = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
                start = mapping.lp_fragment_address.start
            if length:
                data = flat.detach().narrow(0, offset, length)
                homes[name] = _Home(flat, offset, Shard(self.state_shapes[name], start, data))
        return homes

    def shards(self) -> dict[str, Shard]:
        homes, shards = self.homes(), {}
        for name, parameter in self.model.named_parameters():
            if name in homes:
                shards[name] = homes[name].shard
            elif parameter.requires_grad:
                shards[name] = Shard(self.state_shapes[name], 0, torch.empty(0, device=self.ranks.device))
            else:
                shards[name] = self._frozen_shard(name, parameter)
        return shards

    def _frozen_shard(self, name: str, parameter: Any) -> Shard:
        """A parameter without gradient: whole, or under stage 3 this rank's run of it."""
        if self.strategy != "zero3":
            return Shard(self.state_shapes[name], 0, parameter.detach().view(-1))
        length = parameter.ds_tensor.numel()
        start = self.ranks.rank * length
        kept = max(0, min(length, self.state_shapes[name].numel() - start))
        return Shard(self.state_shapes[name], start if kept else 0, parameter.ds_tensor.detach()[:kept])

    def optimizer_shards(self) -> dict[str, Shard]:
        shards = {}
        for name, (flat, offset, shard) in self.homes().items():
            for state, value in sorted(self.optimizer.state.get(flat, {}).items()):
                if isinstance(value, int):  # as DeepSpeedCPUAdam counts its steps
                    value = torch.tensor(float(value))
                value = value if value.ndim else value.clone()  # a file must not hold one number under many names
                shards[f"{name}/{state}"] = self._state_run(value, offset, shard)
        return shards

    def prepare_optimizer_shards(self, states: Mapping[str, int]) -> dict[str, Shard]:
        homes, room = self.homes(), {}
        for key in states:
            name, state = key.rsplit("/", 1)
            if name not in homes:
                continue
            flat, offset, shard = homes[name]
            kept = self.optimizer.state[flat]
            if not isinstance(kept.get(state), torch.Tensor):
                kept[state] = (
                    torch.zeros((), device=device_of_step(self.optimizer, flat))
                    if state == "step"
                    else torch.zeros_like(flat)
                )
            room[key] = self._state_run(kept[state], offset, shard)
        return room

    @staticmethod
    def _state_run(value: torch.Tensor, offset: int, shard: Shard) -> Shard:
        if not value.ndim:
            return Shard(torch.Size([1]), 0, value.view(1))
        return Shard(shard.shape, shard.start, value.narrow(0, offset, shard.data.numel()))

    def refresh(self) -> None:
        if self.offloads:
            for kept in self.optimizer.state.values():
                kept |= {"step": int(kept["step"])}  # as DeepSpeedCPUAdam counts them
        if self.strategy == "zero3":
            persistent = self.zero.persistent_parameters  # small ones, whole on every rank from one step to the next
            if persistent:
                persistent[0].partition(persistent)
            for group in range(len(self.zero.fp16_groups)):
                self.zero._reassign_or_swap_out_partitioned_parameters(group)
            if persistent:
                persistent[0].all_gather(persistent)
        else:
            self.zero.update_lp_params()

    def extra_state(self) -> dict[str, Any]:
        if not self.zero.dynamic_loss_scale:
            return {}
        return {"loss_scale": float(self.zero.loss_scale), "last_overflow": self.zero.loss_scaler.last_overflow_iter}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        # A run in another precision has left none; older versions wrote a scale of 1 for it.
        if self.zero.dynamic_loss_scale and state.get("loss_scale", 1.0) != 1.0:
            self.zero.loss_scaler.cur_scale = state["loss_scale"]
            self.zero.loss_scaler.last_overflow_iter = state["last_overflow"]


class DeepSpeedZero(ShardedEngine):
    """ZeRO-1, 2 or 3 by DeepSpeed.

    ``backward`` of the last micro-batch also clips, updates and clears, as DeepSpeed's own engine does.
    """

    stored_class = DeepSpeedState

    @classmethod
    def refuse(cls, config: Config, device: torch.device, precision: str) -> None:
        super().refuse(config, device, precision)
        if device.type == "cpu" and torch.cuda.is_available():
            raise ConfigError(
                "DeepSpeed takes the GPUs that it sees, and device is cpu",
                "hide them with CUDA_VISIBLE_DEVICES= in the environment, or leave out --device",
            )

    @classmethod
    @contextlib.contextmanager
    def environment(cls) -> Iterator[None]:
        # With this variable Accelerate would drop the plugin and run DDP in silence.
        kept = os.environ.pop("ACCELERATE_USE_CPU", None)
        quiet_deepspeed()
        leave_shared_memory_operator_out()
        try:
            yield
        finally:
            if kept is not None:
                os.environ["ACCELERATE_USE_CPU"] = kept

    @classmethod
    def start(cls, config: Config) -> Self:
        engine = super().start(config)
        kind = engine.ranks.accelerator.distributed_type
        if kind != "DEEPSPEED":
            raise LaunchError(
                f"Accelerate chose {kind.value} over DeepSpeed",
                "start with `course train --num_processes N`, which sets the environment",
            )
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it again and again, also where no launcher was
        return engine

    @classmethod
    def plugins(cls, config: Config, device: torch.device, precision: str) -> dict[str, Any]:
        return {
            "cpu": False,
            "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=deepspeed_config(config, precision)),
            "gradient_accumulation_steps": config.run.gradient_accumulation_steps,
        }

    def examine(self, model: nn.Module) -> None:
        super().examine(model)
        # Now: once ranks share the tokens of a row, the model takes no whole one any more.
        self.left_out = never_reached(model) or set()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        leave_undecayed(optimizer, self.left_out)
        elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        plugin = self.ranks.accelerator.state.deepspeed_plugin
        plugin.deepspeed_config["zero_optimization"] |= zero_settings(self.config, elements)
        self.wrapped, wrapper = self.ranks.accelerator.prepare(model, optimizer)
        self.zero, self.optimizer = wrapper.optimizer, wrapper.optimizer.optimizer
        self.stored.zero, self.stored.strategy = self.zero, self.strategy
        self.stored.offloads = self.config.parallel.offload != "none"

    def autocast(self) -> AbstractContextManager:
        return contextlib.nullcontext()  # the parameters themselves are in the low precision

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # DeepSpeed counts the micro-batches

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.wrapped.set_gradient_accumulation_boundary(is_boundary=last)
        # The mean over the ranks is taken; the loss is already a share of the global batch's.
        self.wrapped.backward(loss * self.ranks.gradient_ranks, scale_wrt_gas=False)
        if last:
            self.wrapped.step()

    def clip(self, max_norm: float) -> torch.Tensor:
        return torch.as_tensor(self.wrapped.get_global_grad_norm(), device=self.device)

    def update(self) -> None:
        pass  # as the rest of the step, in backward

    def zero_grad(self) -> None:
        pass

    @property
    def step_was_skipped(self) -> bool:  # type: ignore[override]
        return bool(self.zero.overflow)

    def close(self) -> None:
        super().close()
        unset_hf_deepspeed_config()  # or transformers would share out what a rank loads from here on


def quiet_deepspeed() -> None:
    """Warnings alone, and ours to act on: DeepSpeed tells of every step of its set-up on every rank."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def leave_shared_memory_operator_out() -> None:
    """Start DeepSpeed on a CPU without compiling anything.

    Its operator ``deepspeed_shm_comm`` serves ``inference_all_reduce`` alone: training sends everything by gloo. Built
    at the first start it takes minutes on a busy machine, and a rank killed meanwhile leaves a lock on which every
    later start waits for ever (torch.utils.file_baton).
    """
    import deepspeed.ops  # slow, and only wanted by runs on DeepSpeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
