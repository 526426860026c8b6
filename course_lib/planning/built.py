"""A model of any architecture that transformers knows, counted on the model itself, built of no memory.

On the meta device parameters have shapes and no elements, so that a model of any size takes a second and some
megabytes. What :mod:`course_lib.planning.families` counts by arithmetic needs neither torch nor transformers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from course_lib.errors import ConfigError, ModelError
from course_lib.parallel.blocks import blocks
from course_lib.planning.families import Parts

EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token")


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

    def first_of(names: tuple[str, ...], default: Any = None) -> Any:
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if value), default)

    of_blocks = {parameter for block in inside for parameter in block.parameters()}
    ends = {False: 0, True: 0}  # before the first block, after it
    passed = False
    for parameter in model.parameters():
        passed = passed or parameter in of_blocks
        if parameter not in of_blocks:
            ends[passed] += parameter.numel()
    sums = {"attention": 0, "mlp": 0, "norms": 0}
    experts = first_of(EXPERTS, 1)
    chosen = min(first_of(CHOSEN, 1), experts)
    multiplied, counted = 0.0, set()
    for block in inside:
        for name, parameter in block.named_parameters():
            if parameter in counted:
                continue
            counted.add(parameter)
            of_attention = "attn" in name.lower() or "attention" in name.lower()
            kind = (
                "norms"
                if "norm" in name.lower() or name.lower().startswith("ln")
                else ("attention" if of_attention else "mlp")
            )
            sums[kind] += parameter.numel()
            if parameter.ndim < 2 or name.endswith("bias"):
                continue
            routed = experts > 1 and ("expert" in name and "shared" not in name)
            multiplied += parameter.numel() * (chosen / experts if routed else 1)
    layers = len(inside)
    hidden = first_of(("hidden_size", "d_model", "n_embd", "dim"))
    heads = first_of(("num_attention_heads", "n_head", "n_heads", "num_heads"), 1)
    attention, mlp, norms = (size // layers for size in sums.values())
    inner = first_of(("moe_intermediate_size",) if experts > 1 else ()) or first_of(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "expansion_ratio"), 4 * hidden
    )
    return Parts(
        hidden,
        layers,
        heads,
        first_of(("num_key_value_heads", "num_kv_heads"), heads),
        first_of(("head_dim", "v_head_dim", "d_kv"), hidden // heads),
        int(inner),
        first_of(("vocab_size",), 1),
        first_of(("max_position_embeddings", "n_positions", "max_seq_len"), 0),
        ends[False],
        attention,
        mlp,
        norms,
        ends[True],
        extra=sum(sums.values()) - layers * (attention + mlp + norms),
        experts=experts,
        experts_per_token=chosen,
        gated=any("gate_" in name for name, _ in inside[0].named_parameters()),
        rms_norm=any("RMSNorm" in type(module).__name__ for module in model.modules()),
        rotary=any("Rotary" in type(module).__name__ for module in model.modules()),
        causal=(has_head and "CausalLM" in type(model).__name__) or "LMHead" in type(model).__name__,
        has_head=has_head,
        activation=str(first_of(("hidden_act", "hidden_activation", "activation_function"), "gelu")),
        dropout=any(isinstance(module, nn.Dropout) and module.p > 0 for module in inside[0].modules()),
        multiplied=round(multiplied / layers),
        encoder_decoder=bool(model.config.is_encoder_decoder),
    )
