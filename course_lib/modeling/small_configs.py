"""Configs of transformers' classes, as small as their fields let them be."""

import re
from typing import Any

from transformers import PreTrainedConfig

# The first pattern that a field's name matches gives its value, where that is smaller or names a token.
SMALL = (
    (r"(padding_idx|pad_token_id)$", 0),
    (r"(bos|decoder_start)_token_id$", 1),
    (r"eos_token_id$", 2),
    (r"_token_(id|idx|index)$", 3),
    (r"(^|_)vocab_size$|^n_words$|^vocab_size_per_layer_input$", 99),
    (r"^(n_layers?|depth|(en|de)coder_layers|num_((en|de)coder_|hidden_)?layers)$", 2),
    (r"(attention_heads|^n_heads?|^num_heads)$", 4),
    (r"num_key_value_heads$|^n_head_kv$|^num_kv_heads$", 2),
    (r"^(head_dim|d_kv|attention_head_size|d_head|v_head_dim|qk_(nope|rope)_head_dim)$", 8),
    (r"^(q|kv)_lora_rank$", 16),
    (r"^(hidden_size|hidden_dim|d_model|n_embd|dim|embedding_size|emb_dim|word_embed_proj_dim)$", 32),
    (r"(intermediate_size|ffn_dim|^d_ff|^n_inner|^d_inner|^ffn_hidden_size)$", 64),
    (r"^(max_position_embeddings|n_positions|max_seq_len|n_ctx)$", 64),
    (r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$", 4),
    (r"^(num_experts_per_tok(en)?|moe_topk|moe_k|top_k|num_selected_experts)$", 2),
    (r"^(n_group|topk_group)$", 1),
)
OWN: dict[str, dict[str, Any]] = {
    "BambaConfig": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "CodeGenConfig": {"rotary_dim": 8},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            f"{kind}_attention": {"rope_type": "default", "rope_theta": 1e4} for kind in ("full", "sliding")
        }
    },
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteTextConfig": {"num_key_value_heads": 4},
    "EsmConfig": {"vocab_size": 99, "mask_token_id": 3, "pad_token_id": 0},
    "EsmcConfig": {"num_key_value_heads": 4},
    "FalconH1Config": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "Gemma3nTextConfig": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
        "intermediate_size": [64, 64],
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "GPTJConfig": {"rotary_dim": 8},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8},
    "KimiLinearConfig": {"linear_head_dim": 8, "linear_num_heads": 4},
    "Lfm2MoeConfig": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "LongcatFlashConfig": {"zero_expert_num": 2, "expert_ffn_hidden_size": 64},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "MinistralConfig": {"head_dim": 8},
    "Mistral4Config": {"num_key_value_heads": 4, "head_dim": 16, "qk_head_dim": 16},
    "LayoutLMv3Config": {"coordinate_size": 5, "shape_size": 6},
    "LiltConfig": {"hidden_size": 48},
    "NemotronConfig": {"head_dim": 8, "num_key_value_heads": 2},
    "NeoMMEConfig": {"head_dim": 16},
    "PerceiverConfig": {"num_latents": 8, "d_latents": 32, "qk_channels": 32, "v_channels": 32},
    "ReformerConfig": {"axial_pos_embds": False},
    "T5Config": {"decoder_start_token_id": 1},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2},
    "Zamba2Config": {
        "layer_types": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
    },
}
"""What a config class needs besides, or its fields would not fit each other."""


def shrunk(fields: dict) -> dict:
    """The fields of a config that have a smaller value, those of configs in it too."""
    small_values: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            small_values[name] = {"model_type": value["model_type"], **shrunk(value)}
        elif name == "layer_types" and {"linear_attention", "full_attention"} == set(value or ()):
            small_values[name] = ["linear_attention", "full_attention"]
        elif type(value) is int:
            small = next((small for pattern, small in SMALL if re.search(pattern, name)), None)
            if small is not None and (small < value or name.endswith("_id")):
                small_values[name] = small
    if "kv_lora_rank" in small_values and "num_key_value_heads" in small_values:
        small_values["num_key_value_heads"] = small_values["num_attention_heads"]  # they are of one latent
    return small_values


def shrunk_config(config: PreTrainedConfig, **more: Any) -> PreTrainedConfig:
    """A model's config at two layers of width 32 and 99 words, with its choices: ties, biases, norms, kinds of layers.

    Args:
        config: of the whole model.
        more: fields that have another value.
    """
    given = config.to_diff_dict() | {"model_type": config.model_type}
    small = shrunk(config.to_dict())
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in given.items():
        if isinstance(value, list) and len(value) == layers and name not in small:  # one entry per layer
            small[name] = value[: small.get("num_hidden_layers", layers)]
    no_dropout = {
        name: 0.0
        for name, value in config.to_dict().items()
        if isinstance(value, float) and re.search(r"drop(out)?(_rate|_prob)?$|pdrop$", name)
    }
    own = OWN.get(type(config).__name__, {})
    fields = {
        name: value
        for name, value in (given | small | own | no_dropout | more).items()
        if name not in ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype")
    }
    return type(config)(**fields)
