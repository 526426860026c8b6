"""Options that the chosen trainer or engine would not read: refused, so that nothing that was asked for is ignored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from course_lib.config.axes import Leaves
from course_lib.config.parallel import LOCAL


@dataclass(frozen=True)
class Reader:
    """Configs that read some fields.

    Attributes:
        names: of the fields, with spaces between.
        reads: whether a config reads them.
        only: who reads them, to follow "applies to".
        add: what to do, other than to leave it out.
        cure: options that make a config read them; None: to leave them out.
    """

    names: str
    reads: Callable[[Leaves], bool]
    only: str
    add: str = ""
    cure: Mapping[str, str] | None = None

    @property
    def fields(self) -> list[str]:
        """The names, one by one."""
        return self.names.split()

    @property
    def instead(self) -> str:
        """Cure that a message names."""
        return f"{self.add}, or leave it out" if self.add else "leave it out"


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


def _is(name: str, *values: object) -> Callable[[Leaves], bool]:
    """Whether an option has one of some values."""
    return lambda leaves: leaves[name] in values


def _given(name: str) -> Callable[[Leaves], bool]:
    """Whether an option asks for anything."""
    return lambda leaves: leaves[name] not in (None, False, 0, "none", "off")


def _shared(name: str) -> Callable[[Leaves], bool]:
    """Whether several ranks lie along an axis."""
    return lambda leaves: leaves[name] > 1


_PIPELINE = "schedule pipeline_parallel_size data_parallel_size stages_per_rank pipeline_chunks split_spec split_by"
READERS = (
    Reader(
        _PIPELINE,
        _is("training_type", "pipeline"),
        "pipelines",
        "add --training_type pipeline",
        {"training_type": "pipeline"},
    ),
    Reader("bucket_mb", _has_buckets, "strategies that send gradients in buckets, not blocks"),
    Reader("ddp_find_unused_parameters", _by_ddp, "strategy ddp on several ranks, and zero1 with --engine torch"),
    Reader(
        "sequence_parallel",
        _shared("tensor_parallel_size"),
        "layers that ranks share",
        "give --tensor_parallel_size too",
        {"tensor_parallel_size": "2"},
    ),
    Reader(
        "context_parallel",
        _shared("context_parallel_size"),
        "rows that ranks share",
        "give --context_parallel_size too",
        {"context_parallel_size": "2"},
    ),
    Reader("lean_buffers", _is("engine", "deepspeed"), "engine deepspeed"),
    Reader("momentum", _is("optimizer", "sgd", "muon"), "--optimizer sgd and muon"),
    Reader("adam_beta1 adam_beta2 adam_epsilon", _is("optimizer", "adamw", "muon"), "--optimizer adamw and muon"),
    Reader("sync_every", _is("communication", *LOCAL), "--communication local_sgd and diloco"),
    Reader("outer_lr outer_momentum", _is("communication", "diloco"), "--communication diloco"),
    Reader("powersgd_rank", _is("communication", "powersgd"), "--communication powersgd"),
    Reader("topk_density", _is("communication", "topk"), "--communication topk"),
    Reader("error_feedback", _is("communication", "powersgd", "topk"), "--communication powersgd and topk"),
    Reader(
        "router_aux_loss_coef",
        lambda leaves: leaves["training_type"] != "pipeline" and not leaves["torch_compile"],
        "models that are neither in a pipeline nor compiled",
    ),
    Reader("label_column", _is("task", "classification"), "--task classification"),
    Reader(
        "packing chat_template streaming",
        _is("task", "causal_lm"),
        "--task causal_lm",
        "add --task causal_lm",
        {"task": "causal_lm"},
    ),
    Reader("stream_window", _given("streaming"), "--streaming", "add --streaming", {"streaming": "true"}),
    Reader("max_train_samples", lambda leaves: not leaves["streaming"], "data that are not streamed"),
    Reader("mlm_probability", _is("task", "masked_lm"), "--task masked_lm"),
    Reader(
        "lora_alpha lora_dropout lora_targets load_in_4bit",
        _given("lora_r"),
        "adapters",
        "give --lora_r too",
        {"lora_r": "8"},
    ),
    Reader("split_by", lambda leaves: leaves["split_spec"] is None, "models that split_spec does not cut"),
    Reader("watch_steps", _given("watch"), "--watch", "add --watch parameters"),
    Reader(
        "watch log_predictions log_model track_every_rank",
        lambda leaves: leaves["tracker"] != "none",
        "tracked runs",
        "name a --tracker",
    ),
    Reader("memory_alert imbalance_alert", _given("memory_steps"), "watched memory", "add --memory_steps"),
    Reader(
        "profile_wait profile_warmup",
        lambda leaves: leaves["profile_steps"] > 0 or leaves["profile"],
        "profiled steps",
        "add --profile_steps",
    ),
    Reader("eval_delay", lambda leaves: leaves["eval_steps"] != 0, "evaluations during training"),
    Reader("desync_steps", _given("desync_check"), "the desync check", "use --desync_check sampled"),
    Reader("hub_private", _given("push_to_hub"), "pushes to the Hub", "add --push_to_hub"),
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
