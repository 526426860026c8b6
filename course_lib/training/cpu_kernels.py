"""Kernels for training on a CPU, in place of torch's where ``cpu_kernels`` is ``fast``: dropout and attention with it.

They change the draw of the dropout masks and nothing else that is computed. In evaluation torch's own compute.
"""

import ctypes
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from course_lib.config import Config
from course_lib.errors import ConfigError

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # glibc's malloc.h: M_MMAP_MAX, M_TRIM_THRESHOLD
_DRAWS = 2**16
# SplitMix64's constants as int64. Its last step shifts by 31 and multiplies by nothing.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
_SAYS_NOTHING = frozenset({"position_ids", "use_cache", "logits_to_keep"})
"""Arguments that models hand on to their attention, and that are in the queries, the keys and the mask already."""


def pick_kernels(config: Config, device: torch.device) -> str | None:
    """``torch`` or ``fast``, what ``auto`` means here or what is asked for; None where the device is no CPU.

    Raises:
        ConfigError: fast is asked for, and the device is no CPU.
    """
    asked = config.run.cpu_kernels
    if device.type != "cpu":
        if asked == "fast":
            raise ConfigError(
                f"cpu_kernels fast is for training on a CPU, and the device is {device.type}",
                "leave it out, or use --device cpu",
            )
        return None
    if asked == "auto":
        return "torch" if config.run.training_type == "basic" or config.model.torch_compile else "fast"
    return asked


def use_fast_kernels(model: nn.Module) -> None:
    """Let a model train by the kernels of this module, and the process allocate for them.

    Three things change. Every ``nn.Dropout`` of the model becomes a :class:`Dropout16`, the same object with its hooks.
    The model's modules are marked, and transformers' ``sdpa`` is :func:`attention` from now on, which hands on to
    transformers' own what is not marked. glibc keeps freed memory (:func:`keep_freed_memory`). The last holds for the
    rest of the process, and the second too, where it changes nothing for other models.
    """
    keep_freed_memory()
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = Dropout16
        module.fast_attention = _Mark()  # type: ignore[assignment]


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, for the rest of the process; does nothing under another C library.

    A large tensor is otherwise new memory from the system each time, whose pages are zeroed and mapped one by one: for
    the gradient of an embedding of 12 million elements, several times what writing it costs.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MMAP_MAX, 0)
            mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def random_words(count: int) -> torch.Tensor:
    """Random bits, on all cores: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) from one number of torch's generator.

    Torch fills a tensor of a CPU with random numbers on one core alone.

    Args:
        count: of words.
    Returns:
        [count], int64, whose 64 bits are random each.
    """
    z = torch.arange(count).mul_(_GOLDEN).add_(torch.empty((), dtype=torch.int64).random_(-(2**63), None))
    shifted = torch.empty_like(z)
    for shift, factor in _MIXING:
        # An int64's shift repeats the sign, which the algorithm's, of unsigned words, does not.
        torch.bitwise_right_shift(z, shift, out=shifted)
        z.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return z


def dropout(x: torch.Tensor, p: float) -> torch.Tensor:
    """Zero each element with probability p, and scale the rest by 1/(1 - p), in expectation the same tensor.

    torch draws 64 bits per element on a CPU, on one core; 16 bits decide to a probability within 1/131072 of p.

    Args:
        x: any shape and floating dtype.
        p: in [0, 1).
    """
    dropped = round(p * _DRAWS)
    bits = random_words(-(-x.numel() // 4)).view(torch.int16)[: x.numel()].view(x.shape)
    # Written in x's dtype at once: a tensor of bool costs several times as much to make and to convert.
    keep = torch.ge(bits, dropped - _DRAWS // 2, out=torch.empty(x.shape, dtype=x.dtype))
    return x * keep.mul_(_DRAWS / (_DRAWS - dropped))


def _drops(x: torch.Tensor, p: float) -> bool:
    """Whether :func:`dropout` has something to do, and can: round(p * 65536) below 65536, a plain tensor of a CPU."""
    return 0 < p <= 1 - 1 / _DRAWS and x.device.type == "cpu" and type(x) is torch.Tensor


class Dropout16(nn.Dropout):
    """``nn.Dropout`` by :func:`dropout`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.p) if self.training and _drops(x, self.p) else super().forward(x)


class _Mark:
    """On each module of a model whose attention may be fast, also on a copy and in a process that it was sent to."""

    def __init__(self) -> None:
        AttentionInterface.register("sdpa", attention)

    def __reduce__(self) -> tuple[type["_Mark"], tuple[()]]:
        return _Mark, ()


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form of transformers' interface: its own for ``sdpa``, except for training with dropout.

    torch's fused kernel for the CPU has no dropout, so that the products are written out here: in a module that
    :func:`use_fast_kernels` marked, where every argument is one that this function knows. Whatever else a model hands
    over (a position bias, sinks, a cap, a window, a mask of numbers) goes to transformers' own.

    Args:
        module: the attention that calls.
        query: [B, H, L, D].
        key: [B, G, keys, D]; each of the G heads serves H / G of the query's.
        value: as ``key``.
        attention_mask: True where a query may look, bool, of a shape that broadcasts to [B, H, L, keys]; None where it
            may look everywhere, or everywhere before itself if causal.
        dropout: probability that a weight is dropped.
        scaling: of the scores; 1 / sqrt(D) if None.
        is_causal: without a mask; the module's own ``is_causal`` if None.
        others: whatever else a model hands over.
    Returns:
        [B, L, H, D], and None for the weights.
    """
    causal = (
        attention_mask is None
        and query.shape[2] > 1
        and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    )
    known = (
        hasattr(module, "fast_attention")
        and module.training
        and _drops(query, dropout)
        and all(given is None or given is False or name in _SAYS_NOTHING for name, given in others.items())
        and query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)
        and not (causal and query.shape[2] != key.shape[2])
        and _leaves_something(attention_mask)
    )
    if not known:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
    if causal:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    logits = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        logits = logits + torch.where(attention_mask, 0.0, -torch.inf).to(logits.dtype)  # fill_ would cost its backward
    weights = F.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
    return (_dropped(weights, dropout) @ value).transpose(1, 2).contiguous(), None


def _leaves_something(mask: torch.Tensor | None) -> bool:
    """Whether a mask is of bools, and hides not all from any query: of nothing, torch's attention makes zeros."""
    return mask is None or (mask.dtype == torch.bool and bool(mask.any(-1).all()))


_dropped = dropout
