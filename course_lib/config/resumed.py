"""Options of a resumed run: each may change, has to be as it was, or does not bear on the training."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

from course_lib.config.axes import ENGINES, Leaves
from course_lib.config.learning import OFFLINE_NAMES


class Change(NamedTuple):
    """A field's value in the checkpoint's config, and in the config of the run that goes on from it."""

    was: Any
    now: Any


@dataclass(frozen=True)
class Rule:
    """Rule for fields of a resumed run whose values differ from the checkpoint's.

    Attributes:
        does: in a word or two, as the documentation says it.
        why: what decides it.
        fields: by name.
    """

    does: str
    why: str
    fields: tuple[str, ...]


SAME = Rule(
    "refused",
    "the data position or the optimizer's state would mean something else",
    ("task", "revision", "optimizer", "seed", "data_seed", "group_by_length", "drop_last"),
)
ADAPTER = Rule(
    "refused",
    "the checkpoint holds these adapters, for these frozen weights",
    ("lora_r", "lora_alpha", "lora_targets", "load_in_4bit"),
)
MODEL = Rule(
    "refused where name or architecture differ",
    "the weights are kept from the checkpoint, and only a folder of the same name may lie elsewhere",
    ("model",),
)
ROWS = Rule(
    "refused where the tokens differ",
    "a row of the data position has to be the same row",
    (
        "dataset",
        "dataset_config",
        "text_column",
        "label_column",
        "separator",
        "quoting",
        "encoding",
        "train_split",
        "validation_split",
        "test_split",
        "validation_fraction",
        "max_length",
        "packing",
        "chat_template",
        "streaming",
        "stream_window",
        "clean_text",
        "lowercase",
        "max_train_samples",
        "max_eval_samples",
    ),
)
BATCH = Rule(
    "refused where a step has other rows",
    "the ranks and their layout may change, the global batch may not",
    (
        "batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "split_batches",
        "num_processes",
        "training_type",
        "pipeline_parallel_size",
        "data_parallel_size",
        "tensor_parallel_size",
        "context_parallel_size",
    ),
)
JUDGING = Rule(
    "applied, and the best evaluation so far does not count",
    "it was judged otherwise",
    ("best_metric", "mlm_probability"),
)
APPLIED = Rule(
    "applied",
    "it is read afresh at each start",
    (
        # data and model
        "pad_to_multiple_of",
        "dynamic_padding",
        "num_workers",
        "pin_memory",
        "activation_checkpointing",
        "torch_compile",
        "attention",
        "attention_dropout",
        "lora_dropout",
        # how a gradient becomes a step
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "momentum",
        "max_grad_norm",
        "label_smoothing_factor",
        "router_aux_loss_coef",
        "lr_scheduler",
        "lr_scheduler_kwargs",
        "warmup_ratio",
        "warmup_steps",
        "loss_weighting",
        # how the ranks share state and work
        "strategy",
        "engine",
        "bucket_mb",
        "ddp_find_unused_parameters",
        "lean_buffers",
        "sequence_parallel",
        "context_parallel",
        "expert_parallel_size",
        "offload",
        "shard_group_size",
        "schedule",
        "stages_per_rank",
        "pipeline_chunks",
        "split_spec",
        "split_by",
        # what they say to each other
        "communication",
        "sync_every",
        "outer_lr",
        "outer_momentum",
        "diloco_fragments",
        "diloco_overlap",
        "diloco_keep",
        "powersgd_rank",
        "topk_density",
        "quantization_block",
        "error_feedback",
        # how long, and on what
        "device",
        "mixed_precision",
        "tf32",
        "cpu_kernels",
        "num_epochs",
        "max_steps",
        "deterministic",
        "early_stopping_patience",
        "keep_best",
    ),
)
LOOKED = Rule(
    "applied, and not in the run's history",
    "it says when to look and to save, not what a step does",
    (
        "eval_batch_size",
        "logging_steps",
        "logging_first_step",
        "eval_steps",
        "eval_delay",
        "baselines",
        "save_steps",
        "save_total_limit",
        "async_save",
        "watch",
        "watch_steps",
        "log_predictions",
        "memory_steps",
        "memory_alert",
        "imbalance_alert",
        "communication_steps",
        "profile",
        "profile_steps",
        "profile_wait",
        "profile_warmup",
        "watchdog",
        "desync_check",
        "desync_steps",
    ),
)
ELSEWHERE = Rule(
    "applied, and not said",
    "it says where a run is and who hears of it, not what it does",
    (
        "output_dir",
        "overwrite_output_dir",
        "resume_from_checkpoint",
        "push_to_hub",
        "hub_private",
        "progress_bar",
        "tracker",
        "project",
        "run_name",
        "run_group",
        "track_every_rank",
        "track_system",
        "log_model",
        "env_file",
    ),
)
RULES = (APPLIED, LOOKED, JUDGING, BATCH, ROWS, MODEL, ADAPTER, SAME, ELSEWHERE)
"""Every field of a config stands in one of them."""

KEEPS_RANK_STATE = ("outer_lr", "outer_momentum", "diloco_keep", "topk_density", "quantization_block")
"""Fields of communication under whose other values a rank goes on with what it alone had."""


def effective(leaves: Leaves) -> dict[str, Any]:
    """The fields of a config with the defaults that follow from other fields filled in.

    Args:
        leaves: of a checkpoint of an older version some may be missing.
    """
    values = dict(leaves)
    metrics = {"classification": "macro_f1", "causal_lm": "loss", "masked_lm": "loss"}
    for name, other, default in (
        ("data_seed", "seed", lambda seed: seed),
        ("best_metric", "task", metrics.get),
        ("engine", "strategy", lambda strategy: ENGINES[strategy][0]),
    ):
        if name in values and values[name] is None and other in values:
            values[name] = default(values[other])
    if values.get("lora_r") and values.get("lora_alpha", 0) is None:
        values["lora_alpha"] = 2.0 * values["lora_r"]
    if values.get("clean_text", True) is None:
        values["clean_text"] = values.get("task") == "classification" or values.get("dataset") in OFFLINE_NAMES
    return values


def changed(before: Leaves, now: Leaves) -> dict[str, Change]:
    """The fields that both configs have, with other values, in the order of the rules.

    Where a default follows from a field that is another, that one alone counts.
    """
    was, is_now = effective(before), effective(now)
    return {
        name: Change(was[name], is_now[name])
        for rule in RULES
        if rule is not ELSEWHERE
        for name in rule.fields
        if name in before and name in now and before[name] != now[name] and was[name] != is_now[name]
    }


def among(changes: Mapping[str, Change], *rules: Rule) -> dict[str, Change]:
    """Those changes whose fields stand in some rules."""
    return {name: change for name, change in changes.items() if any(name in rule.fields for rule in rules)}


def refused(changes: Mapping[str, Change], *, same_rows: bool, same_batch: bool) -> dict[str, Change]:
    """Those changes with which a run cannot go on.

    Args:
        changes: see :func:`changed`.
        same_rows: whether the tokens of all splits are those of the checkpoint.
        same_batch: whether a step has as many rows.
    """
    changed = among(changes, SAME, ADAPTER)
    if "model" in changes and len({PurePath(path).name for path in changes["model"]}) > 1:
        changed["model"] = changes["model"]
    if not same_rows:
        changed |= among(changes, ROWS, MODEL)
    return changed if same_batch else changed | among(changes, BATCH)


def shown(value: Any) -> str:
    """A value as one types it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def told(changes: Mapping[str, Change], was: str = "was") -> str:
    """``learning_rate 1e-05 (was 0.001), weight_decay 0.5 (was 0.01)``."""
    return ", ".join(f"{name} {shown(change.now)} ({was} {shown(change.was)})" for name, change in changes.items())
