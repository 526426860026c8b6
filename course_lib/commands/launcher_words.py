"""Settings of ``accelerate launch`` as options of this course, one row per environment variable that it leaves.

A word is taken (it becomes options), refused with what to give instead, or decides nothing here. Words that others read
(torch, CUDA, Accelerate's own state) are in :data:`READ_BY_OTHERS`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.errors import ConfigError

Leaves = Mapping[str, tuple[str, ...]]
"""Values by option: the first is taken where the run says nothing, and any of them agrees with the launcher."""
Words = Mapping[str, str]
"""Values by name, in lower case except for paths."""

NOTHING: Leaves = {}
LAUNCHER = "accelerate launch"


@dataclass(frozen=True)
class Word:
    """One word of a launcher.

    Attributes:
        name: of the environment's variable, of the launcher's option where that leaves none (`--name`), or of a key in
            DeepSpeed's file (`a.b`).
        option: of ours that takes a value as it is, where no meaning is listed.
        means: options by value; an empty mapping for a value that says nothing.
        instead: what to give in place of any other value; empty where such values decide nothing here.
        besides: options that go with ``option``.
        where: whether the launcher reads the word, by all of its words.
    """

    name: str
    option: str = ""
    means: Mapping[str, Leaves] | None = None
    instead: str = ""
    besides: Leaves = field(default_factory=dict)
    where: Callable[[Words], bool] = lambda words: True

    @property
    def shown(self) -> str:
        """The word as the launcher's own help has it."""
        return self.name.lower().removeprefix("accelerate_").removeprefix("deepspeed_")

    def read(self, value: str) -> Leaves:
        """Value of the word in our options.

        Raises:
            ConfigError: it has no counterpart here.
        """
        if self.means is not None and value.lower() in self.means:
            return self.means[value.lower()]
        if self.option:
            return {self.option: (value.lower(),), **self.besides}
        if self.instead:
            raise ConfigError(f"{LAUNCHER} says {self.shown} {value}, which is not here", self.instead)
        return NOTHING


def _flag(leaves: Leaves) -> dict[str, Leaves]:
    """The meaning of a word that is true or false."""
    return {"true": leaves, "1": leaves, "false": NOTHING, "0": NOTHING, "none": NOTHING}


ONE: Mapping[str, Leaves] = {"1": NOTHING, "auto": NOTHING, "none": NOTHING}
"""A number that says nothing where it is 1, as launchers write it without being asked."""
OFF: Mapping[str, Leaves] = {"false": NOTHING, "0": NOTHING, "none": NOTHING, "no": NOTHING, "auto": NOTHING}
PRECISIONS: Mapping[str, Leaves] = {
    "no": NOTHING,
    "bf16": {"mixed_precision": ("bf16",)},
    "fp16": {"mixed_precision": ("fp16",)},
}
NOT_DEEPSPEED = ("torch", "scratch", "accelerate")
FULL: Leaves = {"strategy": ("fsdp", "zero3"), "engine": NOT_DEEPSPEED}
GRADIENTS: Leaves = {"strategy": ("zero2",), "engine": NOT_DEEPSPEED[:2]}
SHARDING: Mapping[str, Leaves] = {
    "full_shard": FULL,
    "1": FULL,
    "shard_grad_op": GRADIENTS,
    "2": GRADIENTS,
    "no_shard": {"strategy": ("ddp",)},
    "3": {"strategy": ("ddp",)},
}
HYBRID = "use --strategy fsdp --shard_group_size N, the GPUs of a node, and no --use_fsdp for the launcher"
STAGES: Mapping[str, Leaves] = {"0": {"strategy": ("ddp",)}, "auto": NOTHING} | {
    str(stage): {"strategy": (f"zero{stage}",), "engine": ("deepspeed",)} for stage in (1, 2, 3)
}
DISK = "use --offload optimizer or parameters, in the host's memory: nothing is offloaded to disks here"


def _offloaded(what: str) -> Mapping[str, Leaves]:
    """The meaning of a device that state is offloaded to."""
    return {"none": NOTHING, "auto": NOTHING, "cpu": {"offload": (what, "parameters")}}


def _is(name: str, *values: str) -> Callable[[Words], bool]:
    """Whether another word has one of these values."""
    return lambda words: words.get(name, "").lower() in values


def _fsdp(version: str) -> Callable[[Words], bool]:
    return lambda words: _is("ACCELERATE_USE_FSDP", "true")(words) and words.get("FSDP_VERSION", "1") == version


def _compiles(words: Words) -> bool:
    return words.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"


def _hybrid(words: Words) -> bool:
    return words.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1") != "1"


_uses_fsdp, _uses_deepspeed = _is("ACCELERATE_USE_FSDP", "true"), _is("ACCELERATE_USE_DEEPSPEED", "true")
COMPILE = "use --torch_compile: Inductor in its default mode, block by block"

WORDS = (
    Word(
        "ACCELERATE_MIXED_PRECISION",
        means=PRECISIONS,
        instead="use --mixed_precision bf16 or fp16: matrix products of 8 bits are not here",
    ),
    Word("ACCELERATE_DYNAMO_BACKEND", means={"no": NOTHING, "inductor": {"torch_compile": ("true",)}}, instead=COMPILE),
    Word("ACCELERATE_DYNAMO_MODE", means={"default": NOTHING, "none": NOTHING}, instead=COMPILE, where=_compiles),
    Word("ACCELERATE_DYNAMO_USE_FULLGRAPH", means=OFF, instead=COMPILE, where=_compiles),
    Word(
        "ACCELERATE_DYNAMO_USE_DYNAMIC",
        means=OFF,
        where=_compiles,
        instead="use --torch_compile alone: shapes are fixed where all rows are of one length, else of any size",
    ),
    Word("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"),  # as --torch_compile always compiles
    Word("ACCELERATE_USE_FSDP"),  # its version says which of the next three counts
    Word("FSDP_VERSION"),
    Word("FSDP_SHARDING_STRATEGY", means=SHARDING, instead=HYBRID, where=_fsdp("1")),
    Word(
        "FSDP_RESHARD_AFTER_FORWARD",
        means={"true": FULL, "1": FULL, "false": GRADIENTS, "0": GRADIENTS},
        instead="use --strategy fsdp or zero2",
        where=_fsdp("2"),
    ),
    Word("FSDP_OFFLOAD_PARAMS", means=_flag({"offload": ("parameters", "optimizer")}), where=_uses_fsdp),
    Word("FSDP_ACTIVATION_CHECKPOINTING", means=_flag({"activation_checkpointing": ("true",)}), where=_uses_fsdp),
    Word(
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        means=OFF,
        where=_uses_fsdp,
        instead="use --activation_checkpointing, which recomputes",
    ),
    Word(
        "FSDP_IGNORED_MODULES",
        means={"none": NOTHING},
        where=_uses_fsdp,
        instead="leave it out: every parameter is sharded",
    ),
    Word("FSDP_AUTO_WRAP_POLICY"),  # the blocks of the model are the units; so for the next three
    Word("FSDP_MIN_NUM_PARAMS"),
    Word("FSDP_TRANSFORMER_CLS_TO_WRAP"),
    Word("FSDP_USE_ORIG_PARAMS"),
    Word("FSDP_BACKWARD_PREFETCH"),  # how far ahead is fetched changes no number; so for the next
    Word("FSDP_FORWARD_PREFETCH"),
    Word("FSDP_STATE_DICT_TYPE"),  # checkpoints have the course's own form
    Word("FSDP_CPU_RAM_EFFICIENT_LOADING"),  # every rank loads the same weights; so for the next
    Word("FSDP_SYNC_MODULE_STATES"),
    Word("ACCELERATE_USE_DEEPSPEED"),  # with the stage below
    Word(
        "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        means=STAGES,
        instead="use --strategy zero1, zero2 or zero3",
        where=_uses_deepspeed,
    ),
    Word("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", option="gradient_accumulation_steps", means=ONE),
    Word(
        "--gradient_accumulation_steps",
        option="gradient_accumulation_steps",
        means=ONE,
        where=lambda words: not _uses_deepspeed(words),
    ),
    Word("ACCELERATE_GRADIENT_CLIPPING", option="max_grad_norm", means={"none": NOTHING, "auto": NOTHING}),
    Word(
        "--gradient_clipping",
        option="max_grad_norm",
        means={"none": NOTHING},
        where=lambda words: not _uses_deepspeed(words),
    ),
    Word("--mixed_precision", means={"no": {"mixed_precision": ("no",)}}),  # typed; by default the variable says it
    Word(
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        means=_offloaded("optimizer"),
        instead=DISK,
        where=lambda words: (
            _uses_deepspeed(words) and not _is("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")(words)
        ),
    ),
    Word(
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", means=_offloaded("parameters"), instead=DISK, where=_uses_deepspeed
    ),
    Word("ACCELERATE_DEEPSPEED_CONFIG_FILE"),  # each of its keys is a word: FILE_WORDS
    Word("ACCELERATE_DEEPSPEED_ZERO3_INIT"),  # how much memory the model takes while it is made
    Word("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),  # the trained model is whole, in float32
    Word("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),  # experts are found by their structure
    Word("ACCELERATE_CONFIG_DS_FIELDS"),  # which of these words Accelerate has from its own file
    Word("ACCELERATE_USE_PARALLELISM_CONFIG"),  # with the sizes below
    Word("PARALLELISM_CONFIG_TP_SIZE", option="tensor_parallel_size", means=ONE),
    Word("PARALLELISM_CONFIG_CP_SIZE", option="context_parallel_size", means=ONE),
    Word(
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        means={"allgather": {"context_parallel": ("allgather",)}, "alltoall": {"context_parallel": ("zigzag", "ring")}},
        instead="use --context_parallel",
        where=lambda words: words.get("PARALLELISM_CONFIG_CP_SIZE", "1") != "1",
    ),
    Word(
        "PARALLELISM_CONFIG_SP_SIZE",
        option="context_parallel_size",
        means=ONE,
        besides={"context_parallel": ("ulysses",)},
    ),
    Word("PARALLELISM_CONFIG_DP_SHARD_SIZE", option="shard_group_size", means=ONE, where=_hybrid),
    Word("PARALLELISM_CONFIG_DP_REPLICATE_SIZE"),  # what the other sizes leave of the ranks
    Word("PARALLELISM_CONFIG_CP_BACKEND"),
    Word("PARALLELISM_CONFIG_SP_*"),  # with the size above
    Word(
        "ACCELERATE_USE_MEGATRON_LM",
        means=OFF,
        instead="use --tensor_parallel_size, --training_type pipeline, "
        "--context_parallel_size or --expert_parallel_size, and no --use_megatron_lm for the launcher",
    ),
    Word("MEGATRON_LM_*"),
    Word("ACCELERATE_FP8_*"),  # with the precision fp8
    Word("ACCELERATE_USE_SAGEMAKER", means=OFF, instead="use `course submit --to sagemaker`"),
    Word("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"),
    Word("XLA_USE_BF16", means=OFF, instead="train on GPUs or CPUs: the course does not know TPUs"),
    Word("XLA_DOWNCAST_BF16", means=OFF, instead="train on GPUs or CPUs: the course does not know TPUs"),
)
"""What the launcher of Accelerate leaves in the environment for the script that it starts. A `*` stands for any end."""

READ_BY_OTHERS = {
    "ACCELERATE_USE_CPU": "training/precision.py, as --device cpu",
    "ACCELERATE_CPU_AFFINITY": "Accelerate, which binds a rank to the cores near its GPU",
    "ACCELERATE_DEBUG_MODE": "Accelerate, which compares shapes before its own collectives",
    "OMP_NUM_THREADS": "torch",
    "KMP_AFFINITY": "Intel's OpenMP",
    "KMP_BLOCKTIME": "Intel's OpenMP",
    "CUDA_VISIBLE_DEVICES": "CUDA",
    "PYTHONPATH": "Python",
    "MASTER_ADDR": "torch.distributed",
    "MASTER_PORT": "torch.distributed",
} | dict.fromkeys(
    (
        "ZE_AFFINITY_MASK",
        "MLU_VISIBLE_DEVICES",
        "SDAA_VISIBLE_DEVICES",
        "MUSA_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "HABANA_VISIBLE_MODULES",
        "NEURON_RT_VISIBLE_CORES",
    ),
    "drivers of accelerators that the course does not know, which training/precision.py says",
)
"""Words that reach whom they are for, by who reads them."""

FILE_WORDS = (
    Word("zero_optimization.stage", means=STAGES, instead="use --strategy zero1, zero2 or zero3"),
    Word(
        "zero_optimization.offload_optimizer.device",
        means=_offloaded("optimizer"),
        instead=DISK,
        where=lambda words: not _is("zero_optimization.offload_param.device", "cpu")(words),
    ),
    Word("zero_optimization.offload_param.device", means=_offloaded("parameters"), instead=DISK),
    Word("zero_optimization.*"),  # sizes of buckets, and what overlaps: they change no number
    Word("bf16.enabled", means=_flag({"mixed_precision": ("bf16",)}) | {"auto": NOTHING}),
    Word("fp16.enabled", means=_flag({"mixed_precision": ("fp16",)}) | {"auto": NOTHING}),
    Word("fp16.*"),  # the scale of the loss begins as DeepSpeed has it
    Word("bf16.*"),
    Word("gradient_accumulation_steps", option="gradient_accumulation_steps", means=ONE),
    Word("gradient_clipping", option="max_grad_norm", means={"auto": NOTHING}),
    Word("train_micro_batch_size_per_gpu", option="batch_size", means={"auto": NOTHING}),
    Word(
        "train_batch_size",
        option="global_batch_size",
        means={"auto": NOTHING},
        where=lambda words: any(
            words.get(name, "auto") == "auto"
            for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        ),
    ),
    Word("zero_allow_untested_optimizer"),
    Word("zero_force_ds_cpu_optimizer"),
    Word("steps_per_print"),
    Word("wall_clock_breakdown"),
    Word("timers.*"),
    Word("optimizer.*", instead="use --optimizer, --learning_rate and --weight_decay"),
    Word("scheduler.*", instead="use --lr_scheduler, --warmup_steps and --lr_scheduler_kwargs"),
    Word("*", instead="take it out of DeepSpeed's file: `course train --help` lists what there is"),
)
"""Keys of the file that ``--deepspeed_config_file`` names."""


@dataclass(frozen=True)
class Said:
    """A word that a launcher said, and its value in our options."""

    word: Word
    value: str
    leaves: Leaves

    def __str__(self) -> str:
        return f"{self.word.shown} {self.value}"


def row(name: str, table: tuple[Word, ...] = WORDS) -> Word | None:
    """The first row of a table that a name belongs to."""
    return next(
        (word for word in table if word.name == name or (word.name.endswith("*") and name.startswith(word.name[:-1]))),
        None,
    )


def said(words: Words, beside: Path = Path()) -> list[Said]:
    """Settings of a launcher that mean something here.

    Args:
        words: the environment, and `--name` for options that the launcher keeps to itself.
        beside: folder of the launcher's own file, where a path in it is looked for too.
    Raises:
        ConfigError: something that is not here.
    """
    decide = {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_DEEPSPEED_CONFIG_FILE"}
    if _uses_deepspeed(words) and not decide & {*words}:
        words = {**words, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}  # what Accelerate makes of none
    settings = _read(words, WORDS)
    if (file := words.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")) and _uses_deepspeed(words):
        settings += _read(_keys_of(file, beside), FILE_WORDS)
    return settings


def _read(words: Words, table: tuple[Word, ...]) -> list[Said]:
    rows = ((row(name, table), value) for name, value in words.items())
    read = [Said(word, value, word.read(value)) for word, value in rows if word is not None and word.where(words)]
    return [setting for setting in read if setting.leaves]


def _keys_of(file: str, beside: Path) -> Words:
    """DeepSpeed's file as words: nested keys are joined by points."""
    path = next((path for path in (Path(file), beside / file) if path.is_file()), None)
    if path is None:
        raise ConfigError(
            f"{LAUNCHER} names {file} as DeepSpeed's file, and it is not there",
            "give --deepspeed_config_file a path from here, or leave it out and use --strategy zero2",
        )
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}, DeepSpeed's file, is not JSON ({error})", "mend it, or leave it out") from None
    return dict(_flat(tree))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in tree.items():
        nested = isinstance(value, Mapping)
        pairs += _flat(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", str(value).lower())]
    return pairs
