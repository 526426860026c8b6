"""Options that the chosen trainer or engine would not read: refused, so that nothing that was asked for is ignored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from course_lib.config.axes import Leaves
from course_lib.config.communication import LOCAL


@dataclass(frozen=True)
class Reader:
    """Configs that read some fields.

    Attributes:
        fields: by name.
        reads: whether a config reads them.
        only: who reads them, to follow "applies to".
        instead: what to do.
        cure: options that make a config read them; None: to leave them out.
    """

    fields: tuple[str, ...]
    reads: Callable[[Leaves], bool]
    only: str
    instead: str = "leave it out"
    cure: Mapping[str, str] | None = None


def _has_buckets(leaves: Leaves) -> bool:
    """Whether gradients travel in buckets of a size: FSDP2 and both forms of ZeRO-3 here send a block at a time."""
    strategy, engine = leaves["strategy"], leaves["engine"]
    by_blocks = (
        strategy == "fsdp"
        or (strategy == "zero3" and engine != "deepspeed")
        or (strategy, engine) == ("zero2", "torch")
    )
    return leaves["training_type"] != "basic" and not by_blocks and leaves["communication"] not in LOCAL


def _by_ddp(leaves: Leaves) -> bool:
    """Whether gradients are summed by DDP, torch's or the course's own."""
    strategies = ("ddp", "zero1") if leaves["engine"] == "torch" else ("ddp",)
    return (
        leaves["training_type"] == "accelerated"
        and leaves["strategy"] in strategies
        and leaves["communication"] not in LOCAL
    )


def _communicates(*ways: str) -> Callable[[Leaves], bool]:
    """Whether ranks communicate in one of some ways."""
    return lambda leaves: leaves["communication"] in ways


READERS = (
    Reader(
        (
            "schedule",
            "pipeline_parallel_size",
            "data_parallel_size",
            "stages_per_rank",
            "pipeline_chunks",
            "split_spec",
            "split_by",
        ),
        lambda leaves: leaves["training_type"] == "pipeline",
        "pipelines",
        "add --training_type pipeline, or leave it out",
        {"training_type": "pipeline"},
    ),
    Reader(("bucket_mb",), _has_buckets, "strategies that send gradients in buckets, not blocks"),
    Reader(("ddp_find_unused_parameters",), _by_ddp, "strategy ddp on several ranks, and zero1 with --engine torch"),
    Reader(
        ("sequence_parallel",),
        lambda leaves: leaves["tensor_parallel_size"] > 1,
        "layers that ranks share",
        "give --tensor_parallel_size too",
        {"tensor_parallel_size": "2"},
    ),
    Reader(
        ("context_parallel",),
        lambda leaves: leaves["context_parallel_size"] > 1,
        "rows that ranks share",
        "give --context_parallel_size too",
        {"context_parallel_size": "2"},
    ),
    Reader(("lean_buffers",), lambda leaves: leaves["engine"] == "deepspeed", "engine deepspeed"),
    Reader(("momentum",), lambda leaves: leaves["optimizer"] in ("sgd", "muon"), "--optimizer sgd and muon"),
    Reader(
        ("adam_beta1", "adam_beta2", "adam_epsilon"),
        lambda leaves: leaves["optimizer"] in ("adamw", "muon"),
        "--optimizer adamw and muon",
    ),
    Reader(("sync_every",), _communicates(*LOCAL), "--communication local_sgd and diloco"),
    Reader(("outer_lr", "outer_momentum"), _communicates("diloco"), "--communication diloco"),
    Reader(("powersgd_rank",), _communicates("powersgd"), "--communication powersgd"),
    Reader(("topk_density",), _communicates("topk"), "--communication topk"),
    Reader(("error_feedback",), _communicates("powersgd", "topk"), "--communication powersgd and topk"),
    Reader(
        ("router_aux_loss_coef",),
        lambda leaves: leaves["training_type"] != "pipeline" and not leaves["torch_compile"],
        "models that are neither in a pipeline nor compiled",
    ),
    Reader(("label_column",), lambda leaves: leaves["task"] == "classification", "--task classification"),
    Reader(
        ("packing", "chat_template", "streaming"),
        lambda leaves: leaves["task"] == "causal_lm",
        "--task causal_lm",
        "add --task causal_lm, or leave it out",
        {"task": "causal_lm"},
    ),
    Reader(
        ("stream_window",),
        lambda leaves: leaves["streaming"],
        "--streaming",
        "add --streaming, or leave it out",
        {"streaming": "true"},
    ),
    Reader(("max_train_samples",), lambda leaves: not leaves["streaming"], "data that are not streamed"),
    Reader(("mlm_probability",), lambda leaves: leaves["task"] == "masked_lm", "--task masked_lm"),
    Reader(
        ("lora_alpha", "lora_dropout", "lora_targets", "load_in_4bit"),
        lambda leaves: leaves["lora_r"] is not None,
        "adapters",
        "give --lora_r too, or leave it out",
        {"lora_r": "8"},
    ),
    Reader(
        ("split_by",),
        lambda leaves: leaves["split_spec"] is None,
        "models that split_spec does not cut",
        "keep one of the two",
    ),
    Reader(
        ("watch_steps",), lambda leaves: leaves["watch"] != "none", "--watch", "add --watch parameters, or leave it out"
    ),
    Reader(
        ("watch", "log_predictions", "log_model", "track_every_rank"),
        lambda leaves: leaves["tracker"] != "none",
        "tracked runs",
        "name a --tracker, or leave it out",
    ),
    Reader(
        ("memory_alert", "imbalance_alert"),
        lambda leaves: leaves["memory_steps"] > 0,
        "watched memory",
        "add --memory_steps, or leave it out",
    ),
    Reader(
        ("profile_wait", "profile_warmup"),
        lambda leaves: leaves["profile_steps"] > 0 or leaves["profile"],
        "profiled steps",
        "add --profile_steps, or leave it out",
    ),
    Reader(("eval_delay",), lambda leaves: leaves["eval_steps"] != 0, "evaluations during training"),
    Reader(
        ("desync_steps",),
        lambda leaves: leaves["desync_check"] != "off",
        "the desync check",
        "use --desync_check sampled, or leave it out",
    ),
    Reader(
        ("hub_private",),
        lambda leaves: leaves["push_to_hub"] is not None,
        "pushes to the Hub",
        "add --push_to_hub, or leave it out",
    ),
)


def first_unread(leaves: Leaves, defaults: Leaves) -> tuple[str, Reader] | None:
    """The first field that is not at its default although this config does not read it; None where all are read.

    Args:
        leaves: the config's fields.
        defaults: what they are where nobody says anything.
    """
    return next(
        (
            (name, reader)
            for reader in READERS
            for name in reader.fields
            if leaves[name] != defaults[name] and not reader.reads(leaves)
        ),
        None,
    )
