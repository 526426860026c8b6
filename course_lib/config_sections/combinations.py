"""Which options of a run go together: one table of axes, and of the combinations of them that are refused.

An axis is a choice about how ranks share a model's state and work, or one that has to know how they do. A row of
:data:`REFUSALS` names axes that are not had together, why, and what to do instead; what no row names runs. The
configuration, ``course train --explain``, the planner, the documentation and lesson 08 read this table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from course_lib.config_sections.parallel import ENGINES
from course_lib.config_sections.unread import Leaves
from course_lib.errors import ConfigError

WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved", "looped_bfs")
"""Schedules that make a stage's backward in one go."""


class Axis(NamedTuple):
    """One choice.

    Attributes:
        options: that choose it, the telling one last.
        chosen: whether a run has it.
    """

    options: Mapping[str, Any]
    chosen: Callable[[Leaves], bool]

    @property
    def option(self) -> str:
        """Name of the option that chooses it."""
        return [*self.options][-1]


def _value(name: str, *values: Any) -> Axis:
    """An axis that some values of an option choose; the first is the example."""
    return Axis({name: values[0]}, lambda leaves: leaves[name] in values)


def _ranks(name: str) -> Axis:
    """An axis along which several ranks lie."""
    return Axis({name: 2}, lambda leaves: leaves[name] > 1)


def _anything(name: str, **example: Any) -> Axis:
    """An axis that every value of an option chooses, but for none and false."""
    return Axis(example, lambda leaves: leaves[name] not in (None, False))


AXES: dict[str, Axis] = {
    "basic": _value("training_type", "basic"),
    "accelerated": _value("training_type", "accelerated"),
    "pipeline": _value("training_type", "pipeline"),
    "ddp": Axis(
        {"strategy": "ddp"}, lambda leaves: (leaves["training_type"], leaves["strategy"]) == ("accelerated", "ddp")
    ),
    "zero1": _value("strategy", "zero1"),
    "zero2": _value("strategy", "zero2"),
    "zero3": _value("strategy", "zero3"),
    "fsdp": _value("strategy", "fsdp"),
    "torch": _value("engine", "torch"),
    "scratch": _value("engine", "scratch"),
    "deepspeed": _value("engine", "deepspeed"),
    "accelerate": _value("engine", "accelerate"),
    "tensor": _ranks("tensor_parallel_size"),
    "sequence": _anything("sequence_parallel", tensor_parallel_size=2, sequence_parallel=True),
    "context": _ranks("context_parallel_size"),
    "experts": _ranks("expert_parallel_size"),
    "communication": Axis({"communication": "int8"}, lambda leaves: leaves["communication"] != "all_reduce"),
    "groups": _anything("shard_group_size", shard_group_size=2),
    "offload": _value("offload", "optimizer", "parameters"),
    "offload_parameters": _value("offload", "parameters"),
    "compile": _value("torch_compile", True),
    "checkpointing": _value("activation_checkpointing", True),
    "fp16": _value("mixed_precision", "fp16"),
    "lora": _anything("lora_r", lora_r=8),
    "4bit": _anything("load_in_4bit", lora_r=8, load_in_4bit=True),
    "sgd": _value("optimizer", "sgd"),
    "adafactor": _value("optimizer", "adafactor"),
    "muon": _value("optimizer", "muon"),
    "watch": Axis({"tracker": "jsonl", "watch": "gradients"}, lambda leaves: leaves["watch"] in ("gradients", "all")),
    "async_save": _value("async_save", True),
    "split_backward": Axis(
        {"training_type": "pipeline", "schedule": "zb_h1"},
        lambda leaves: leaves["training_type"] == "pipeline" and leaves["schedule"] not in WHOLE_BACKWARD,
    ),
    "split_batches": _value("split_batches", True),
    "classification": _value("task", "classification"),
    "fast_kernels": _value("cpu_kernels", "fast"),
    "profile": _value("profile", True),
    "cpu": _value("device", "cpu"),
    "mps": _value("device", "mps"),
}
"""Every choice by its name in :data:`REFUSALS`. ``ddp`` is that of the accelerated trainer: between pipelines it is no
wrapper, only a sum of gradients."""

NAMES = ("torch", "scratch", "deepspeed", "accelerate")
"""Of all engines."""
ZERO, SHARDED = "zero1|zero2|zero3", "zero1|zero2|zero3|fsdp"


@dataclass(frozen=True)
class Refusal:
    """Axes that are not had together.

    Attributes:
        axes: a refused run has all of them; ``a|b`` is one of the two.
        why: a sentence with names of options in braces, for their values, and ``{0}``, ``{1}``, … for the option that
            chose the first axis, the second, ….
        instead: what to do, likewise.
        cure: options under which the same run would not be refused for this.
    """

    axes: tuple[str, ...]
    why: str
    instead: str = "leave one of the two out"
    cure: Mapping[str, str | None] = field(default_factory=dict)

    def chosen(self, leaves: Leaves) -> tuple[str, ...] | None:
        """The axes of a run that it refuses together; None where the run lacks one of them."""
        found = [next((a for a in either.split("|") if AXES[a].chosen(leaves)), None) for either in self.axes]
        return None if None in found else tuple(map(str, found))

    def error(self, leaves: Leaves) -> ConfigError:
        """The line for a run that it refuses."""
        options = [AXES[axis].option for axis in self.chosen(leaves) or ()]
        why, instead = (text.format(*options, **leaves) for text in (self.why, self.instead))
        cure = {option: value for option, value in self.cure.items() if leaves[option] != value}
        return ConfigError(why, instead, cure=cure or None)


ACCELERATED = {"training_type": "accelerated"}

REFUSALS: tuple[Refusal, ...] = (
    # --- one process ---
    Refusal(
        ("basic", "tensor|context|experts"),
        "training_type basic runs one process, and {1} is for several that share a model",
        "use --training_type accelerated",
        ACCELERATED,
    ),
    Refusal(
        ("basic", SHARDED),
        "training_type basic runs one process, and {strategy} shares state among several",
        "use --training_type accelerated",
        ACCELERATED,
    ),
    # --- less communication ---
    Refusal(
        ("communication", f"basic|pipeline|{SHARDED}|torch|deepspeed|accelerate"),
        "communication {communication} is between whole copies of a model, as strategy ddp with engine scratch has",
        "use --strategy ddp --engine scratch, or leave it out",
        ACCELERATED | {"strategy": "ddp", "engine": "scratch"},
    ),
    Refusal(
        ("communication", "tensor|context|experts"),
        "communication {communication} is between whole copies of a model with rows of their own, and {1} leaves a "
        "rank a part of one",
    ),
    # --- pipelines ---
    Refusal(
        ("pipeline", "deepspeed|accelerate"), "engine {engine} has no pipelines here", "use --engine scratch or torch"
    ),
    Refusal(
        ("pipeline", "zero2|zero3"),
        "{strategy} moves gradients or parameters with every micro-batch, of which a pipeline has many in flight",
        "use --strategy ddp, zero1 or fsdp, which moves them once a step",
    ),
    Refusal(
        ("pipeline", "fsdp", "scratch"),
        "engine scratch moves gradients and parameters of fsdp with every micro-batch, of which a pipeline has many in "
        "flight",
        "use --engine torch, or --strategy zero1",
        {"engine": "torch"},
    ),
    Refusal(
        ("pipeline", "experts"),
        "expert_parallel_size sends tokens in each layer on all its ranks at once, and the stages of a pipeline take "
        "turns",
    ),
    Refusal(
        ("pipeline", "context"),
        "pipelines send whole rows from stage to stage, and context_parallel_size cuts them",
        "use --training_type accelerated",
        ACCELERATED,
    ),
    Refusal(
        ("pipeline", "lora"),
        "lora_r goes beside layers of a whole model, and a pipeline's ranks have stages of it",
        "use --training_type accelerated",
        ACCELERATED,
    ),
    Refusal(
        ("pipeline", "adafactor"),
        "pipelines cannot store adafactor's state, which is not of its parameters' shape",
        "use --optimizer adamw or sgd",
    ),
    Refusal(
        ("pipeline", "muon"),
        "muon looks for the blocks of a whole model, and a pipeline's stage has some of them",
        "use --optimizer adamw or sgd",
    ),
    Refusal(
        ("split_backward", "compile"),
        "torch_compile makes one backward of a block, which schedule {schedule} takes apart",
        "use gpipe, 1f1b, interleaved or looped_bfs",
    ),
    Refusal(
        ("split_backward", "checkpointing"),
        "schedule {schedule} splits the backward, and with activation_checkpointing each half would compute the "
        "forward again",
        "use gpipe, 1f1b, interleaved or looped_bfs",
    ),
    Refusal(
        ("pipeline", "split_batches"), "split_batches is not for pipelines", "give batch_size as rows per pipeline"
    ),
    # --- layers that ranks share ---
    Refusal(
        ("tensor", "deepspeed|accelerate"),
        "engine {engine} does not sum gradients over the copies of a piece alone, which tensor_parallel_size needs",
        "use --engine scratch",
        {"engine": "scratch"},
    ),
    Refusal(
        ("tensor", "ddp", "torch"),
        "Accelerate's DDP sums gradients over all ranks, and those of tensor_parallel_size have pieces of their own",
        "use --engine scratch",
        {"engine": "scratch"},
    ),
    Refusal(
        ("sequence", "accelerated", "torch"),
        "engine torch has parameters of its own, and sequence_parallel sums gradients at the model's",
        "use --engine scratch",
        {"engine": "scratch"},
    ),
    Refusal(
        ("tensor", "adafactor|muon"),
        "{optimizer} needs whole rows and columns, which tensor_parallel_size divides",
        "use --optimizer adamw or sgd",
    ),
    # --- experts and tokens that ranks share ---
    Refusal(
        ("experts", "tensor|context"),
        "expert_parallel_size is for ranks with different rows, and those of {1} have the same",
    ),
    Refusal(
        ("experts", "deepspeed|accelerate"),
        "engine {engine} does not know ranks with different experts",
        "use --engine scratch",
        {"engine": "scratch"},
    ),
    Refusal(
        ("experts", "ddp|zero1", "torch"),
        "torch's DDP sums gradients over all ranks, and those of expert_parallel_size have experts of their own",
        "use --engine scratch, or --strategy fsdp",
        {"engine": "scratch"},
    ),
    Refusal(
        ("experts", "zero3|fsdp", "scratch"),
        "engine scratch gathers whole layers on every rank, and expert_parallel_size keeps experts apart",
        "use --engine torch, or --strategy ddp, zero1 or zero2",
        {"engine": "torch"},
    ),
    Refusal(
        ("experts", "adafactor|muon"),
        "{optimizer} is for whole copies of a model, and expert_parallel_size leaves a rank some experts",
        "use --optimizer adamw or sgd",
    ),
    Refusal(
        ("context", "classification"),
        "context_parallel_size is for losses of every token, and classification reads one of a row",
        "leave it out, or use --task causal_lm or masked_lm",
    ),
    # --- adapters ---
    Refusal(
        ("lora", "tensor|experts"),
        "lora_r goes beside whole matrices, and {1} leaves a rank pieces of them",
        "leave one of the two out, or shard by --strategy fsdp, without {1}",
    ),
    Refusal(
        ("lora", "communication"),
        "communication {communication} is for gradients and weights of a whole model, and lora_r leaves a hundredth of "
        "them",
    ),
    Refusal(
        ("lora", "adafactor|muon"),
        "{optimizer} looks at an update's whole matrix, and lora_r trains two factors of it",
        "use --optimizer adamw or sgd",
        {"optimizer": "adamw"},
    ),
    Refusal(
        ("lora", "offload"),
        "offload moves the optimizer's state off the GPU, and lora_r leaves next to none",
        "leave it out; --load_in_4bit and --strategy fsdp make the frozen weights small",
    ),
    Refusal(
        ("4bit", "deepspeed"),
        "load_in_4bit keeps weights as bytes, and DeepSpeed casts all parameters to the run's precision",
        "use --engine torch or scratch",
        {"engine": "torch"},
    ),
    Refusal(("4bit", "compile"), "torch_compile cannot see into the unpacking of load_in_4bit"),
    # --- optimizers ---
    Refusal(
        (SHARDED, "adafactor"),
        "{strategy} cannot shard adafactor: its update of an element needs whole rows and columns",
        "use --optimizer adamw or sgd, or --strategy ddp",
    ),
    Refusal(
        (SHARDED, "muon"),
        "{strategy} cannot shard muon: its update of an element needs whole matrices",
        "use --optimizer adamw or sgd, or --strategy ddp",
    ),
    # --- where state lies ---
    Refusal(
        ("offload", "cpu"),
        "offload moves state off a GPU, and this run is on the CPU",
        "use --offload none",
        {"offload": None},
    ),
    Refusal(("offload|groups", "pipeline|tensor|experts"), "no engine has {0} beside {1}"),
    Refusal(
        ("offload", f"basic|ddp|scratch|{ZERO}", "basic|torch|scratch"),
        "offload {offload} is not in engine {engine} with {strategy}",
        "use --strategy zero1 to zero3 with --engine deepspeed, or --strategy fsdp --engine torch",
    ),
    Refusal(
        # Accelerate would put DeepSpeed's Adam in its place (accelerate.utils.map_pytorch_optim_to_deepspeed).
        ("offload", "deepspeed", "sgd"),
        "DeepSpeed steps on the host by AdamW alone, and the optimizer is {optimizer}",
        "use --optimizer adamw, or --strategy fsdp --engine torch",
    ),
    Refusal(
        ("offload_parameters", "zero1|zero2"),
        "{strategy} keeps whole parameters, so they cannot be offloaded",
        "use --offload optimizer, or --strategy zero3",
    ),
    Refusal(
        ("groups", f"basic|ddp|{ZERO}|scratch|accelerate"),
        "shard_group_size is for --strategy fsdp --engine torch",
        "leave it out",
    ),
    Refusal(
        ("async_save", "basic|ddp"),
        "async_save is for strategies that shard state",
        "leave it out, or use zero1 … fsdp",
    ),
    # --- compilers, kernels, precision ---
    Refusal(
        ("compile", "fast_kernels"),
        "cpu_kernels fast is not for torch_compile, which makes kernels of its own",
    ),
    Refusal(
        ("compile", "profile"),
        "profile counts PyTorch's operators, which torch_compile replaces by kernels of its own",
        "leave one of the two out, or record with --profile_steps alone",
        {"profile": None, "profile_steps": "3"},
    ),
    Refusal(("fp16", "cpu"), "mixed_precision fp16 has no use on a CPU", "use bf16 or no, or --device cuda"),
    Refusal(
        ("fp16", "pipeline|tensor|experts"),
        "fp16 needs a loss scaler that knows all ranks of {1}",
        "use --mixed_precision bf16 or no",
    ),
    Refusal(
        ("fp16", "scratch"),
        "engine scratch does not scale losses, which fp16 needs",
        "use --mixed_precision bf16, or --engine torch",
    ),
    Refusal(
        ("fp16", SHARDED, "torch|accelerate"),
        "fp16 needs a loss scaler that knows the shards of {strategy}",
        "use --mixed_precision bf16, or --engine deepspeed",
    ),
    # --- what is watched ---
    Refusal(
        ("watch", "tensor|experts"), "watch {watch}: {1} leaves a rank pieces of gradients", "use --watch parameters"
    ),
    Refusal(
        ("watch", SHARDED, "deepspeed|scratch|pipeline"),
        "watch {watch}: the gradients of {strategy} are in flat buffers of the engine {engine}",
        "use --watch parameters",
    ),
    # --- engines ---
    *(
        Refusal(
            ("ddp|basic" if strategy == "ddp" else strategy, "|".join(name for name in NAMES if name not in known)),
            "engine {engine} has no {strategy}",
            f"for {strategy} use {', '.join(known)}",
        )
        for strategy, known in ENGINES.items()
    ),
    Refusal(
        ("accelerate", "cpu"),
        "Accelerate's FSDP plugin does not know CPU processes and would run DDP in silence",
        "use --engine torch, which runs the same fully_shard on CPU and GPU",
        {"engine": "torch"},
    ),
    Refusal(("deepspeed", "mps"), "DeepSpeed does not run on this GPU", "use --engine torch or --device cpu"),
)
"""In order: of several that hold, the first is told."""

OURS_FIRST = ("pipeline", "tensor", "experts", "communication")
"""Axes by which the default engine is the course's own, where it has the layout."""
LAYOUT = {"basic", "accelerated", "pipeline", "ddp", *SHARDED.split("|"), *NAMES, "context", *OURS_FIRST}
"""Axes that decide the default engine; what else is asked for does not change it."""


def refusal(leaves: Leaves) -> Refusal | None:
    """The first row that refuses a run; None where it runs.

    Args:
        leaves: every field by name, the engine filled in.
    """
    return next((row for row in REFUSALS if row.chosen(leaves)), None)


def check(leaves: Leaves) -> None:
    """Refuse a run with a row's line.

    Raises:
        ConfigError: the run has axes that are not had together.
    """
    if row := refusal(leaves):
        raise row.error(leaves)


def default_engine(leaves: Leaves) -> Any:
    """The engine of a run that names none: the first that has its layout, or the first there is."""
    ours = any(AXES[axis].chosen(leaves) for axis in OURS_FIRST)
    known = (*("scratch",) * ours, *ENGINES[leaves["strategy"]])
    rows = [row for row in REFUSALS if LAYOUT.issuperset("|".join(row.axes).split("|"))]
    return next(
        (engine for engine in known if not any(row.chosen({**leaves, "engine": engine}) for row in rows)), known[0]
    )


def together(defaults: Leaves, *axes: str) -> dict[str, Refusal | None] | None:
    """Whether some axes go together, by engine; None where they are values of one option.

    Where no axis says which strategy, an engine has them together if it has with any of its strategies.

    Args:
        defaults: every field where nobody says anything.
        axes: names in :data:`AXES`.
    Returns:
        For each engine None where it runs them, or the row that refuses them.
    """
    options: dict[str, Any] = {}
    for axis in axes:
        for name, value in AXES[axis].options.items():
            if options.setdefault(name, value) != value:
                return None
    answers = {}
    for engine in NAMES:
        strategies = [options["strategy"]] if "strategy" in options else [s for s in ENGINES if engine in ENGINES[s]]
        rows = [refusal({**defaults, "strategy": s, **options, "engine": engine}) for s in strategies]
        answers[engine] = None if None in rows else rows[0]
    return answers
