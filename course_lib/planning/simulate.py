"""One rank of a cluster, simulated in this process: the real model, the real engine, no GPU and no other rank.

Tensors are fake (``FakeTensorMode``): they have shapes, types and storages of a size, and no elements. The process
group is PyTorch's ``fake`` one, of any world size, whose collectives return at once. ``fully_shard``, DDP and
``parallelize_module`` run as they are, so that what a rank holds and what it sends is counted and not derived.

A forward pass, a backward pass and an optimizer step are counted, with the optimizer's states in place. What is not
seen: the allocator's rounding and fragments, the CUDA context, workspaces of kernels, and when streams hand memory
back. DDP's buckets are those of its first step.

Fused attention: on fake CPU tensors SDPA records ``_scaled_dot_product_flash_attention_for_cpu``. Like FlashAttention
on GPUs it keeps its inputs, its output and a log-sum-exp of 4 bytes per row and head, and never the scores; keys and
values that several heads share are not repeated. On GPUs that also holds with dropout, whose mask the backward pass
draws again from a seed (Dao et al. 2022, arXiv 2205.14135, appendix B); on CPUs SDPA would take its unfused path, with
the scores, so it is asked without dropout here. All sequences are whole: nothing is masked but the future.
"""

import contextlib
import copy
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from course_lib.errors import ConfigError, nearest
from course_lib.metering.allocation_log import KINDS, AllocationLog, CollectiveRecord
from course_lib.modeling.recomputing import recompute_activations
from course_lib.parallel.blocks import blocks
from course_lib.parallel.torch_engines.fsdp import hybrid_mesh, shard_with_torch
from course_lib.planning import models
from course_lib.planning.alone import TensorParallelAlone, all_reduce, attention_as_on_gpus, collected, fake_group
from course_lib.planning.models import Model
from course_lib.planning.plan import Plan
from course_lib.replacing import replaced

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Strategy = Literal["ddp", "zero2", "zero3", "fsdp", "hsdp", "tp"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
"""zero2 is FSDP2 that keeps a block gathered from its forward to its backward; zero3 and fsdp are one."""


@dataclass(frozen=True)
class Setting:
    """Settings of a simulation."""

    strategy: Strategy
    world_size: int
    micro_batch: int = 1
    """Sequences of this rank."""
    sequence_length: int = 2048
    checkpointing: bool = False
    """Recompute every block."""
    precision: Literal["bf16", "fp32"] = "bf16"
    shards: int = 8
    """hsdp: ranks that share one copy of the model."""
    rank: int = 0

    def plan(self) -> Plan:
        """The same as the planner's formula has it.

        Raises:
            ConfigError: the formula has no such engine.
        """
        common = Plan(
            self.sequence_length,
            micro_batch=self.micro_batch,
            precision=self.precision,
            checkpointing="full" if self.checkpointing else "none",
            sequence_parallel=False,
        )
        if self.strategy == "ddp":
            return replace(common, data=self.world_size)
        if self.strategy == "tp":
            return replace(common, engine="megatron", recipe="autocast", tensor=self.world_size, head="gathered")
        if self.strategy == "zero2":
            raise ConfigError(
                "the memory model has no formula for FSDP2 that keeps blocks gathered", "compare fsdp, hsdp, ddp or tp"
            )
        copies = self.world_size // self.shards if self.strategy == "hsdp" else 1
        return replace(common, engine="fsdp", stage=3, data=self.world_size, replicas=copies)


@dataclass(frozen=True)
class Simulated:
    """Bytes that one rank holds and sends in one step.

    Attributes:
        peak: the most of each kind of :data:`course_lib.metering.allocation_log.KINDS`; not all at the same time.
        total: the most of all kinds together.
        at_peak: kind by kind, at that time.
        modules: kind by kind, at that time, of each part of the model: its blocks by name, what lies outside them by
            name, and "" for what belongs to none.
        resident: kind by kind after the backward pass, before gradients are used.
        phase: in which the peak is: forward, backward or step.
        exchanges: collectives in order; those of setting up left out.
        parameters: of the whole model.
    """

    peak: dict[str, int]
    total: int
    at_peak: dict[str, int]
    modules: dict[str, dict[str, int]]
    resident: dict[str, int]
    phase: str
    exchanges: list[CollectiveRecord]
    parameters: int


def simulate(model: "str | Model | PreTrainedConfig", setting: Setting) -> Simulated:
    """Run forward, backward and optimizer step of one rank, and count.

    Args:
        model: a name as :func:`course_lib.planning.models.load` takes it, or a transformers config.
        setting: strategy, ranks and batch.

    Raises:
        ConfigError: a setting that the model or the number of ranks doesn't allow, or a process group that is in use.
        ModelError: an unknown model, or one that has no tensor-parallel plan.
    """
    _check(setting)
    config, head = _config(model, setting)
    with fake_group(setting.rank, setting.world_size):
        if setting.strategy == "hsdp":
            mesh = hybrid_mesh("cpu", setting.world_size // setting.shards, setting.shards)
        else:
            mesh = init_device_mesh("cpu", (setting.world_size,))
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # to_empty turns meta tensors into fake ones
        log = AllocationLog(config.vocab_size)
        parameters = _step(config, head, setting, mesh, log, mode)
    return _read(log, parameters)


def _check(setting: Setting) -> None:
    if setting.strategy not in STRATEGIES:
        raise ConfigError(f"strategy `{setting.strategy}`", nearest(setting.strategy, STRATEGIES))
    for name in ("world_size", "micro_batch", "sequence_length", "shards"):
        if getattr(setting, name) < 1:
            raise ConfigError(f"{name} {getattr(setting, name)}", "give a whole number from 1 on")
    if not 0 <= setting.rank < setting.world_size:
        raise ConfigError(f"rank {setting.rank} of {setting.world_size}", "ranks count from 0")
    if dist.is_initialized():
        raise ConfigError("this process is a rank of a process group already", "simulate in a process of its own")


def _config(model: "str | Model | PreTrainedConfig", setting: Setting) -> "tuple[PreTrainedConfig, Any]":
    """The transformers config of a model, and the class that builds it with its output layer."""
    import transformers

    if isinstance(model, transformers.PreTrainedConfig):
        config = copy.deepcopy(model)  # the caller's stays as it is
    elif fields := models.bundled().get(models.load(model).name):
        config = transformers.AutoConfig.for_model(**{key: value for key, value in fields.items() if key != "also"})
    else:
        config = transformers.AutoConfig.from_pretrained(str(model))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0  # published with the weights, not in the class
    known = models.from_config(config.to_dict(), config.model_type)
    if known.context and setting.sequence_length > known.context:
        raise ConfigError(
            f"a sequence of {setting.sequence_length} tokens, and the model takes {known.context}", "give a shorter one"
        )
    config._attn_implementation = "sdpa"
    config.use_cache = False
    kind = {"bert": "MaskedLM", "roberta": "MaskedLM", "distilbert": "MaskedLM", "t5": "Seq2SeqLM"}
    return config, getattr(transformers, f"AutoModelFor{kind.get(config.model_type, 'CausalLM')}")


def _step(
    config: "PreTrainedConfig",
    head: Any,
    setting: Setting,
    mesh: DeviceMesh,
    log: AllocationLog,
    mode: FakeTensorMode,
) -> int:
    """Build, set up, and run a step; returns the whole model's parameters."""
    from transformers.initialization import no_init_weights

    sharded, half = setting.strategy not in ("ddp", "tp"), setting.precision == "bf16"
    with contextlib.ExitStack() as stack:
        if not sharded:
            stack.enter_context(mode)
            stack.enter_context(log)
        # fully_shard cuts each weight for all ranks: with meta tensors in C++, with fake ones slowly in Python
        with no_init_weights(), torch.device("meta" if sharded else "cpu"):
            model = head.from_config(config)
        model.tie_weights()  # which no_init_weights leaves out
        model.loss_type = model.loss_type or "ForCausalLM"  # the library finds it by the class's name, if it tells
        parameters = sum(parameter.numel() for parameter in model.parameters())
        model.train()
        if setting.checkpointing:
            recompute_activations(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine: nn.Module
        if sharded:
            engine = shard_with_torch(
                model,
                optimizer,
                mesh=mesh,
                reshard_after_forward=setting.strategy != "zero2",
                param_dtype=torch.bfloat16 if half else None,
                reduce_dtype=torch.float32 if half else None,
            )
            stack.enter_context(mode)
            stack.enter_context(log)
            model.to_empty(device="cpu")
            _make_states(model, optimizer)
        elif setting.strategy == "ddp":
            _make_states(model, optimizer)
            engine = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
            engine.register_comm_hook(setting.world_size, all_reduce)
        else:
            engine = TensorParallelAlone(model, mesh)
            split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
            whole = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
            optimizer = torch.optim.AdamW([{"params": split}, {"params": whole}], fused=True)
            _make_states(model, optimizer)
        _run(model, engine, optimizer, setting, log)
    return parameters


def _run(
    model: nn.Module, engine: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, log: AllocationLog
) -> None:
    """A forward pass, a backward pass and a step, counted."""
    units = blocks(model)
    inside = tuple(f"{name}." for name in units)
    log.watch(
        model,
        {module: name for name, module in units.items()}
        | {
            module: name
            for name, module in model.named_modules()
            if not list(module.children()) and not name.startswith(inside)
        },
    )
    cast = setting.precision == "bf16" and setting.strategy in ("ddp", "tp")  # FSDP2 casts by itself
    tokens = torch.empty(setting.micro_batch, setting.sequence_length, dtype=torch.int64)
    log.hold(tokens, "inputs")
    log.start()
    log.phase = "forward"
    from transformers import masking_utils

    whole = replaced(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)
    with collected() as collect, attention_as_on_gpus(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing writes into it here
        with whole, torch.autocast("cpu", torch.bfloat16, enabled=cast):  # to look for packed ones needs their values
            loss = _loss(engine, tokens, model)
        collect()
        log.phase = "backward"
        loss.backward()
        log.module = ""
        log.find_all(model, optimizer)
        log.phase = "step"
        optimizer.step()
        log.stop()


def _loss(engine: nn.Module, tokens: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The loss in float32, as trainers have it; what models for masked words compute themselves stays in bfloat16."""
    if not type(model).__name__.endswith("MaskedLM"):
        return engine(input_ids=tokens, labels=tokens).loss
    logits = engine(input_ids=tokens).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _make_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A first step, of gradients of zeros, after which the optimizer has its states."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _read(log: AllocationLog, parameters: int) -> Simulated:
    """Replay what was noted."""
    now: Counter[tuple[str, str]] = Counter()
    kinds = dict.fromkeys(KINDS, 0)
    peak, resident, total, top, snapshot, phase = dict(kinds), dict(kinds), 0, 0, dict(now), ""
    for change in log.changes():
        now[change.kind, change.module] += change.bytes
        kinds[change.kind] += change.bytes
        total += change.bytes
        if not change.counted:
            peak, resident = dict(kinds), dict(kinds)
            continue
        peak[change.kind] = max(peak[change.kind], kinds[change.kind])
        if change.phase != "step":
            resident = dict(kinds)
        if total > top:
            top, snapshot, phase = total, dict(now), change.phase
    by_kind = dict.fromkeys(KINDS, 0)
    modules: dict[str, dict[str, int]] = {}
    for (kind, module), size in snapshot.items():
        by_kind[kind] += size
        if size:
            modules.setdefault(module, {})[kind] = size
    return Simulated(peak, top, by_kind, modules, resident, phase, log.exchanges(), parameters)
