"""A model of any architecture that transformers knows, counted on the model itself, built of no memory.

On the meta device parameters have shapes and no elements, so that a model of any size takes a moment and some
megabytes, once torch and transformers are there.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.initialization import no_init_weights
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from course_lib.errors import ConfigError, ModelError, nearest
from course_lib.parallel.blocks import blocks

NAMES = {
    "hidden": ("hidden_size", "d_model", "n_embd", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "v_head_dim", "d_kv"),
    "ffn": ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "expansion_ratio"),
    "ffn of an expert": ("moe_intermediate_size",),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"),
    "activation": ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn"),
    "dropout": ("resid_pdrop", "residual_dropout", "hidden_dropout_prob", "hidden_dropout", "dropout", "dropout_rate"),
}
"""What configs call a size; of several that one has, the first that is not 0 counts."""
PARTS = ("attention", "mlp", "norms")


def counted(fields: Mapping[str, Any], name: str, head: bool) -> dict[str, Any]:
    """The fields of a :class:`course_lib.planning.models.Model` but its name.

    Args:
        fields: of a config.json.
        name: what to call the model in errors.
        head: with the layer that gives logits, where the architecture has such a class.
    Raises:
        ModelError: transformers does not build it of this config, or it has no like blocks or no vocabulary.
    """
    family = fields.get("model_type")
    if family not in CONFIG_MAPPING_NAMES:
        raise ModelError(
            f"{name}: transformers has no architecture `{family}`" if family else f"{name}: config has no `model_type`",
            nearest(str(family), CONFIG_MAPPING_NAMES) or "give a config.json that save_pretrained wrote",
        )
    try:
        config = transformers.AutoConfig.for_model(**fields)
        with torch.device("meta"), no_init_weights():
            model, has_head = _build(config, head)
        model.tie_weights()
        inside = list(blocks(model).values())
        sizes = _sizes(config.get_text_config())
    except (
        ConfigError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        RuntimeError,
        ImportError,
        NotImplementedError,
        ZeroDivisionError,
        StrictDataclassError,
    ) as error:
        raise ModelError(
            f"{name}: transformers does not build `{family}` of this config, as a model of text with like blocks "
            f"({' '.join(str(error).split()) or type(error).__name__})",
            "give a config.json whose model transformers loads without code of its own",
        ) from error
    kinds = {type(module).__name__ for module in model.modules()}
    return {
        "family": family,
        **sizes,
        **_parameters(model, inside, sizes["experts_per_token"] / sizes["experts"], bool(config.is_encoder_decoder)),
        "gated": any("gate_" in part or "wi_1" in part for part, _ in inside[0].named_parameters()),
        "rms_norm": any("RMSNorm" in kind or kind.endswith("T5LayerNorm") for kind in kinds),
        "rotary": any("Rotary" in kind for kind in kinds),
        # encoders, which are trained to fill masks, have classes for the next token, too
        "causal": _builds(transformers.AutoModelForCausalLM, config)
        and not _builds(transformers.AutoModelForMaskedLM, config),
        "has_head": has_head,
        "encoder_decoder": bool(config.is_encoder_decoder),
    }


def _builds(maker: Any, config: Any) -> bool:
    """Whether transformers has such a class of the architecture."""
    return type(config) in maker._model_mapping


def _build(config: Any, head: bool) -> tuple[Any, bool]:
    """The model, and whether it ends in logits over the vocabulary.

    By its class and not by ``from_config``, which under DeepSpeed's ZeRO-3 shares out what it makes among the ranks.
    """
    maker, has_head = transformers.AutoModel, False
    if head:
        heads = ("Seq2SeqLM",) if config.is_encoder_decoder else ("MaskedLM", "CausalLM")
        makers = (getattr(transformers, f"AutoModelFor{kind}") for kind in heads)
        with_logits = next((kind for kind in makers if _builds(kind, config)), None)
        maker, has_head = with_logits or maker, with_logits is not None
    if not _builds(maker, config):
        raise ValueError(f"it has no {maker.__name__}")
    return _get_model_class(config, maker._model_mapping)(config), has_head


def _size(config: Any, name: str, default: Any = None) -> Any:
    return next((value for key in NAMES[name] if (value := getattr(config, key, None))), default)


def _sizes(config: Any) -> dict[str, Any]:
    """The sizes that a config tells; one of others than models of text has no ``vocab_size``."""
    hidden, heads = _size(config, "hidden"), _size(config, "heads", 1)
    experts = _size(config, "experts", 1)
    one_key_head = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    expert_ffn = _size(config, "ffn of an expert") if experts > 1 else None
    return {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": 1 if one_key_head else _size(config, "kv_heads", heads),
        "head_dim": _size(config, "head_dim", hidden // heads),
        "ffn": int(expert_ffn or _size(config, "ffn", 4 * hidden)),
        "vocab": config.vocab_size,
        "context": _size(config, "context", 0),
        "experts": experts,
        "experts_per_token": min(_size(config, "experts_per_token", 1), experts),
        "activation": str(_size(config, "activation", "gelu")),
        "dropout": bool(_size(config, "dropout")),
    }


def _parameters(model: nn.Module, inside: list[nn.Module], share: float, two_kinds: bool) -> dict[str, int]:
    """Parameters by where they are.

    Args:
        model: on the meta device.
        inside: its blocks.
        share: of the experts those that a token is sent to.
        two_kinds: blocks of an encoder and of a decoder, which have more: that is ``extra``, for an average is of none.
    """
    counts, matmuls = _of_blocks(inside, share)
    layers, whole = len(inside), sum(counts, Counter[str]())
    held = {part: min(count[part] for count in counts) if two_kinds else whole[part] // layers for part in PARTS}
    extra = whole.total() - layers * sum(held.values())
    multiplied = round(min(matmuls)) + extra // layers if two_kinds else round(sum(matmuls) / layers)
    before, after = _outside(model, inside)
    outside = {"embedding": before, "head": after}
    return held | outside | {"layers": layers, "extra": extra, "layer_matmul": multiplied}


def _outside(model: nn.Module, inside: list[nn.Module]) -> tuple[int, int]:
    """Parameters before the first block, and after it, of those that are in none."""
    of_blocks = {parameter for block in inside for parameter in block.parameters()}
    before, after, passed = 0, 0, False
    for name, parameter in model.named_parameters():
        if parameter in of_blocks:
            passed = True
        elif passed or "final" in name:
            after += parameter.numel()
        else:
            before += parameter.numel()
    return before, after


def _of_blocks(inside: list[nn.Module], share: float) -> tuple[list[Counter[str]], list[float]]:
    """Each block's parameters by part, and the weights a token is multiplied with: of routed experts a share."""
    counts, matmuls, seen = [], [], set[nn.Parameter]()
    for block in inside:
        count, multiplied = Counter[str](), 0.0
        for name, parameter in block.named_parameters():
            if parameter in seen:
                continue  # what blocks share counts once
            seen.add(parameter)
            count[_part_of(name)] += parameter.numel()
            if parameter.ndim >= 2 and not name.endswith("bias"):
                routed = "expert" in name and "shared" not in name
                multiplied += parameter.numel() * (share if routed else 1)
        counts.append(count)
        matmuls.append(multiplied)
    return counts, matmuls


def _part_of(name: str) -> str:
    """Attention, norms or MLP, guessed by a parameter's name, as architectures have no common ones."""
    lower = name.lower()
    if "q_norm" in lower or "k_norm" in lower:
        return "attention"
    if "norm" in lower or lower.startswith("ln"):
        return "norms"
    return "attention" if "attn" in lower or "attention" in lower else "mlp"
