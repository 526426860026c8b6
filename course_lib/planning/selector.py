"""Hardware and settings for one fine-tuning task, as dictionaries that a training script reads.

The face is the one that selection guides have: a model, some GPUs, sequences per GPU; the answers are the search's
(:mod:`course_lib.planning.strategy`), among the layouts that DDP, FSDP and DeepSpeed carry out.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from course_lib.errors import ConfigError, nearest
from course_lib.planning import hardware, memory, models, strategy
from course_lib.planning.hardware import Cluster
from course_lib.planning.models import Model
from course_lib.planning.strategy import Search

FAMILIES: dict[str, Callable[[Model], bool]] = {
    "text_generation": lambda model: model.causal,
    "text_embedding": lambda model: not model.causal and not model.encoder_decoder,
    "text_to_text": lambda model: model.encoder_decoder,
    "text_classification": lambda model: True,  # any architecture can be given a classification head
}
"""Whether a model is of a family, by what it is for."""
STRATEGIES = {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": "DeepSpeed"}
SEQUENCE_LENGTH = 512
"""Tokens of a fine-tuning example where none are given, or the architecture's limit where that is less."""


class HardwareSelector:
    """Answers for one kind of GPU, or compares all kinds.

    Args:
        gpu: an accelerator or SageMaker instance of the catalogue, for :meth:`get_distributed_training_config`.
        sequence_length: tokens of an example; default: ``SEQUENCE_LENGTH``, or the model's limit if that is less.
    """

    def __init__(self, gpu: str = "A100-80", sequence_length: int | None = None):
        self.gpu, self.sequence_length = hardware.accelerator(gpu).name, sequence_length
        self._named = gpu

    def select_hardware_for_task(
        self,
        model_family: str,
        model_name: str,
        task_type: str = "training",
        batch_size: int = 8,
        distributed: bool = True,
        gpu_count: int = 1,
    ) -> dict[str, Any]:
        """Rank the accelerators for a task: cheapest per token first, then those without a known price, fastest first.

        Args:
            model_family: a key of ``FAMILIES``.
            model_name: as :func:`course_lib.planning.models.load` takes it.
            task_type: ``training``.
            batch_size: sequences that each GPU contributes to one step.
            distributed: use ``gpu_count`` GPUs; else one.
            gpu_count: GPUs.
        Returns:
            ``primary_recommendation`` and ``fallback_options`` (names of accelerators), ``distributed_strategy`` and
            ``gpu_count`` of the first, ``tokens_per_second`` and ``dollars_per_million_tokens`` (None without a
            price) by accelerator, and ``too_small``, what does not hold the model, with the reason.
        Raises:
            ConfigError: an unknown family or task, no GPU, or no accelerator on which it fits.
        """
        self.require_training(task_type)
        model, gpus = _model(model_family, model_name), gpu_count if distributed else 1
        searches: dict[str, Search] = {}
        too_small: dict[str, str] = {}
        for name in hardware.accelerators():
            if name == "CPU":
                continue
            try:
                searches[name] = self._search(model, _cluster(name, gpus), batch_size)
            except strategy.NothingFits as why:
                too_small[name] = str(why)
        if not searches:
            raise ConfigError(
                f"{model.name} fits on no {gpus} GPUs of the catalogue with {batch_size} sequences each",
                "give more GPUs or a smaller batch",
            )
        price = {name: _dollars(result) for name, result in searches.items()}
        speed = {name: result.best.cost.tokens_per_second for name, result in searches.items()}
        ranked = sorted(searches, key=lambda name: (price[name] is None, price[name] or -speed[name]))
        return {
            "primary_recommendation": ranked[0],
            "fallback_options": ranked[1:],
            "gpu_count": gpus,
            "distributed_strategy": STRATEGIES[searches[ranked[0]].best.plan.engine],
            "tokens_per_second": {name: speed[name] for name in ranked},
            "dollars_per_million_tokens": {name: price[name] for name in ranked},
            "too_small": too_small,
        }

    def get_distributed_training_config(
        self, model_family: str, model_name: str, gpu_count: int, batch_size: int, max_memory_gb: float | None = None
    ) -> dict[str, Any]:
        """The fastest settings that fit, as a training script reads them.

        Args:
            model_family: a key of ``FAMILIES``.
            model_name: as :func:`course_lib.planning.models.load` takes it.
            gpu_count: GPUs, all used.
            batch_size: sequences that each GPU contributes to one step; where they do not fit at once,
                ``per_gpu_batch_size`` is smaller and ``gradient_accumulation_steps`` larger.
            max_memory_gb: GiB per GPU to plan with; default: all that the accelerator has.
        Returns:
            ``distributed_strategy`` (DDP, FSDP or DeepSpeed), ``gpu_count``, ``per_gpu_batch_size``,
            ``gradient_accumulation_steps``, ``global_batch_size``, ``mixed_precision`` (bool), ``precision``
            (``bf16``, ``fp16``, ``fp32``), ``gradient_checkpointing`` (bool), ``estimated_memory`` (GiB of one GPU:
            ``parameters_gb``, ``gradients_gb``, ``optimizer_gb``, ``activations_gb``, ``buffers_gb``, what the runtime
            takes, ``runtime_gb``, and their sum, ``per_gpu_gb``; of the host for each GPU, ``host_gb``),
            ``primary_recommendation``, ``fallback_options`` (other strategies that fit, fastest first), and
            ``deepspeed_config`` or ``fsdp_config`` where that is the strategy.
        Raises:
            ConfigError: an unknown family or model, or nothing fits; the message says the smallest change that would.
        """
        model = _model(model_family, model_name)
        result = self._search(model, _cluster(self._named, gpu_count, max_memory_gb), batch_size)
        plan, held = result.best.plan, result.best.memory
        gib = {name: size / 2**30 for name, size in held.at_peak().items()}
        config: dict[str, Any] = {
            "distributed_strategy": STRATEGIES[plan.engine],
            "gpu_count": gpu_count,
            "per_gpu_batch_size": plan.micro_batch,
            "gradient_accumulation_steps": plan.accumulation,
            "global_batch_size": plan.global_batch,
            "mixed_precision": plan.precision in ("bf16", "fp16"),
            "precision": plan.precision,
            "gradient_checkpointing": plan.checkpointing != "none",
            "estimated_memory": {
                "parameters_gb": gib["parameters"],
                "gradients_gb": gib["gradients"],
                "optimizer_gb": gib["optimizer"],
                "activations_gb": gib["activations"] + gib["logits"],
                "buffers_gb": gib["buffers"],
                "runtime_gb": memory.RUNTIME / 2**30,
                "per_gpu_gb": (held.total + memory.RUNTIME) / 2**30,
                "host_gb": held.host / 2**30,
            },
            "primary_recommendation": plan.strategy,
            "fallback_options": [candidate.plan.strategy for candidate in result.best_of_each()[1:]],
        }
        if plan.engine == "deepspeed":
            config["deepspeed_config"] = {
                "zero_stage": plan.stage,
                "offload_optimizer": plan.offload != "none",
                "offload_param": plan.offload == "parameters",
            }
        elif plan.engine == "fsdp":
            config["fsdp_config"] = {
                "sharding_strategy": "FULL_SHARD",
                "cpu_offload": plan.offload != "none",
                "activation_checkpointing": plan.checkpointing != "none",
            }
        return config

    @staticmethod
    def require_training(task_type: str) -> None:
        """Raise ConfigError for any other task."""
        if task_type != "training":
            raise ConfigError(f"task `{task_type}`: hardware is selected for training only", "give `training`")

    def _search(self, model: Model, cluster: Cluster, batch_size: int) -> Search:
        """What fits among the layouts that these engines carry out."""
        if batch_size < 1:
            raise ConfigError(f"batch_size {batch_size}", "give a whole number from 1 on")
        length = self.sequence_length or min(SEQUENCE_LENGTH, model.context or SEQUENCE_LENGTH)
        return strategy.search(model, cluster, length, batch_size * cluster.gpus, families=strategy.FAMILIES[:-1])


def _model(family: str, name: str) -> Model:
    """The model, where it belongs to the family."""
    if family not in FAMILIES:
        raise ConfigError(
            f"model_family `{family}` is not one of {', '.join(FAMILIES)}",
            nearest(family, FAMILIES) or "only text models are planned",
        )
    model = models.load(name)
    if not FAMILIES[family](model):
        right = next(known for known, holds in FAMILIES.items() if holds(model))
        raise ConfigError(f"{model.name} is no {family} model", f"give model_family {right}")
    return model


def _cluster(name: str, gpus: int, memory_gb: float | None = None) -> Cluster:
    """The cluster, with the lowest list price of that accelerator where only the accelerator is named."""
    cluster = hardware.cluster(name, gpus, memory_gb=memory_gb)
    return replace(cluster, dollars_per_gpu_hour=cluster.dollars_per_gpu_hour or hardware.lowest_price(name))


def _dollars(result: Search) -> float | None:
    return result.best.cost.dollars(1e6)
