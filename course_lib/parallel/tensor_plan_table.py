"""Tensor-parallel plans by architecture: how each layer of a block is split.

Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3, figures 3 and 4: attention by heads, the MLP by
its inner width, embedding and head by the vocabulary.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from course_lib.errors import ModelError


class Role(enum.Enum):
    """Role of a block's module in tensor parallelism."""

    ENTER = "enter"  # its hidden states go to several column-parallel layers, and pass the exchange once for all
    COLUMN = "column"
    QKV = "qkv"  # column-parallel, with query, key and value side by side in one matrix
    ROW = "row"
    NORM = "norm"  # works on slices of the sequence with sequence parallelism
    HEADS = "heads"  # whole on every rank, and applied to the rank's own heads: its gradients are parts of a sum


@dataclass(frozen=True)
class TensorPlan:
    """Names of an architecture's modules, and what becomes of them.

    Attributes:
        blocks: the list of blocks.
        roles: by name within a block. What is not named stays whole, on every rank.
        embedding: of the tokens, split by the vocabulary.
        head: that makes the logits, split likewise; a model may lack it.
        final_norm: after the last block, if there is one.
        divided: by name within a block, attributes that count heads or columns and are now a rank's share.
    """

    blocks: str
    roles: Mapping[str, Role]
    embedding: str
    head: str
    final_norm: str = ""
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def blocks_of(self, module: nn.Module) -> dict[str, nn.Module]:
        """A model's, or a pipeline stage's, blocks in order, by their full names."""
        return {
            name: block
            for name, block in module.named_modules()
            if re.fullmatch(rf"(.+\.)?{re.escape(self.blocks)}\.\d+", name)
        }

    def divide(self, block: nn.Module, ranks: int) -> None:
        """Set a block's counts to a rank's share."""
        # Attention views (rows, tokens, width / N) as its heads, and has to know how many these are now.
        for name, attributes in self.divided.items():
            owner = block.get_submodule(name)
            for attribute in attributes:
                setattr(owner, attribute, getattr(owner, attribute) // ranks)


_BERT = TensorPlan(
    blocks="encoder.layer",
    roles={
        "attention.self": Role.ENTER,
        "attention.self.query": Role.COLUMN,
        "attention.self.key": Role.COLUMN,
        "attention.self.value": Role.COLUMN,
        "attention.output.dense": Role.ROW,
        "attention.output.LayerNorm": Role.NORM,
        "intermediate.dense": Role.COLUMN,
        "output.dense": Role.ROW,
        "output.LayerNorm": Role.NORM,
    },
    embedding="word_embeddings",
    head="predictions.decoder",
    divided={"attention.self": ("num_attention_heads", "all_head_size")},
)
_LLAMA = TensorPlan(
    blocks="layers",
    roles={
        "input_layernorm": Role.NORM,
        "self_attn": Role.ENTER,
        "self_attn.q_proj": Role.COLUMN,
        "self_attn.k_proj": Role.COLUMN,
        "self_attn.v_proj": Role.COLUMN,
        "self_attn.o_proj": Role.ROW,
        "post_attention_layernorm": Role.NORM,
        "mlp": Role.ENTER,
        "mlp.gate_proj": Role.COLUMN,
        "mlp.up_proj": Role.COLUMN,
        "mlp.down_proj": Role.ROW,
    },
    embedding="embed_tokens",
    head="lm_head",
    final_norm="norm",
)

PLANS: Mapping[str, TensorPlan] = {
    "gpt2": TensorPlan(
        blocks="h",
        roles={
            "ln_1": Role.NORM,
            "attn.c_attn": Role.QKV,
            "attn.c_proj": Role.ROW,
            "ln_2": Role.NORM,
            "mlp.c_fc": Role.COLUMN,
            "mlp.c_proj": Role.ROW,
        },
        embedding="wte",
        head="lm_head",
        final_norm="ln_f",
        divided={"attn": ("split_size", "num_heads")},
    ),
    "bert": _BERT,
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), replace(_BERT, head="lm_head.decoder")),
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma"), _LLAMA),
}
"""Plans by ``config.model_type``; of others transformers' own is taken, see :func:`from_transformers`."""

STYLES = {"colwise": Role.COLUMN, "rowwise": Role.ROW, "replicated_with_grad_allreduce": Role.HEADS}
"""Roles by the words of transformers' ``base_model_tp_plan``; what it splits in other ways is not split here."""


def from_transformers(config: Any, kind: str) -> TensorPlan:
    """The plan that transformers has for an architecture (``config.base_model_tp_plan``).

    Its norms are not in it: there is no sequence parallelism by such a plan.

    Args:
        config: of a model.
        kind: the architecture's name, for messages.
    Raises:
        ModelError: it has none, or splits something as this course does not.
    """
    others = f"hand in a Plan of its modules' names, or use one of {', '.join(PLANS)}"
    roles: dict[str, Role] = {}
    lists: set[str] = set()
    for pattern, style in (getattr(config, "base_model_tp_plan", None) or {}).items():
        place = re.fullmatch(r"(.+)\.\*\.(.+)", pattern)
        if place is None:  # the embedding: by its name, below
            continue
        if style not in STYLES:
            raise ModelError(
                f"there is no tensor-parallel plan for {kind}: transformers has {place[2]} as {style}", others
            )
        lists.add(place[1])
        roles[place[2]] = STYLES[style]
    if len(lists) != 1:
        raise ModelError(f"there is no tensor-parallel plan for {kind}", others)
    return TensorPlan(blocks=lists.pop(), roles=roles, embedding="embed_tokens", head="lm_head")
