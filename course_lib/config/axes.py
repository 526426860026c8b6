"""Choices of a run that may not go together: axes along which ranks share a model, what has to know of them, and the
form of a refusal."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from course_lib.errors import ConfigError

Leaves = Mapping[str, Any]
"""Every field of a config by name; ``engine`` is the one that will run."""
ENGINES = {
    "ddp": ("torch", "scratch"),
    "zero1": ("deepspeed", "torch", "scratch"),
    "zero2": ("deepspeed", "torch", "scratch"),
    "zero3": ("deepspeed", "torch", "scratch"),
    "fsdp": ("torch", "scratch", "accelerate"),
}
"""Engines that carry each strategy out, the default one first."""

WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved", "looped_bfs")
"""Schedules that make a stage's backward in one go."""


BY_VALUE = ("training_type", "strategy", "engine", "optimizer", "mixed_precision")
"""Options of which several values are axes."""


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

    @property
    def word(self) -> str:
        """Word for it in a sentence: the option, or its value where other values are axes too."""
        return self.options[self.option] if self.option in BY_VALUE else self.option


def _value(name: str, *values: Any) -> Axis:
    """An axis that some values of an option choose; the first is the example."""
    return Axis({name: values[0]}, lambda leaves: leaves[name] in values)


def _ranks(name: str) -> Axis:
    """An axis along which several ranks lie."""
    return Axis({name: 2}, lambda leaves: leaves[name] > 1)


def _anything(name: str, **example: Any) -> Axis:
    """An axis that every value of an option chooses, except for none and false."""
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
"""Every choice, by its name in the table of refusals. ``ddp`` is that of the accelerated trainer: between pipelines it
is no wrapper, only a sum of gradients."""


def merged(axes: Iterable[str]) -> dict[str, Any] | None:
    """Options that choose several axes, and a strategy that the engine has; None where two are values of one option."""
    options: dict[str, Any] = {}
    for axis in axes:
        for name, value in AXES[axis].options.items():
            if options.setdefault(name, value) != value:
                return None
    known = [strategy for strategy, engines in ENGINES.items() if options.get("engine", engines[0]) in engines]
    return {"strategy": known[0]} | options if "engine" in options else options


@dataclass(frozen=True)
class Refusal:
    """Axes that are not had together.

    Attributes:
        axes: a refused run has all of them; ``a|b`` is one of the two.
        why: a sentence with names of options in braces, for their values, and ``{0}``, ``{1}``, … for the word of the
            run's first axis, the second, ….
        instead: what to do, likewise.
        cure: options under which the same run would not be refused for this.
    """

    axes: tuple[str, ...]
    why: str
    instead: str = "leave one of the two out"
    cure: Mapping[str, str | None] = field(default_factory=dict, hash=False)

    def chosen(self, leaves: Leaves) -> tuple[str, ...] | None:
        """The axes of a run that it refuses together; None where the run lacks one of them."""
        axes = self._of_each(leaves)
        return None if None in axes else tuple(map(str, axes))

    def named(self, leaves: Leaves) -> int:
        """Number of its axes that a run has."""
        return sum(axis is not None for axis in self._of_each(leaves))

    def _of_each(self, leaves: Leaves) -> list[str | None]:
        return [next((a for a in either.split("|") if AXES[a].chosen(leaves)), None) for either in self.axes]

    def examples(self) -> Iterator[dict[str, Any]]:
        """Options of the runs that it refuses, one for each choice of its alternatives that can be made together."""
        for axes in itertools.product(*(either.split("|") for either in self.axes)):
            if (options := merged(axes)) is not None:
                yield options

    def error(self, leaves: Leaves) -> ConfigError:
        """The line for a run that it refuses."""
        words = [AXES[axis].word for axis in self.chosen(leaves) or ()]
        why, instead = (text.format(*words, **leaves) for text in (self.why, self.instead))
        cure = {option: value for option, value in self.cure.items() if leaves.get(option) != value}
        return ConfigError(why, instead, cure=cure or None)
