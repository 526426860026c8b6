"""A model of any architecture that transformers knows, counted on the model itself, built of no memory.

On the meta device parameters have shapes and no elements, so that a model of any size takes a second and some
megabytes. What :mod:`course_lib.planning.families` counts by arithmetic needs neither torch nor transformers.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from course_lib.errors import ConfigError, ModelError
from course_lib.parallel.blocks import blocks
from course_lib.planning.families import Parts

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
    "activation": ("hidden_act", "hidden_activation", "activation_function"),
}
"""What configs call a size; of several that one has, the first counts."""


def parts(fields: Mapping[str, Any], name: str, head: bool) -> Parts:
    """Sizes and parameters, of blocks their average.

    Args:
        fields: of a config.json.
        name: what to call the model in errors.
        head: with the layer that gives logits, where the architecture has such a class.
    Raises:
        ModelError: transformers does not build it of this config, or it has no like blocks.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers.initialization import no_init_weights

    family = str(fields["model_type"])
    try:
        config = transformers.AutoConfig.for_model(**fields)
        with torch.device("meta"), no_init_weights():
            model, has_head = _build(config, head)
        model.tie_weights()
        inside = blocks(model)
    except (
        ConfigError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        RuntimeError,
        ImportError,
        NotImplementedError,
        StrictDataclassError,
    ) as error:
        raise ModelError(
            f"{name}: transformers does not build `{family}` of this config as blocks that are counted "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__})",
            "give a config.json whose model transformers loads without code of its own",
        ) from error
    return _count(model, config.get_text_config(), list(inside.values()), has_head)


def _build(config: Any, head: bool) -> tuple[Any, bool]:
    """The model, and whether it ends in logits over the vocabulary."""
    import transformers

    if head:
        for kind in ("Seq2SeqLM",) if config.is_encoder_decoder else ("MaskedLM", "CausalLM"):  # an encoder has both
            maker = getattr(transformers, f"AutoModelFor{kind}")
            if type(config) in maker._model_mapping:
                return maker.from_config(config), True
    return transformers.AutoModel.from_config(config), False


def _count(model: Any, config: Any, inside: list[nn.Module], has_head: bool) -> Parts:
    """Parameters by where they are, and the sizes that formulas need."""

    def size(name: str, default: Any = None) -> Any:
        return next((value for key in NAMES[name] if (value := getattr(config, key, None))), default)

    experts = size("experts", 1)
    chosen = min(size("experts_per_token", 1), experts)
    sums, multiplied = _of_blocks(inside, chosen / experts)
    layers = len(inside)
    attention, mlp, norms = (sums[part] // layers for part in ("attention", "mlp", "norms"))
    before, after = _outside(model, inside)
    hidden, heads = size("hidden"), size("heads", 1)
    expert_ffn = size("ffn of an expert") if experts > 1 else None
    return Parts(
        hidden,
        layers,
        heads,
        size("kv_heads", heads),
        size("head_dim", hidden // heads),
        int(expert_ffn or size("ffn", 4 * hidden)),
        size("vocab", 1),
        size("context", 0),
        before,
        attention,
        mlp,
        norms,
        after,
        extra=sum(sums.values()) - layers * (attention + mlp + norms),
        experts=experts,
        experts_per_token=chosen,
        gated=any("gate_" in name for name, _ in inside[0].named_parameters()),
        rms_norm=any("RMSNorm" in type(module).__name__ for module in model.modules()),
        rotary=any("Rotary" in type(module).__name__ for module in model.modules()),
        causal=(has_head and "CausalLM" in type(model).__name__) or "LMHead" in type(model).__name__,
        has_head=has_head,
        activation=str(size("activation", "gelu")),
        dropout=any(isinstance(module, nn.Dropout) and module.p > 0 for module in inside[0].modules()),
        multiplied=round(multiplied / layers),
        encoder_decoder=bool(model.config.is_encoder_decoder),
    )


def _outside(model: nn.Module, inside: list[nn.Module]) -> tuple[int, int]:
    """Parameters before the first block, and after it, of those that are in none."""
    of_blocks = {parameter for block in inside for parameter in block.parameters()}
    before, after, passed = 0, 0, False
    for parameter in model.parameters():
        if parameter in of_blocks:
            passed = True
        elif passed:
            after += parameter.numel()
        else:
            before += parameter.numel()
    return before, after


def _of_blocks(inside: list[nn.Module], share: float) -> tuple[Counter[str], float]:
    """Parameters of all blocks by part, and how many weights a token is multiplied with: of routed experts a share."""
    named: dict[nn.Parameter, str] = {}
    for block in inside:
        for name, parameter in block.named_parameters():
            named.setdefault(parameter, name)  # what blocks share counts once
    sums: Counter[str] = Counter()
    multiplied = 0.0
    for parameter, name in named.items():
        sums[_part_of(name)] += parameter.numel()
        if parameter.ndim >= 2 and not name.endswith("bias"):
            routed = "expert" in name and "shared" not in name
            multiplied += parameter.numel() * (share if routed else 1)
    return sums, multiplied


def _part_of(name: str) -> str:
    """Attention, norms or MLP, guessed by a parameter's name, as architectures have no common ones."""
    lower = name.lower()
    if "norm" in lower or lower.startswith("ln"):
        return "norms"
    return "attention" if "attn" in lower or "attention" in lower else "mlp"
