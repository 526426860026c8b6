"""Trains tiny models of every class that `course train` takes with fast kernels and with torch's, and compares.

What may differ is stated with each figure: nothing in evaluation and in training without dropout, and rounding where a
dropout that drops nothing sends a step through the fast attention.
"""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from course_lib.modeling.loading import HEADS
from course_lib.training import cpu_kernels
from testing import tiny_architectures
from testing.tiny_architectures import batch

NOTHING = 1e-6
"""A dropout that drops nothing: of 65,536 parts it is none. It takes the way with dropout."""
LOGITS, GRADIENT = 1e-5, 1e-5
"""Rounding on that way: of a logit at most, and of the gradient's norm by the norm."""
SECONDS = 30.0
"""That a class may compute, of the processor's time, not of the clock on the wall."""

LEFT_OUT = {
    "BltConfig": "made of four models' configs, whose widths depend on each other",
    "DbrxConfig": "its default is refused by its model",
    "Dots3NoteConfig": "its fields name 40 layers one by one",
    "Gemma3nConfig": "needs timm",
    "Gemma4AssistantConfig": "its default is refused by itself",
    "Gemma4UnifiedAssistantConfig": "shares keys among its layers",
    "LayoutLMv2Config": "needs detectron2",
    "MusicgenConfig": "the default of three models' configs is refused by its model",
    "MusicgenMelodyConfig": "the default of three models' configs is refused by its model",
}
"""Config classes that cannot be made small by their fields' names, or whose models need a package that is not there."""


@dataclass
class AttentionCalls:
    """The calls of attention with dropout in training, by who computed them.

    Attributes:
        fast: of the fast attention.
        handed_on: of torch's, by what the fast one did not know.
        without_dropout: whether there were others, which have no dropout.
    """

    fast: int = 0
    handed_on: set[str] = field(default_factory=set)
    without_dropout: bool = False

    def __str__(self) -> str:
        named = ", ".join(sorted(self.handed_on))
        if self.fast:
            return f"fast, and torch's with {named}" if named else "fast"
        if named:
            return f"torch's: {named}"
        return "torch's: no dropout" if self.without_dropout else "the model's own"


@contextlib.contextmanager
def watched() -> Iterator[AttentionCalls]:
    """Count who computes attention, beside a malloc and a registry of attentions that are afterwards as they were.

    The block begins with transformers' own attention, whatever was registered before.
    """
    calls = AttentionCalls()
    dropped, torchs = cpu_kernels._dropped, cpu_kernels.sdpa_attention_forward

    def fast(*given):
        calls.fast += 1
        return dropped(*given)

    def handed(module, query, key, value, mask, dropout=0.0, **others):
        if hasattr(module, "fast_attention") and module.training:
            if dropout > 0:
                known = {"scaling", "is_causal", *cpu_kernels._SAYS_NOTHING}
                given = {name for name, each in others.items() if each is not None and each is not False} - known
                calls.handed_on |= given or {"a mask of numbers, or other lengths"}
            else:
                calls.without_dropout = True
        return torchs(module, query, key, value, mask, dropout=dropout, **others)

    kernels = {"_dropped": fast, "sdpa_attention_forward": handed, "keep_freed_memory": lambda: None}
    registered = mock.patch.dict(AttentionInterface._global_mapping, sdpa=sdpa_attention_forward)
    with mock.patch.multiple(cpu_kernels, **kernels), registered:
        yield calls


def set_dropout(model: nn.Module, p: float) -> None:
    """Everywhere where a model may have it: its dropout modules, and the numbers that its functions read."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, p)


def computed(model: nn.Module, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the tokens that are there and, in training, the gradient of their mean square."""
    torch.manual_seed(1)
    model.train(training).zero_grad()
    given = batch()
    with torch.set_grad_enabled(training):
        logits = model(**given).logits
    if logits.shape[:2] == given["input_ids"].shape:
        logits = logits[given["attention_mask"].bool()]
    if not training:
        return logits, torch.zeros(1)
    logits.float().square().mean().backward()
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return logits.detach(), torch.cat([each.flatten().float() for each in gradients])


@dataclass(frozen=True)
class Row:
    """What a class computes by fast kernels beside torch's.

    Attributes:
        evaluation: whether it is equal to the bit.
        training: whether it is, in training without dropout.
        logits: largest difference in training with a dropout that drops nothing.
        gradient: of the norms, on that way.
        attention: who computed it there.
        left_out: why there are no figures.
    """

    task: str
    name: str
    evaluation: bool = False
    training: bool = False
    logits: float = float("nan")
    gradient: float = float("nan")
    attention: str = ""
    left_out: str = ""

    @property
    def equal(self) -> bool:
        """Whether all are, to the bit or to the rounding that is stated above."""
        return self.evaluation and self.training and self.logits <= LOGITS and self.gradient <= GRADIENT


def compared(config_class: type[PreTrainedConfig], task: str) -> Row:
    """One class: two models of the same weights, one with fast kernels."""
    theirs, ours = (tiny_architectures.build(config_class, task) for _ in range(2))
    with watched() as calls:
        evaluated = computed(theirs, False)[0]
        set_dropout(theirs, 0.0)
        wanted = computed(theirs, True)
        cpu_kernels.use_fast_kernels(ours)
        evaluation = bool(torch.isfinite(evaluated).all()) and torch.equal(computed(ours, False)[0], evaluated)
        set_dropout(ours, 0.0)
        training = all(torch.equal(a, b) for a, b in zip(computed(ours, True), wanted, strict=True))
        if calls.fast:
            raise AssertionError("the fast attention computed in evaluation, or without dropout")
        set_dropout(ours, NOTHING)
        got = computed(ours, True)
    norm = wanted[1].norm().item()
    return Row(
        task,
        config_class.__name__,
        evaluation,
        training,
        (got[0] - wanted[0]).abs().max().item(),
        (got[1] - wanted[1]).norm().item() / max(norm, 1e-3),
        str(calls),
    )


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Let what is computed in the block take so many seconds of the processor's time at most, else TimeoutError."""

    def stop(*_):
        raise TimeoutError(f"{seconds:g} s of computing are over")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def classes(task: str) -> dict[str, type[PreTrainedConfig]]:
    """The config classes that `course train` takes for a task, by name."""
    return {each.__name__: each for each, _ in HEADS[task][1].items()}


def sweep(task: str) -> Iterator[Row]:
    """A row for each class; an error or the end of its time is that class's row."""
    for name, each in classes(task).items():
        try:
            with limited(SECONDS):
                yield compared(each, task)
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            yield Row(task, name, left_out=f"{type(error).__name__}: {first}"[:160])
