"""Names of the Hugging Face Trainer's arguments: those that are another name here, a value, or not there, and why.

Together with the names that are the same here these are all fields of ``transformers.TrainingArguments``, version 5.23;
``docs/trainer-names.md`` is made from them.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from course_lib.errors import ConfigError

TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0", "none", "null", "")

ABSENT_TASKS = (
    "regression",
    "multi_label",
    "multi_label_classification",
    "multilabel",
    "token_classification",
    "ner",
    "question_answering",
    "summarization",
    "translation",
    "seq2seq",
    "seq2seq_lm",
    "image_classification",
)
"""Tasks that people ask for and that are not here."""


def is_true(name: str, value: Any) -> bool:
    """A flag's value, from YAML or the command line.

    Raises:
        ConfigError: it is neither true nor false.
    """
    text = str(value).strip().lower()
    if text not in TRUE + FALSE:
        raise ConfigError(f"`{name}` cannot be {value!r}", "choose from `true`, `false`")
    return text in TRUE


def _optimizer(value: Any) -> dict[str, Any]:
    known: dict[str, dict[str, Any]] = {
        "adamw_torch": {"optimizer": "adamw"},
        "adamw_torch_fused": {"optimizer": "adamw"},
        "sgd": {"optimizer": "sgd", "momentum": 0.0},
    }
    if str(value) not in known:
        raise ConfigError(
            f"optim {value} is not here",
            f"use {', '.join(known)}, or --optimizer adafactor, which is torch's, not Transformers'",
        )
    return known[str(value)]


def _trackers(value: Any) -> dict[str, Any]:
    names = value if isinstance(value, list) else str(value).split(",")
    names = [str(name).strip() for name in names]
    here = ("trackio", "wandb", "tensorboard", "jsonl", "none")
    if names == ["all"]:
        return {"tracker": "trackio,wandb,tensorboard"}
    if other := [name for name in names if name not in here]:
        raise ConfigError(f"report_to {other[0]} is not here", f"use {', '.join(here)} or all")
    return {"tracker": ",".join(names)}


def _logging(value: Any) -> dict[str, Any]:
    if str(value) not in ("no", "epoch", "steps", "False"):  # YAML reads a bare `no` as false
        raise ConfigError(f"`logging_strategy` cannot be {value!r}", "choose from `no`, `epoch`, `steps`")
    return {} if str(value) == "steps" else {"logging_steps": None if str(value) == "epoch" else 0}


def _sampling(value: Any) -> dict[str, Any]:
    if str(value) not in ("random", "group_by_length"):
        raise ConfigError(f"train_sampling_strategy {value} is not here", "use random or group_by_length")
    return {"group_by_length": str(value) == "group_by_length"}


def _fsdp(value: Any) -> dict[str, Any]:
    text = str(value).strip().lower()
    if text not in (*TRUE, *FALSE, "full_shard", "full_shard auto_wrap"):
        raise ConfigError(f"fsdp {value} is not here", "use --strategy fsdp, with --shard_group_size or --offload")
    return {} if text in FALSE else {"strategy": "fsdp"}


def _schedule_arguments(value: Any) -> dict[str, Any]:
    return {"lr_scheduler_kwargs": json.dumps(value) if isinstance(value, Mapping) else value}


TRANSLATIONS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "optim": ("`optimizer`: adamw_torch and adamw_torch_fused are adamw; sgd is sgd with momentum 0", _optimizer),
    "report_to": ("`tracker`: trackio, wandb, tensorboard, none; all is these three", _trackers),
    "logging_strategy": ("`logging_steps`: none is each epoch, 0 only at the end", _logging),
    "train_sampling_strategy": ("`group_by_length`", _sampling),
    "fsdp": ("`strategy fsdp`: true or full_shard", _fsdp),
    "disable_tqdm": (
        "`progress_bar`, turned round",
        lambda value: {"progress_bar": not is_true("disable_tqdm", value)},
    ),
    "use_cpu": ("`device cpu`", lambda value: {"device": "cpu"} if is_true("use_cpu", value) else {}),
    "lr_scheduler_kwargs": ("the same, a mapping or a JSON object", _schedule_arguments),
}
"""How a value is written here, in words and as fields."""

ALWAYS: dict[str, tuple[str, str]] = {
    "average_tokens_across_devices": ("true", "each target weighs the same, on whichever rank it is"),
    "enable_jit_checkpoint": ("true", "SIGTERM saves a checkpoint"),
    "remove_unused_columns": ("true", "only the columns of text and label are read"),
    "skip_memory_metrics": ("true", "peak memory is in summary.json; --memory_steps watches it"),
    "dataloader_in_order": ("true", "batches come in their order"),
    "eval_do_concat_batches": ("true", "metrics are of all rows together"),
    "do_train": ("true", "`course train` trains"),
    "do_eval": ("true", "the validation split is evaluated; --eval_steps 0 leaves it to the end"),
    "bf16_full_eval": ("false", "evaluation has the precision of the training"),
    "fp16_full_eval": ("false", "evaluation has the precision of the training"),
    "use_cache": ("false", "no cache of keys and values is kept in training"),
    "auto_find_batch_size": ("false", "`course plan` says what fits"),
    "use_liger_kernel": ("false", "use --torch_compile"),
    "log_on_each_node": ("false", "the main rank alone prints"),
    "save_on_each_node": ("false", "output_dir is one folder for all nodes"),
    "save_only_model": ("false", "a checkpoint has what a restart needs; the model alone is in OUTPUT_DIR/model"),
    "logging_nan_inf_filter": ("false", "a loss that is no finite number ends the run"),
    "prediction_loss_only": ("false", "all metrics are computed, from counts"),
    "eval_on_start": ("false", "use `course evaluate` on the untrained model"),
    "eval_use_gather_object": ("false", "metrics need no objects"),
    "batch_eval_metrics": ("false", "metrics are added up batch by batch anyway"),
    "hub_always_push": ("false", "the trained model is pushed once, at the end"),
    "ignore_data_skip": ("false", "a resumed run goes on with the row that is due"),
    "restore_callback_states_from_checkpoint": ("false", "callbacks keep no state"),
    "dataloader_persistent_workers": ("true", "the workers of the training loader stay"),
    "do_predict": ("false", "use `course evaluate`, or --log_predictions"),
    "hub_strategy": ("end", "the trained model is pushed once, at the end"),
}
"""The one value that is always so, and what there is instead of another."""

ABSENT: dict[str, str] = {
    "optim_args": "use --adam_beta1, --adam_beta2, --adam_epsilon or --momentum",
    "optim_target_modules": "GaLore and APOLLO are not here",
    "activation_checkpointing_kwargs": "use --activation_checkpointing alone: every block is recomputed",
    "gradient_checkpointing_kwargs": "use --activation_checkpointing alone: every block is recomputed",
    "torch_compile_backend": "use --torch_compile, with Inductor",
    "torch_compile_mode": "use --torch_compile, in its default mode",
    "liger_kernel_config": "use --torch_compile",
    "neftune_noise_alpha": "noise on embeddings is not here; a callback can add it",
    "torch_empty_cache_steps": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation",
    "include_num_input_tokens_seen": "tokens are always counted: summary.json has them",
    "log_level": "use --progress_bar false for lines rather than a bar",
    "log_level_replica": "the other ranks print only what ends them",
    "trackio_space_id": "trackio is local here: use `trackio show`",
    "trackio_bucket_id": "trackio is local here: use `trackio show`",
    "trackio_static_space_id": "trackio is local here: use `trackio show`",
    "eval_accumulation_steps": "predictions are not kept, only what metrics are made of",
    "include_for_metrics": "write a callback",
    "hub_token": "set HF_TOKEN, or run `hf auth login`: a key in an option is seen by all users of the machine",
    "hub_revision": "the main branch is pushed to",
    "accelerator_config": "use --split_batches, --seed, and what else `course train --help` has",
    "parallelism_config": "use --tensor_parallel_size, --context_parallel_size, --shard_group_size or "
    "--pipeline_parallel_size",
    "dataloader_prefetch_factor": "each worker holds two batches ready",
    "dataloader_multiprocessing_context": "workers are started as torch starts them on this system",
    "label_names": "name the column with --label_column",
    "length_column_name": "lengths are counted: use --group_by_length alone",
    "ddp_broadcast_buffers": "buffers are those of each rank, and alike",
    "ddp_static_graph": "use --strategy ddp alone",
    "ddp_backend": "it follows the device: nccl for GPUs, gloo for CPUs",
    "ddp_timeout": "use --watchdog SECONDS, which says who is behind",
    "fsdp_config": "use --shard_group_size, --offload or --activation_checkpointing",
    "deepspeed": "use --strategy zero1, zero2 or zero3 with --engine deepspeed; `course plan --emit` writes its file",
    "debug": "a loss that is no finite number ends the run, and names its step",
    "local_rank": "a launcher sets LOCAL_RANK",
}
"""Arguments without a counterpart, and what to do instead."""

OF_SCRIPTS = {"deepspeed_config": ABSENT["deepspeed"]}
"""What DeepSpeed's launcher commonly starts other scripts with (`deepspeed.add_config_arguments`)."""

HUB = ("hub_model_id", "push_to_hub")
NAMES = (*TRANSLATIONS, *ALWAYS, *ABSENT, *OF_SCRIPTS, "hub_model_id", "greater_is_better")
"""Every name that this module answers to."""


def translate(name: str, value: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of this project from one of :data:`NAMES`.

    Args:
        name: with `_`.
        value: as it was given.
        raw: all that was given with it, by name.
    Raises:
        ConfigError: it has no counterpart here, or not with that value.
    """
    if name in TRANSLATIONS:
        return TRANSLATIONS[name][1](value)
    if name == "hub_model_id":
        if not is_true("push_to_hub", raw.get("push_to_hub", "false")):
            raise ConfigError(f"hub_model_id {value} alone pushes nothing", f"use --push_to_hub {value}")
        return {"push_to_hub": str(value)}
    if name == "greater_is_better":
        metric = own_value("best_metric", raw.get("metric_for_best_model", raw.get("best_metric")), raw) or "macro_f1"
        if is_true(name, value) != (metric in ("accuracy", "macro_f1")):
            raise ConfigError(f"greater_is_better {value} is not so for {metric}", "leave it out")
        return {}
    if name in ALWAYS:
        holds, why = ALWAYS[name]
        same = str(value) == holds if holds not in ("true", "false") else is_true(name, value) == (holds == "true")
        if not same:
            raise ConfigError(f"{name} {value} is not here", why)
        return {}
    raise ConfigError(f"{name} is not here", (ABSENT | OF_SCRIPTS)[name])


def own_value(field: str, value: Any, raw: Mapping[str, Any]) -> Any:
    """Our value for a field's value as the Hugging Face Trainer writes it; other values come back as they are."""
    text = str(value).strip().lower()
    if field == "max_steps" and text == "-1":
        return None
    if field == "tf32" and text in ("true", "false"):
        return "on" if text == "true" else "off"
    if field == "best_metric" and value is not None:
        return str(value).removeprefix("eval_")
    if field == "push_to_hub" and text in ("true", "false"):
        if text == "true" and "hub_model_id" not in raw:
            raise ConfigError("push_to_hub true names no repository", "use --push_to_hub NAME or OWNER/NAME")
        return raw["hub_model_id"] if text == "true" else None
    if field == "task" and text.replace("-", "_") in ABSENT_TASKS:
        raise ConfigError(
            f"task {value} is not here", "there are classification (one class per text), causal_lm and masked_lm"
        )
    return value


def check_warmup(raw: Mapping[str, Any]) -> None:
    """Refuse a warm-up that the Hugging Face Trainer's `constant` would ignore."""
    warms = any(str(raw.get(name, 0)) not in ("0", "0.0") for name in ("warmup_steps", "warmup_ratio"))
    if str(raw.get("lr_scheduler_type")) == "constant" and warms:
        raise ConfigError(
            "lr_scheduler_type constant has no warm-up there", "use constant_with_warmup, or leave warmup_steps out"
        )
