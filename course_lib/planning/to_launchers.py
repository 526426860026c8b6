"""A plan in the words of the tools that carry it out: this course's trainer, torchrun, the Hugging Face Trainer.

What only other systems run (splits of architectures that have no plan here, sequences that are split in pipelines, fp16
without a loss scaler) is refused with the reason.
"""

import math
import shlex
from typing import Any

from course_lib.config import combinations
from course_lib.errors import ConfigError
from course_lib.planning import models
from course_lib.planning.models import Model
from course_lib.planning.plan import Plan

SPLITTABLE = ("gpt2", "bert", "roberta", "xlm-roberta", "camembert", "llama", "mistral", "qwen2", "gemma")
"""Architectures whose layers ``course train`` splits: those of ``course_lib.parallel.tensor_plans.PLANS``."""

SHARED_ROWS = ("bert", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmoe", "qwen2", "qwen3")
"""Architectures whose sequences ``course train`` splits: those of ``course_lib.modeling.context.ATTENTION``."""
SPREAD = ("mixtral", "olmoe")
"""Mixtures whose experts ``course train`` spreads: those of ``course_lib.modeling.mixtures``."""
WAYS = {"ring": "ring", "gather": "allgather", "ulysses": "ulysses"}
"""Of a plan's ways to attend to split sequences, the option's names."""


COURSE_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd-momentum": {"optimizer": "sgd"},
    "sgd": {"optimizer": "sgd", "momentum": 0.0},
    "adafactor": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon"},
}
"""Options of ``course train`` by a plan's optimizer."""


def why_not(plan: Plan, model: Model) -> str | None:
    """Reason why ``course train`` does not run such a plan, as what it lacks; None where it runs it."""
    if model.encoder_decoder:
        return "has no task for an encoder with a decoder"
    if reason := _why_no_options(plan) or _refused(plan):
        return reason
    if plan.context > 1 and (reason := _why_not_split(plan, model)):
        return reason
    if plan.pipeline > 1 and model.family not in {*models.families(), *SPREAD}:
        return f"may not know where to cut {model.family} into stages, which the planner has not tried"
    if plan.expert > 1 and model.family not in SPREAD:
        return f"does not share experts of {model.family}, only of {', '.join(SPREAD)}"
    if plan.tensor > 1 and model.family not in SPLITTABLE:
        return f"does not split single layers of {model.family}, only of {', '.join(SPLITTABLE)}"
    if plan.lora_rank and model.experts > 1:
        return "puts no adapters beside experts"
    return None


def _why_no_options(plan: Plan) -> str | None:
    """Why there are no options of ``course train`` for a plan; None where there are."""
    if plan.pipeline > 1 and plan.stage > 1:
        return "gathers whole stages in pipelines, which a plan does not count"
    if plan.checkpointing not in ("none", "full"):
        return "recomputes whole blocks or nothing"
    if plan.precision not in ("fp32", "tf32", "fp16", "bf16"):
        return f"does not compute in {plan.precision}"
    if plan.loss == "linear":
        return "computes all logits before the loss"
    if plan.optimizer not in COURSE_OPTIMIZERS:
        return f"has no optimizer {plan.optimizer}"
    return None


def _refused(plan: Plan) -> str | None:
    """The refusal of a plan's options by the table of combinations; None where they go together."""
    leaves = {**combinations.PLAIN, **_laid_out(plan)}
    leaves["engine"] = leaves["engine"] or combinations.default_engine(leaves)
    row = combinations.refusal(leaves)
    return f"refuses it: {row.error(leaves).what}" if row else None


def _why_not_split(plan: Plan, model: Model) -> str | None:
    """Why ``course train`` does not run a plan whose sequences are split; None where it does."""
    if model.family not in SHARED_ROWS:
        return f"does not split sequences of {model.family}, only of {', '.join(SHARED_ROWS)}"
    heads, key_heads = model.heads // plan.tensor, model.kv_heads // plan.tensor
    divide = heads % plan.context == 0 and (key_heads % plan.context == 0 or plan.context % key_heads == 0)
    if plan.context_by == "ulysses" and not divide:
        return f"cannot deal {heads} heads with {key_heads} key heads to {plan.context} ranks"
    if plan.sequence_length % _chunks(plan):
        return f"does not cut {plan.sequence_length} tokens into {_chunks(plan)} equal chunks"
    return None


def _chunks(plan: Plan) -> int:
    """Equal parts that split sequences are cut into at least; a ring's are twice as many where that divides."""
    return plan.context * (2 if plan.context_by == "gather" else 1)


def _splits(plan: Plan) -> dict[str, Any]:
    """Options of ``course train`` for sequences that are split, without dropout in attention."""
    zigzag = plan.context_by == "ring" and plan.sequence_length % (2 * plan.context) == 0
    return {
        "context_parallel_size": plan.context,
        "context_parallel": "zigzag" if zigzag else WAYS[plan.context_by],
        "attention_dropout": 0.0,
    }


def runs_here(plan: Plan, model: Model) -> bool:
    """Whether ``course train`` has such a layout: DDP, ZeRO, FSDP, pipelines, layers and sequences that ranks share."""
    return why_not(plan, model) is None


def steps(plan: Plan, tokens: float) -> int:
    """Optimizer steps that train on so many tokens, the last one not cut short."""
    return math.ceil(tokens / (plan.global_batch * plan.sequence_length))


def options(plan: Plan, model: Model, *, dataset: str | None = None, tokens: float | None = None) -> dict[str, Any]:
    """Options of ``course train``, by name.

    Args:
        plan: a layout for which :func:`runs_here`; pipelines are trained without torch.compile, and tensor ranks share
            tokens only where the sequence divides.
        model: its name is what the trainer loads.
        dataset: to train on; None leaves it to the trainer.
        tokens: to train on; None leaves the number of steps to the trainer.
    Raises:
        ConfigError: no trainer of ours runs it; the reason is :func:`why_not`'s.
    """
    if reason := why_not(plan, model):
        raise ConfigError(
            f"{plan.strategy} of {model.name}: `course train` {reason}",
            f"use {elsewhere(plan, model)}; or take a plan of another family",
        )
    task = "causal_lm" if model.causal else "masked_lm"
    asked: dict[str, Any] = {"model": model.name, "task": task} | _laid_out(plan)
    if dataset:
        asked["dataset"] = dataset
    if tokens:
        asked["max_steps"] = steps(plan, tokens)
    return asked


def _laid_out(plan: Plan) -> dict[str, Any]:
    """Options of ``course train`` for all but a plan's model and data."""
    asked = (_pipelined(plan) if plan.pipeline > 1 else _unpipelined(plan)) | _split_layout(plan)
    asked |= {
        "max_length": plan.sequence_length,
        "mixed_precision": plan.precision if plan.precision in ("bf16", "fp16") else "no",
    }
    if plan.checkpointing == "full":
        asked["activation_checkpointing"] = True
    if plan.offload != "none":
        asked["offload"] = plan.offload
    if plan.lora_rank:
        asked["lora_r"] = plan.lora_rank
    if plan.base_bits == 4:
        asked["load_in_4bit"] = True
    return asked | COURSE_OPTIMIZERS[plan.optimizer]


def _pipelined(plan: Plan) -> dict[str, Any]:
    """Options of ``course train`` for a pipeline, cut as the plan's memory and time were counted."""
    asked: dict[str, Any] = {
        "training_type": "pipeline",
        "strategy": "zero1" if plan.stage else "ddp",
        "schedule": plan.schedule,
        "pipeline_parallel_size": plan.pipeline,
        "data_parallel_size": plan.data,
        "batch_size": plan.micro_batch * plan.accumulation,
        "pipeline_chunks": plan.accumulation,
        "split_by": "blocks",
    }
    return asked | ({"stages_per_rank": plan.virtual} if plan.virtual > 1 else {})


def _unpipelined(plan: Plan) -> dict[str, Any]:
    """Options of ``course train`` for the sharding strategy, and torch.compile where it composes."""
    asked: dict[str, Any] = {
        "strategy": plan.engine if plan.engine in ("ddp", "fsdp") else f"zero{plan.stage}" if plan.stage else "ddp",
        "batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
    }
    composes = plan.engine != "deepspeed" and plan.base_bits != 4
    return asked | ({"torch_compile": True} if plan.compiled and composes else {})


def _split_layout(plan: Plan) -> dict[str, Any]:
    """Options of ``course train`` for layers, sequences, shards and experts that only some ranks share."""
    asked: dict[str, Any] = {}
    if plan.tensor > 1:
        shares_tokens = plan.sequence_parallel and plan.sequence_length % (plan.tensor * plan.context) == 0
        asked |= {"tensor_parallel_size": plan.tensor, "sequence_parallel": shares_tokens}
    if plan.context > 1:
        asked |= _splits(plan)
    if plan.replicas > 1:
        asked["shard_group_size"] = plan.shards
    if plan.expert > 1:
        asked |= {"engine": "scratch", "expert_parallel_size": plan.expert}
    return asked


def elsewhere(plan: Plan, model: Model) -> str:
    """Trainer that carries a plan out which ours does not run."""
    if plan.pipeline * plan.tensor * plan.expert > 1 or (plan.context > 1 and plan.loss != "linear"):
        return "Megatron-LM or torchtitan"
    adapters = f", PEFT's {'QLoRA' if plan.base_bits == 4 else 'LoRA'}" if plan.lora_rank else ""
    shared = ", Accelerate's ParallelismConfig" if plan.context > 1 else ""
    loss = ", Liger's loss (use_liger_kernel)" if plan.loss == "linear" else ""
    return f"the Hugging Face Trainer{adapters}{shared}{loss}"


def launch_line(
    plan: Plan, gpus_per_node: int, model: Model, *, dataset: str | None = None, tokens: float | None = None
) -> str:
    """The command that starts such a run on every node; for layouts beyond ours a sentence, which says whose they are.

    Where a command has to be, ask :func:`why_not` before.
    """
    if reason := why_not(plan, model):
        return (
            f"It is for {elsewhere(plan, model)}: tensor {plan.tensor}, context {plan.context}, pipeline "
            f"{plan.pipeline} ({plan.schedule}, {plan.virtual} stages per rank), data {plan.data}; `course train` "
            f"{reason}."
        )
    nodes = -(-plan.gpus // gpus_per_node)
    processes = f"--nproc_per_node {min(gpus_per_node, plan.gpus)}"
    where = f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint HOST:29500" if nodes > 1 else "--standalone"
    given = (
        f"--{name} {str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))}"
        for name, value in options(plan, model, dataset=dataset, tokens=tokens).items()
    )
    return f"torchrun {where} {processes} -m course_lib.cli train " + " ".join(given)


def one_way(plan: Plan) -> bool:
    """Whether all ranks are data parallel, and FSDP shards over all of them."""
    return plan.pipeline * plan.tensor * plan.context * plan.expert * plan.replicas == 1


def training_arguments(plan: Plan, deepspeed: str | None = None, tokens: float | None = None) -> dict[str, Any]:
    """Arguments of transformers' ``TrainingArguments``, for DDP, ZeRO by DeepSpeed, and FSDP.

    Args:
        plan: without tensor, context, expert and pipeline parallelism, and of one copy.
        deepspeed: path of DeepSpeed's JSON, for its plans.
        tokens: to train on.
    Raises:
        ConfigError: the Hugging Face Trainer has no such layout.
    """
    if not one_way(plan):
        raise ConfigError(
            f"the Hugging Face Trainer does not run {plan.strategy}", "take a plan of DDP, ZeRO or FSDP alone"
        )
    arguments: dict[str, Any] = {
        "output_dir": "runs/planned",
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "torch_compile": plan.compiled and plan.engine != "deepspeed",
    }
    if plan.checkpointing == "full":
        arguments["gradient_checkpointing"] = True  # the name in transformers until 5.22, and an alias until 6
    if plan.loss == "linear":
        arguments["use_liger_kernel"] = True
    theirs = {
        "adamw-8bit": "adamw_bnb_8bit",
        "adafactor": "adafactor",
        "sgd": "sgd",
        "muon": "muon",
        "sgd-momentum": "sgd",
    }
    if plan.optimizer in theirs:
        arguments["optim"] = theirs[plan.optimizer]
    if plan.optimizer == "sgd-momentum":
        arguments["optim_args"] = "momentum=0.9"
    if tokens:
        arguments["max_steps"] = steps(plan, tokens)
    if plan.engine == "deepspeed":
        arguments["deepspeed"] = deepspeed
    if plan.engine == "fsdp":
        arguments |= {
            "fsdp": "full_shard",
            "fsdp_config": {
                "version": 2,
                "reshard_after_forward": True,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "cpu_offload": plan.offload != "none",
            },
        }
    return arguments
