"""Every architecture of transformers that `course train` takes, as small as its config lets it be."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from course_lib.modeling.loading import HEADS

# The first pattern that a field's name matches gives its value, where that is smaller or names a token.
SMALL = (
    (r"(padding_idx|pad_token_id)$", 0), (r"(bos|decoder_start)_token_id$", 1), (r"eos_token_id$", 2),
    (r"_token_(id|idx|index)$", 3), (r"(^|_)vocab_size$|^n_words$|^vocab_size_per_layer_input$", 99),
    (r"^(n_layers?|depth|(en|de)coder_layers|num_((en|de)coder_|hidden_)?layers)$", 2),
    (r"(attention_heads|^n_heads?|^num_heads)$", 4), (r"num_key_value_heads$|^n_head_kv$|^num_kv_heads$", 2),
    (r"^(head_dim|d_kv|attention_head_size|d_head|v_head_dim|qk_(nope|rope)_head_dim)$", 8),
    (r"^(q|kv)_lora_rank$", 16),
    (r"^(hidden_size|hidden_dim|d_model|n_embd|dim|embedding_size|emb_dim|word_embed_proj_dim)$", 32),
    (r"(intermediate_size|ffn_dim|^d_ff|^n_inner|^d_inner|^ffn_hidden_size)$", 64),
    (r"^(max_position_embeddings|n_positions|max_seq_len|n_ctx)$", 64),
    (r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$", 4),
    (r"^(num_experts_per_tok(en)?|moe_topk|moe_k|top_k|num_selected_experts)$", 2), (r"^(n_group|topk_group)$", 1),
)
OWN = {
    "BambaConfig": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "CodeGenConfig": {"rotary_dim": 8},
    "CohereCompassTextConfig": {"rope_parameters": {
        f"{kind}_attention": {"rope_type": "default", "rope_theta": 1e4} for kind in ("full", "sliding")}},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteTextConfig": {"num_key_value_heads": 4},
    "EsmConfig": {"vocab_size": 99, "mask_token_id": 3, "pad_token_id": 0},
    "EsmcConfig": {"num_key_value_heads": 4},
    "FalconH1Config": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_ssm": 64,
                       "mamba_d_state": 16, "mamba_chunk_size": 16},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
                          "activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [64, 64],
                          "hidden_size_per_layer_input": 8, "laurel_rank": 8},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "GPTJConfig": {"rotary_dim": 8},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "HunYuanDenseV1Config": {"head_dim": 8}, "HunYuanMoEV1Config": {"head_dim": 8},
    "KimiLinearConfig": {"linear_head_dim": 8, "linear_num_heads": 4},
    "Lfm2MoeConfig": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "LongcatFlashConfig": {"zero_expert_num": 2, "expert_ffn_hidden_size": 64},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8}, "MinistralConfig": {"head_dim": 8},
    "Mistral4Config": {"num_key_value_heads": 4, "head_dim": 16, "qk_head_dim": 16},
    "LayoutLMv3Config": {"coordinate_size": 5, "shape_size": 6}, "LiltConfig": {"hidden_size": 48},
    "NemotronConfig": {"head_dim": 8, "num_key_value_heads": 2}, "NeoMMEConfig": {"head_dim": 16},
    "PerceiverConfig": {"num_latents": 8, "d_latents": 32, "qk_channels": 32, "v_channels": 32},
    "ReformerConfig": {"axial_pos_embds": False}, "T5Config": {"decoder_start_token_id": 1},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2},
    "Zamba2Config": {"layer_types": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1], "mamba_ngroups": 1,
                     "n_mamba_heads": 4, "mamba_headdim": 16},
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


def tiny(config_class: type[PreTrainedConfig], task: str, **more: Any) -> PreTrainedConfig:
    """A config of two layers of width 32 and 99 words, as far as its class has fields for them."""
    own: dict[str, Any] = OWN.get(config_class.__name__, {})  # type: ignore[assignment]
    fields = shrunk(config_class().to_dict()) | own | more
    if task == "causal_lm" and hasattr(config_class(), "is_decoder"):
        fields["is_decoder"] = True
    return config_class(**fields)


def build(config_class: type[PreTrainedConfig], task: str, **more: Any) -> PreTrainedModel:
    """The tiny model for a task, with new weights; an Exception of any kind where there can be none."""
    with errors_only():
        made = HEADS[task][0].from_config
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in made(tiny(config_class, task, **more)).parameters())
        if size > 8_000_000:
            raise ValueError(f"{size / 1e6:.0f} million parameters are left")
        torch.manual_seed(0)
        config = tiny(config_class, task, **more)
        config.get_text_config().pad_token_id = 0
        model = made(config, dtype=torch.float32)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        return model


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Transformers warns of nothing meanwhile."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def batch() -> dict[str, torch.Tensor]:
    """Three rows of nine tokens, the second of five; each ends with the token where some models read their answer."""
    ids = torch.randint(4, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[[0, 1, 2], [8, 4, 8]] = 2
    mask = torch.ones(3, 9, dtype=torch.long)
    ids[1, 5:] = mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}
