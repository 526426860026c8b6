"""Sizes and parameters of each architecture, counted part by part from its Hugging Face config.

Defaults are those of transformers 5: a config.json leaves out what equals them. Every count is tested against the
model that transformers builds from the same config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """Sizes of a transformer and where its parameters are; the base of :class:`course_lib.planning.models.Model`."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    """Blocks; encoder and decoder together."""
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width inside an MLP, or inside one expert."""
    vocab: int
    context: int
    """Longest sequence, in tokens; 0 where the architecture sets no limit."""
    embedding: int
    """Parameters before the first block: tokens, positions, types, norm; a tied matrix is counted here."""
    attention: int
    """Parameters of one block's attention."""
    mlp: int
    """Parameters of one block's MLP; of all its experts and their router."""
    norms: int
    """Parameters of one block's norms."""
    head: int
    """Parameters after the last block that are not tied to the embedding: norm, pooler, transform, matrix, bias."""
    extra: int = 0
    """Parameters in a few blocks only: T5's cross-attention and relative positions."""
    experts: int = 1
    experts_per_token: int = 1
    gated: bool = False
    """The MLP multiplies two projections (SwiGLU, GeGLU)."""
    rms_norm: bool = False
    rotary: bool = False
    causal: bool = True
    has_head: bool = True
    """The model ends in logits over the vocabulary."""
    activation: str = "gelu"
    """By transformers' name; ``gelu_new`` is written out there in plain PyTorch operations."""
    dropout: bool = False
    """Blocks drop activations while they train, so that a mask is kept."""
    encoder_decoder: bool = False
    multiplied: int = 0
    """Weights of an average block that one token is multiplied with, where the model was built and counted; else 0."""


def _linear(rows: int, columns: int, bias: bool) -> int:
    return rows * columns + (columns if bias else 0)


def _attention(hidden: int, heads: int, kv_heads: int, head_dim: int, qkv_bias: bool, out_bias: bool) -> int:
    qkv = (heads + 2 * kv_heads) * head_dim
    return _linear(hidden, qkv, qkv_bias) + _linear(heads * head_dim, hidden, out_bias)


def _mlp(hidden: int, ffn: int, gated: bool, bias: bool) -> int:
    return (2 if gated else 1) * _linear(hidden, ffn, bias) + _linear(ffn, hidden, bias)


def _gpt2(c: Config, head: bool) -> Parts:
    h = c["n_embd"]
    heads, ffn = c["n_head"], c["n_inner"] or 4 * h
    return Parts(
        h,
        c["n_layer"],
        heads,
        heads,
        h // heads,
        ffn,
        c["vocab_size"],
        c["n_positions"],
        embedding=(c["vocab_size"] + c["n_positions"]) * h,
        attention=_attention(h, heads, heads, h // heads, True, True),
        mlp=_mlp(h, ffn, False, True),
        norms=4 * h,
        has_head=head,
        dropout=c["resid_pdrop"] > 0,
        activation=c["activation_function"],
        head=2 * h + (c["vocab_size"] * h if head and not c["tie_word_embeddings"] else 0),
    )


def _bert(c: Config, head: bool) -> Parts:
    h, vocab, heads = c["hidden_size"], c["vocab_size"], c["num_attention_heads"]
    transform = _linear(h, h, True) + 2 * h + vocab + (0 if c["tie_word_embeddings"] else vocab * h)
    return Parts(
        h,
        c["num_hidden_layers"],
        heads,
        heads,
        h // heads,
        c["intermediate_size"],
        vocab,
        c["max_position_embeddings"],
        causal=False,
        has_head=head,
        dropout=c["hidden_dropout_prob"] > 0,
        embedding=(vocab + c["max_position_embeddings"] + c["type_vocab_size"] + 2) * h,
        attention=_attention(h, heads, heads, h // heads, True, True),
        mlp=_mlp(h, c["intermediate_size"], False, True),
        norms=4 * h,
        head=transform if head else _linear(h, h, True),
    )  # without logits transformers adds the pooler


def _distilbert(c: Config, head: bool) -> Parts:
    h, vocab, heads = c["dim"], c["vocab_size"], c["n_heads"]
    transform = _linear(h, h, True) + 2 * h + vocab + (0 if c["tie_word_embeddings"] else vocab * h)
    return Parts(
        h,
        c["n_layers"],
        heads,
        heads,
        h // heads,
        c["hidden_dim"],
        vocab,
        c["max_position_embeddings"],
        embedding=(vocab + c["max_position_embeddings"] + 2) * h,
        causal=False,
        has_head=head,
        attention=_attention(h, heads, heads, h // heads, True, True),
        dropout=c["dropout"] > 0,
        mlp=_mlp(h, c["hidden_dim"], False, True),
        norms=4 * h,
        head=transform if head else 0,
    )


def _t5(c: Config, head: bool) -> Parts:
    h, heads, head_dim = c["d_model"], c["num_heads"], c["d_kv"]
    encoder, decoder = c["num_layers"], c["num_decoder_layers"] or c["num_layers"]
    gated = c["feed_forward_proj"].startswith("gated")
    attention = _attention(h, heads, heads, head_dim, False, False)
    relative = c["relative_attention_num_buckets"] * heads
    return Parts(
        h,
        encoder + decoder,
        heads,
        heads,
        head_dim,
        c["d_ff"],
        c["vocab_size"],
        0,
        causal=False,
        encoder_decoder=True,
        embedding=c["vocab_size"] * h,
        attention=attention,
        mlp=_mlp(h, c["d_ff"], gated, False),
        norms=2 * h,
        head=2 * h,  # transformers 5 always ties T5's logits
        extra=decoder * (attention + h) + 2 * relative,
        gated=gated,
        activation=c["feed_forward_proj"].removeprefix("gated-"),
        rms_norm=True,
        has_head=head,
        dropout=c["dropout_rate"] > 0,
    )


def _opt(c: Config, head: bool) -> Parts:
    h, narrow, heads, bias = c["hidden_size"], c["word_embed_proj_dim"], c["num_attention_heads"], c["enable_bias"]
    norm = 2 * h if c["layer_norm_elementwise_affine"] else 0
    project = 2 * narrow * h if narrow != h else 0
    return Parts(
        h,
        c["num_hidden_layers"],
        heads,
        heads,
        h // heads,
        c["ffn_dim"],
        c["vocab_size"],
        c["max_position_embeddings"],
        has_head=head,
        dropout=c["dropout"] > 0,
        activation=c["activation_function"],
        embedding=c["vocab_size"] * narrow + (c["max_position_embeddings"] + 2) * h + project,
        attention=_attention(h, heads, heads, h // heads, bias, bias),
        mlp=_mlp(h, c["ffn_dim"], False, bias),
        norms=2 * norm,
        head=(norm if c["do_layer_norm_before"] and not c["_remove_final_layer_norm"] else 0)
        + (c["vocab_size"] * narrow if head and not c["tie_word_embeddings"] else 0),
    )


def _bloom(c: Config, head: bool) -> Parts:
    h, heads = c["hidden_size"], c["n_head"]
    return Parts(
        h,
        c["n_layer"],
        heads,
        heads,
        h // heads,
        4 * h,
        c["vocab_size"],
        0,
        has_head=head,
        embedding=c["vocab_size"] * h + 2 * h,
        attention=_attention(h, heads, heads, h // heads, True, True),
        mlp=_mlp(h, 4 * h, False, True),
        norms=4 * h,
        dropout=c["hidden_dropout"] > 0,
        head=2 * h + (c["vocab_size"] * h if head and not c["tie_word_embeddings"] else 0),
    )


def _gpt_neox(c: Config, head: bool) -> Parts:
    h, heads, bias = c["hidden_size"], c["num_attention_heads"], c["attention_bias"]
    return Parts(
        h,
        c["num_hidden_layers"],
        heads,
        heads,
        h // heads,
        c["intermediate_size"],
        c["vocab_size"],
        c["max_position_embeddings"],
        embedding=c["vocab_size"] * h,
        rotary=True,
        has_head=head,
        attention=_attention(h, heads, heads, h // heads, bias, bias),
        dropout=c["hidden_dropout"] > 0,
        mlp=_mlp(h, c["intermediate_size"], False, True),
        norms=4 * h,
        head=2 * h + (c["vocab_size"] * h if head and not c["tie_word_embeddings"] else 0),
    )


def _falcon(c: Config, head: bool) -> Parts:
    h, heads, bias = c["hidden_size"], c["num_attention_heads"], c["bias"]
    ffn = c["ffn_hidden_size"] or 4 * h
    kv_heads = (c["num_kv_heads"] or heads) if c["new_decoder_architecture"] or not c["multi_query"] else 1
    two_norms = (c["num_ln_in_parallel_attn"] in (None, 2)) if c["new_decoder_architecture"] else not c["parallel_attn"]
    return Parts(
        h,
        c["num_hidden_layers"],
        heads,
        kv_heads,
        h // heads,
        ffn,
        c["vocab_size"],
        c["max_position_embeddings"],
        embedding=c["vocab_size"] * h,
        rotary=True,
        has_head=head,
        attention=_attention(h, heads, kv_heads, h // heads, bias, bias),
        dropout=c["hidden_dropout"] > 0,
        mlp=_mlp(h, ffn, False, bias),
        norms=(2 if two_norms else 1) * 2 * h,
        head=2 * h + (c["vocab_size"] * h if head and not c["tie_word_embeddings"] else 0),
    )


def _llama(c: Config, head: bool, *, qkv_bias: bool = False, norms: int = 2, qk_norm: int = 0) -> Parts:
    """Llama and those that differ from it in a bias or in norms.

    Args:
        c: the config.
        head: with logits.
        qkv_bias: a bias on queries, keys and values alone (Qwen 2).
        norms: norms of width ``hidden`` in a block.
        qk_norm: parameters of the norms of queries and keys in a block.
    """
    h, heads = c["hidden_size"], c["num_attention_heads"]
    kv_heads, head_dim = c["num_key_value_heads"] or heads, c.get("head_dim") or h // heads
    bias = c.get("attention_bias", False)
    experts = c.get("num_local_experts") or 1
    ffn = c["moe_intermediate_size"] if experts > 1 and "moe_intermediate_size" in c else c["intermediate_size"]
    mlp = experts * _mlp(h, ffn, True, c.get("mlp_bias", False)) + (experts * h if experts > 1 else 0)
    return Parts(
        h,
        c["num_hidden_layers"],
        heads,
        kv_heads,
        head_dim,
        ffn,
        c["vocab_size"],
        c["max_position_embeddings"],
        embedding=c["vocab_size"] * h,
        attention=_attention(h, heads, kv_heads, head_dim, bias or qkv_bias, bias) + qk_norm,
        mlp=mlp,
        norms=norms * h,
        head=h + (c["vocab_size"] * h if head and not c["tie_word_embeddings"] else 0),
        experts=experts,
        experts_per_token=c.get("num_experts_per_tok", 1) if experts > 1 else 1,
        gated=True,
        rms_norm=True,
        rotary=True,
        has_head=head,
    )


def _qwen2(c: Config, head: bool) -> Parts:
    return _llama(c, head, qkv_bias=True)


def _qwen3(c: Config, head: bool) -> Parts:
    return _llama(c, head, qk_norm=2 * (c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]))


def _gemma2(c: Config, head: bool) -> Parts:
    return _llama(c, head, norms=4)


def _olmo2(c: Config, head: bool) -> Parts:
    head_dim = c["hidden_size"] // c["num_attention_heads"]
    kv_heads = c["num_key_value_heads"] or c["num_attention_heads"]
    return _llama(c, head, qk_norm=(c["num_attention_heads"] + kv_heads) * head_dim)


_ROPE: dict[str, Any] = {"num_key_value_heads": None, "tie_word_embeddings": False}
_GEMMA: dict[str, Any] = {
    "vocab_size": 256000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_BERT: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, tuple[Callable[[Config, bool], Parts], dict[str, Any]]] = {
    "gpt2": (
        _gpt2,
        {
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "resid_pdrop": 0.1,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
    ),
    "bert": (_bert, {"vocab_size": 30522, **_BERT}),
    "roberta": (_bert, {"vocab_size": 50265, **_BERT}),
    "distilbert": (
        _distilbert,
        {
            "vocab_size": 30522,
            "max_position_embeddings": 512,
            "n_layers": 6,
            "n_heads": 12,
            "dim": 768,
            "hidden_dim": 3072,
            "dropout": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    "t5": (
        _t5,
        {
            "vocab_size": 32128,
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 8,
            "num_decoder_layers": None,
            "relative_attention_num_buckets": 32,
            "dropout_rate": 0.1,
            "feed_forward_proj": "relu",
        },
    ),
    "opt": (
        _opt,
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": None,
            "dropout": 0.1,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "activation_function": "relu",
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
    ),
    "bloom": (
        _bloom,
        {
            "vocab_size": 250880,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 8,
            "hidden_dropout": 0.0,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_neox": (
        _gpt_neox,
        {
            "vocab_size": 50432,
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "max_position_embeddings": 2048,
            "attention_bias": True,
            "hidden_dropout": 0.0,
            "tie_word_embeddings": False,
        },
    ),
    "falcon": (
        _falcon,
        {
            "vocab_size": 65024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "num_ln_in_parallel_attn": None,
            "num_kv_heads": None,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "max_position_embeddings": 2048,
            "ffn_hidden_size": None,
            "hidden_dropout": 0.0,
            "tie_word_embeddings": True,
        },
    ),
    "llama": (
        _llama,
        {
            **_ROPE,
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    ),
    "mistral": (
        _llama,
        {
            **_ROPE,
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "mixtral": (
        _llama,
        {
            **_ROPE,
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2": (
        _qwen2,
        {
            **_ROPE,
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen3": (
        _qwen3,
        {
            **_ROPE,
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen3_moe": (
        _qwen3,
        {
            **_ROPE,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 32768,
        },
    ),
    "phi3": (
        _llama,
        {
            **_ROPE,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
        },
    ),
    "gemma": (
        _llama,
        {
            **_ROPE,
            **_GEMMA,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
    ),
    "gemma2": (
        _gemma2,
        {
            **_ROPE,
            **_GEMMA,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    "olmo2": (
        _olmo2,
        {
            **_ROPE,
            "vocab_size": 50304,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    ),
    "olmoe": (
        _olmo2,
        {
            **_ROPE,
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
}
"""Architecture by transformers' ``model_type``: how its config is read, and what it leaves out."""

UNSUPPORTED: dict[str, dict[str, Any]] = {
    "gpt2": {"add_cross_attention": False},
    "bert": {"add_cross_attention": False},
    "roberta": {"add_cross_attention": False},
    "qwen3_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1},
}
"""Settings that change what is built and are not counted: only these values are taken."""

RENAMED = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "distilbert": {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
    "t5": {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
    },
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "olmoe": {"num_experts": "num_local_experts"},
}
"""Other names that transformers takes for the same setting."""
