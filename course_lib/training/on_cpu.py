"""What makes a training step faster on a CPU and changes nothing that is computed but the draw of the dropout masks."""

import ctypes
import sys

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # glibc's malloc.h: M_MMAP_MAX, M_TRIM_THRESHOLD
_DRAWS = 2**16
# SplitMix64's constants as int64. Its last step shifts by 31 and multiplies by nothing.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
NAME = "dropout16"


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

    torch draws 64 bits an element on a CPU, on one core; 16 bits decide to a probability within 1/131072 of p.

    Args:
        x: any shape and floating dtype.
        p: in [0, 1).
    """
    dropped = round(p * _DRAWS)
    bits = random_words(-(-x.numel() // 4)).view(torch.int16)[: x.numel()].view(x.shape)
    # Written in x's dtype at once: a tensor of bool costs several times as much to make and to convert.
    keep = torch.ge(bits, dropped - _DRAWS // 2, out=torch.empty(x.shape, dtype=x.dtype))
    return x * keep.mul_(_DRAWS / (_DRAWS - dropped))


class Dropout16(nn.Dropout):
    """``nn.Dropout`` by :func:`dropout`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.p) if self.training and 0 < self.p < 1 else super().forward(x)


def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
              **_: object) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention in the form of transformers' attention interface.

    torch's fused kernel for the CPU has no dropout, so that with dropout the products are written out here.

    Args:
        query: [B, H, L, D]; key and value may have fewer heads, each serving a group of the query's.
        attention_mask: what is added to the logits, [B, 1, L, L], or None.
    Returns:
        [B, L, H, D], and None for the weights.
    """
    if not (module.training and dropout):
        found = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling,
                                               enable_gqa=key.shape[1] != query.shape[1])
    else:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        logits = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if attention_mask is not None:
            logits = logits + attention_mask[..., : key.shape[-2]]
        weights = F.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
        found = _dropped(weights, dropout) @ value
    return found.transpose(1, 2).contiguous(), None


_dropped = dropout
# With the module, so that a model which was sent to another process finds them there.
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, eager_mask)


def cheaper_dropout(model: PreTrainedModel) -> None:
    """Let a model draw its dropout masks, those of attention too, by :func:`dropout`."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout16(child.p))
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
