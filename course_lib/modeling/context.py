"""Context parallelism inside models of transformers: each rank has some tokens of every row, and its attention all.

Every layer but attention works on one token at a time. So a rank calls the same model with fewer tokens, tells it where
in the row they are, and has its attention replaced by :func:`~course_lib.parallel.context.context_attention`.
Parameters stay whole; their gradients are sums over the ranks, as over ranks with other rows.

Only attention whose every argument is known here is replaced: one that got a bias, a window or a cap besides, and was
not asked for it, would be computed without.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface

from course_lib.errors import ConfigError, ModelError
from course_lib.modeling.inputs import unpadded_rows
from course_lib.parallel.context import Method, context_attention
from course_lib.parallel.ring_attention import NOWHERE
from course_lib.parallel.sequence_layout import SequenceLayout, next_tokens

ATTENTION = {
    "bert": "BertSelfAttention",
    "gpt2": "GPT2Attention",
    "gpt_neox": "GPTNeoXAttention",
    "llama": "LlamaAttention",
    "mistral": "MistralAttention",
    "mixtral": "MixtralAttention",
    "olmo": "OlmoAttention",
    "olmo2": "Olmo2Attention",
    "olmoe": "OlmoeAttention",
    "qwen2": "Qwen2Attention",
    "qwen3": "Qwen3Attention",
}
"""Whose arguments are known: the class of attention by the model's type."""
WRAPPERS = ("BertAttention",)
"""Modules named so that hold an attention, and compute none."""
BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that depend on how long a row is, which a rank does not see."""
METHODS: dict[str, tuple[Method, bool]] = {
    "ring": ("ring", False),
    "zigzag": ("ring", True),
    "ulysses": ("ulysses", False),
    "allgather": ("allgather", True),
}
"""By the option's name: the method, and whether tokens are dealt in zigzag, which evens out causal attention."""
NAME = "course_context_parallel"
_SAYS_NOTHING = frozenset({"position_ids", "use_cache", "logits_to_keep", "output_router_logits"})
"""Arguments that models hand on to their attention, and that are in the queries and keys already."""


class ContextParallel:
    """Replaces a model's attention, and cuts batches; all ranks of the group have the same batch.

    Args:
        model: of transformers; changed in place.
        task: ``causal_lm`` or ``masked_lm``.
        group: the ranks that share the tokens of a row.
        way: one of METHODS.
        tensor_ranks: that share the heads of each layer already.
    Attributes:
        layout: of the batch that was cut last.
        scored_as: see :class:`~course_lib.modeling.inputs.WholeSequences`; labels are shifted already, each is of its
            own logit.
        documents: its texts and padding as :func:`context_attention` takes them; None where a row is one text.
    Raises:
        ConfigError: heads that the method cannot share, a task that reads one token of a row, or dropout in attention.
        ModelError: attention, or rotary embeddings, that are not known here.
    """

    scored_as = "masked_lm"
    layout: SequenceLayout
    documents: torch.Tensor | None = None

    def __init__(self, model: nn.Module, task: str, group: dist.ProcessGroup, way: str, tensor_ranks: int = 1):
        self.task, self.group, (self.method, zigzag) = task, group, METHODS[way]
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.zigzag = zigzag and task == "causal_lm"  # without a causal mask all tokens cost the same
        config: Any = model.config
        check(config, task, self.ranks, way, tensor_ranks)
        held = [module for module in model.modules() if "Attention" in type(module).__name__]
        own = [module for module in held if type(module).__name__ == ATTENTION[config.model_type]]
        if not own or any(module not in own and type(module).__name__ not in WRAPPERS for module in held):
            raise ModelError(
                f"not every attention of this {config.model_type} is {ATTENTION[config.model_type]}",
                "leave out --context_parallel_size",
            )
        drops = next((drop for module in own if (drop := dropout_of(module))), 0.0)
        if drops:
            raise ConfigError(
                f"context parallelism has no dropout in attention, and this model's is {drops}",
                "give --attention_dropout 0",
            )
        for module in own:
            module.context_parallel = self  # type: ignore[assignment]
        AttentionInterface.register(NAME, attention)
        config._attn_implementation = NAME

    def cut(self, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Inputs of the model for a batch on this rank, and the labels of these tokens.

        Args:
            batch: ``input_ids``, ``attention_mask`` and ``labels``, (rows, tokens) int64; where documents share rows,
                ``position_ids``, which begin anew at each.
        Returns:
            inputs: ``input_ids``, ``attention_mask`` and ``position_ids``, (rows, tokens / ranks) int64.
            labels: as long; what each token has to predict, already shifted for ``causal_lm``.
        Raises:
            ConfigError: tokens that do not divide.
        """
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        self.layout = layout = SequenceLayout(ids.shape[1], self.ranks, self.zigzag)
        if self.task == "causal_lm":
            labels = next_tokens(labels)  # before the cut: a rank's last token predicts another rank's first
        ids, mask, labels = (layout.shard(whole, self.rank, 1) for whole in (ids, mask, labels))
        unpadded = unpadded_rows(batch)
        if "position_ids" in batch:
            documents = layout.shard((batch["position_ids"] == 0).cumsum(1), self.rank, 1)
            self.documents = documents.where(mask.bool(), NOWHERE)
            places = layout.shard(batch["position_ids"], self.rank, 1)
        else:
            self.documents = None if unpadded is not None and all(unpadded) else torch.where(mask.bool(), 0, NOWHERE)
            places = layout.positions(self.rank, ids.device).expand_as(ids)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": places}, labels


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function that transformers calls in a model, on this rank's tokens.

    Args:
        module: whose ``context_parallel`` is set.
        query: (rows, heads, tokens, width).
        key: (rows, key heads, tokens, width); the heads are a multiple of the key heads.
        value: as ``key``.
        attention_mask: None, since transformers makes no mask for attention that it does not know.
        scaling: of the scores; 1 / sqrt(width) by default.
        dropout: 0; any other is refused.
        is_causal: a query sees no key after itself; None: as the module's ``is_causal``.
        sliding_window: None, or at least the sequence's length.
        **others: None, or known to change nothing here, such as ``position_ids``.
    Returns:
        (rows, tokens, heads, width), and no weights.
    Raises:
        ModelError: an argument that would change the result, and is not known.
    """
    shared: Any = module.context_parallel
    unknown = [name for name, given in others.items() if given is not None and name not in _SAYS_NOTHING]
    if attention_mask is not None or dropout or (sliding_window or shared.layout.length) < shared.layout.length:
        unknown = ["attention_mask" if attention_mask is not None else "dropout" if dropout else "sliding_window"]
    if unknown:
        raise ModelError(
            f"context parallelism does not know the {unknown[0]} of {type(module).__name__}",
            "leave out --context_parallel_size",
        )
    causal = bool(module.is_causal if is_causal is None else is_causal)
    result = context_attention(
        query,
        key,
        value,
        method=shared.method,
        causal=causal,
        zigzag=shared.zigzag,
        documents=shared.documents,
        group=shared.group,
        scale=scaling,
    )
    return result.transpose(1, 2), None


def dropout_of(module: nn.Module) -> float:
    """The probability with which an attention drops its weights in training."""
    held: Any = [getattr(module, name, 0.0) for name in ("attention_dropout", "attn_dropout", "dropout")]
    return max(drop.p if isinstance(drop, nn.Dropout) else float(drop) for drop in held)


def check(config: Any, task: str, ranks: int, way: str, tensor_ranks: int = 1) -> None:
    """Refuse what context parallelism cannot do with a model, by its config; see :class:`ContextParallel`."""
    if task == "classification":
        raise ConfigError(
            "context parallelism is for losses of every token, and classification reads one of a row",
            "leave out --context_parallel_size, or use --task causal_lm or masked_lm",
        )
    if config.model_type not in ATTENTION:
        raise ModelError(
            f"context parallelism does not know the attention of {config.model_type}",
            f"use a model of type {', '.join(ATTENTION)}, or leave out --context_parallel_size",
        )
    kinds = [kind for kind in (getattr(config, "rope_parameters", None) or {}).items() if kind[0] == "rope_type"]
    if kinds and kinds[0][1] in BY_LENGTH:
        raise ModelError(
            f"rotary embeddings of type {kinds[0][1]} depend on a row's length, and a rank sees a part",
            "leave out --context_parallel_size",
        )
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    heads, key_heads = heads // tensor_ranks, key_heads // tensor_ranks
    if way == "ulysses" and (heads % ranks or (key_heads % ranks and ranks % key_heads)):
        raise ConfigError(
            f"ulysses deals heads to ranks, and {heads} heads with {key_heads} key heads do not divide "
            f"among context_parallel_size {ranks}",
            "use --context_parallel ring, zigzag or allgather",
        )
