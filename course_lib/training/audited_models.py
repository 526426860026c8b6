"""Models of transformers on people's engines, small, as `course audit --model NAME --engine NAME` takes them."""

import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from course_lib.audit import Layout, Subject, gathered_shards, layouts
from course_lib.errors import ConfigError, CourseError, ModelError
from course_lib.modeling.small_configs import shrunk_config
from course_lib.parallel.blocks import blocks
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.planning import models as catalogue
from course_lib.system import hub_reachable
from course_lib.training.engines.with_deepspeed import leave_shared_memory_operator_out, quiet_deepspeed

ROWS, TOKENS, WORDS = 12, 8, 96
"""Of the batch: 12 rows can be dealt to 2, 3 and 4 ranks, and to 2 × 3; so can a vocabulary of 96."""
LEARNING_RATE = 1e-3
AXES = {
    "transformers": ("dp", "shard", "ep", "tp"),
    "scratch": ("dp", "shard", "tp"),
    "torch": ("dp", "shard"),
    "accelerate": ("dp", "shard"),
    "deepspeed": ("dp", "shard"),
}
"""By engine. DeepSpeed's dp is ZeRO-2, its shard ZeRO-3; of all others shard is FSDP. On Transformers' ep the ranks
have their own rows, share the layers by FSDP, and the experts one by one (``ep_size``, from release 5.19 on)."""
HEADS = {"num_attention_heads": "heads", "num_key_value_heads": "key-value heads"}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TOGETHER = {"transformers": {"dp", "shard", "ep", "tp"}, "scratch": {"dp", "tp"}, "torch": {"dp", "shard"}}
"""Axes that an engine takes at once."""


def config_of(name: str) -> PreTrainedConfig:
    """The config of a folder, of a model in the catalogue, of a model type, or of a model on the Hub.

    Raises:
        ModelError: there is none, or it is out of reach.
    """
    if not Path(name).is_dir():
        if name in (known := catalogue.bundled()):
            fields = {key: value for key, value in known[name].items() if key != "also"}
            return CONFIG_MAPPING[fields.pop("model_type")](**fields)
        if name in CONFIG_MAPPING:
            return CONFIG_MAPPING[name]()
        if "/" not in name or (problem := hub_reachable.problem()):
            why = f" ({problem})" if "/" in name else ""
            raise ModelError(
                f"no model {name} is known{why}",
                "give a folder with config.json, a model of `course plan`, or a type, as qwen3",
            )
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # whatever a foreign file makes of its reader is that file's fault
        raise ModelError(
            f"{name}: config.json cannot be used ({str(error).splitlines()[0]})",
            "give an architecture that transformers itself knows",
        ) from None


def chosen_layouts(engine: str, which: str, ranks: int) -> list[Layout]:
    """``auto``: each axis of an engine with two ranks, and its axes together with 2 × 2; ``all``: every one.

    Raises:
        ConfigError: no such engine, or too few ranks.
    """
    if engine not in AXES:
        raise ConfigError(f"unknown engine {engine!r}", f"use {', '.join(AXES)}")
    every = [layout for layout in layouts(ranks, AXES[engine]) if _together(engine, layout)]
    if which == "all":
        return every
    return [layout for layout in every if set(layout.used.values()) == {2}]


def _together(engine: str, layout: Layout) -> bool:
    return len(layout.used) == 1 or set(layout.used) <= TOGETHER.get(engine, set())


class ModelOnEngine:
    """``make(layout)`` for a model and an engine.

    Args:
        name: as :func:`config_of` takes it.
        engine: of :data:`AXES`.
        dtype: of the weights and of everything that is computed.
        split_experts: transformers' tensor ranks share the experts one by one, not each expert.
        more: fields of the config that have another value.
    Raises:
        ConfigError: no such engine.
        ModelError: no such model, or one that is not for causal language modelling.
    """

    def __init__(
        self, name: str, engine: str, *, dtype: torch.dtype = torch.float32, split_experts: bool = False, **more: Any
    ):
        if engine not in AXES:
            raise ConfigError(f"unknown engine {engine!r}", f"use {', '.join(AXES)}")
        self.engine, self.dtype, self.split_experts = engine, dtype, split_experts
        self.folder = tempfile.TemporaryDirectory()
        if engine == "deepspeed":
            quiet_deepspeed()
        config = shrunk_config(config_of(name), **({"vocab_size": WORDS} | more))
        config.get_text_config().use_cache = False
        text = config.get_text_config()
        self.has_expert_plan = bool(getattr(text, "base_model_ep_plan", None))
        self.experts = next((value for name in EXPERTS if (value := getattr(text, name, None))), 1)
        self.shared = [(value, what) for name, what in HEADS.items() if (value := getattr(text, name, None))]
        torch.manual_seed(0)
        logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except ValueError as error:
            raise ModelError(
                f"{name} is not for causal language modelling ({str(error).splitlines()[0][:80]})", "give a decoder"
            ) from None
        model.save_pretrained(self.folder.name)
        words = model.get_input_embeddings().weight.shape[0]
        self.ids = torch.randint(min(5, words - 1), words, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))

    def __call__(self, layout: Layout) -> Subject:
        """The subject on this rank.

        Raises:
            NotImplementedError: the engine has no such layout.
        """
        if missing := [axis for axis in layout.used if axis not in AXES[self.engine]]:
            raise NotImplementedError(f"{self.engine} has no {missing[0]} here")
        if layout.ep > 1 and not self.has_expert_plan:
            raise NotImplementedError("transformers has no plan for experts of this model")
        for count, what in self.shared:
            if count % layout.tp:
                raise NotImplementedError(f"{count} {what} cannot be shared by {layout.tp} tensor ranks")
        if layout.ep > 1 and self.experts % layout.ep:
            raise NotImplementedError(f"{self.experts} experts cannot be shared by {layout.ep} ranks")
        if not _together(self.engine, layout):
            raise NotImplementedError(f"{self.engine} does not have {' and '.join(layout.used)} together here")
        build = MAKERS[self.engine] if layout.ranks > 1 else _alone
        place, parts, mine = layout.place(dist.get_rank()), 1, 0
        for axis in ("dp", "shard", "ep"):
            size = getattr(layout, axis)
            parts, mine = parts * size, mine * size + place[axis]
        if ROWS % parts:
            raise NotImplementedError(f"{ROWS} rows cannot be dealt to {parts} ranks")
        return build(self, layout, self.ids.chunk(parts)[mine])

    def loaded(self, **distributed: Any) -> nn.Module:
        """The whole model, or a rank's part of it by transformers."""
        return AutoModelForCausalLM.from_pretrained(self.folder.name, dtype=self.dtype, **distributed).train()


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def _adam(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=LEARNING_RATE)


def _alone(subject: ModelOnEngine, layout: Layout, batch: Tensor) -> Subject:
    model = subject.loaded()
    return Subject(model, _adam(model), _loss, batch)


def _transformers(subject: ModelOnEngine, layout: Layout, batch: Tensor) -> Subject:
    from transformers.distributed import DistributedConfig

    sizes = {
        "tp_size": layout.tp,
        "fsdp_size": layout.shard * layout.ep,
        "dp_replicate_size": layout.dp,
        "ep_size": layout.ep * (layout.tp if layout.ep > 1 or subject.split_experts else 1),
    }
    known = inspect.signature(DistributedConfig).parameters
    if missing := [name for name, size in sizes.items() if size > 1 and name not in known]:
        raise NotImplementedError(f"transformers {transformers.__version__} has no {missing[0]}")
    distributed = DistributedConfig(**{name: size for name, size in sizes.items() if name in known})
    model = subject.loaded(distributed_config=distributed)
    return Subject(model, _adam(model), _loss, batch)


def _scratch(subject: ModelOnEngine, layout: Layout, batch: Tensor) -> Subject:
    model = subject.loaded()
    if layout.tp > 1:
        mesh = layout.mesh()
        try:
            split = TensorParallel(model, mesh.get_group("tp"))
        except CourseError as error:
            raise NotImplementedError(str(error).split(":")[0]) from None
        data = DataParallel(split, group=mesh.get_group("dp"))
        return Subject(
            data,
            _adam(split),
            _loss,
            batch,
            split.whole_gradients,
            lambda: split.whole(dict(split.module.named_parameters())),
        )
    if layout.shard > 1:
        optimizer = _adam(model)
        sharded = FullyShardedDataParallel(model, optimizer)
        return Subject(
            sharded,
            optimizer,
            _loss,
            batch,
            lambda: gathered_shards(sharded.shards(), True),
            lambda: _values(gathered_shards(sharded.shards(), False)),
        )
    return Subject(DataParallel(model), _adam(model), _loss, batch)


def _values(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _torch(subject: ModelOnEngine, layout: Layout, batch: Tensor) -> Subject:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = subject.loaded()
    if layout.shard == 1:
        return Subject(DistributedDataParallel(model), _adam(model), _loss, batch)
    mesh = layout.mesh()[("dp", "shard") if layout.dp > 1 else ("shard",)]
    for block in blocks(model).values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Subject(model, _adam(model), _loss, batch)


def _accelerate(subject: ModelOnEngine, layout: Layout, batch: Tensor) -> Subject:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, **({"fsdp_plugin": plugin} if layout.shard > 1 else {}))
    model = subject.loaded()
    model, optimizer = accelerator.prepare(model, _adam(model))
    return Subject(model, optimizer.optimizer, _loss, batch)


class _EngineStep:
    """DeepSpeed's step in the form of an optimizer's: the gradients are read before it."""

    def __init__(self, engine: Any):
        self.engine, self.hooks = engine, []  # type: ignore[var-annotated]

    def register_step_pre_hook(self, hook: Callable) -> None:
        self.hooks.append(hook)

    def step(self) -> None:
        for hook in self.hooks:
            hook()
        self.engine.step()

    def zero_grad(self) -> None:
        """The engine does."""


def _deepspeed(subject: ModelOnEngine, layout: Layout, batch: Tensor) -> Subject:
    leave_shared_memory_operator_out()
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    model = subject.loaded()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_adam(model),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": len(batch),
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3 if layout.shard > 1 else 2},
            "steps_per_print": 2**31 - 1,
        },
    )

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        mean = _loss(engine, ids)
        engine.backward(mean)
        return mean.detach().requires_grad_()  # its backward is done

    def whole(read: Callable) -> dict[str, Any]:
        return {
            name: None if (value := read(parameter)) is None else value.clone()
            for name, parameter in model.named_parameters()
        }

    return Subject(
        model,
        _EngineStep(engine),  # type: ignore[arg-type]
        loss,
        batch,
        lambda: whole(safe_get_full_grad),
        lambda: whole(safe_get_full_fp32_param),
    )


MAKERS: Mapping[str, Callable[[ModelOnEngine, Layout, Tensor], Subject]] = {
    "transformers": _transformers,
    "scratch": _scratch,
    "torch": _torch,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}
