"""Lesson 17's experiment: the training step of a small Llama, what it takes and holds when written in several ways."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from course_lib.lessons.turns import in_turns
from course_lib.metering.allocation_log import AllocationLog
from course_lib.metering.operators import Operator, OperatorCounter

VOCABULARY = 8192
MATRIX = ("matmul", "attention")
"""Kinds of operators that multiply matrices."""
KEEP = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)
"""Operators whose results are dear to compute again."""


def llama(
    layers: int = 2, width: int = 256, tokens: int = 256, vocabulary: int = VOCABULARY, attention: str = "sdpa"
) -> LlamaForCausalLM:
    """A Llama in which two heads of queries share a head of keys; the same weights on every call.

    Args:
        layers: blocks.
        width: of the hidden state, a multiple of 64; heads have 32 each.
        tokens: the most in a row.
        vocabulary: how many tokens there are.
        attention: as transformers' ``attn_implementation``.
    """
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 43 // 16,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 64,
            max_position_embeddings=tokens,
            attn_implementation=attention,
            use_cache=False,
        )
    )


def seconds_in_turns(steps: Mapping[str, Callable[[], object]], tries: int) -> dict[str, list[float]]:
    """Seconds of each try of each step; they take turns, so that what else the machine does meets all alike."""

    def timed(step: Callable[[], object]) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return in_turns({name: partial(timed, step) for name, step in steps.items()}, tries)


def fastest_operators(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object], tries: int
) -> list[Operator]:
    """Every operator of a step with the seconds of its fastest try."""
    fastest: dict[tuple[str, ...], Operator] = {}
    for _ in range(tries):
        with OperatorCounter(model, optimizer, timed=True) as counter:
            step()
        for row in counter.operators:
            place = row.name, row.module, row.phase, row.dtype
            before = fastest.get(place, row)
            fastest[place] = dataclasses.replace(row, seconds=min(row.seconds, before.seconds))
    return list(fastest.values())


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes that a step held at once of what it allocated itself; the optimizer has its states by then."""
    with AllocationLog() as log:
        log.start()
        step()
        log.stop()
    return most(log)


def most(log: AllocationLog) -> int:
    """The most bytes that a log has seen alive at once."""
    return max(itertools.accumulate(change.bytes for change in log.changes()), default=0)


def keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of selective checkpointing: what products and attention gave stays, all else is computed again."""
    return CheckpointPolicy.MUST_SAVE if operator in KEEP else CheckpointPolicy.PREFER_RECOMPUTE
