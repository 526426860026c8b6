"""Architectures of no bundled model: counted on the built model, to the parameter."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from course_lib.errors import ModelError
from course_lib.planning import hardware, memory, models, strategy, to_launchers
from course_lib.planning.plan import Plan

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
CASES = {
    "phi": SMALL,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
    "cohere": GROUPED,
    "granite": GROUPED,
    "glm": GROUPED | {"head_dim": 16},
    "smollm3": GROUPED,
    "gemma3_text": GROUPED | {"head_dim": 16},
    "nemotron": GROUPED,
    "gpt_oss": GROUPED | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": SMALL
    | {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "qwen2_moe": GROUPED
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "gptj": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 320, "n_positions": 128, "rotary_dim": 8},
    "electra": SMALL | {"embedding_size": 32},
    "bart": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "vocab_size": 320,
    },
}
MAKERS = {"electra": AutoModelForMaskedLM, "bart": AutoModelForSeq2SeqLM}


@pytest.mark.parametrize("family", CASES)
def test_parameters_are_those_of_the_built_model(family):
    assert family not in models.families()
    config = AutoConfig.for_model(family, **CASES[family])
    with torch.device("meta"):
        model = MAKERS.get(family, AutoModelForCausalLM).from_config(config)
        base = AutoModel.from_config(config)
    known = models.from_config({"model_type": family, **CASES[family]})
    assert known.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert known.layers == (5 if family == "bart" else 4) and known.vocab == 320 and known.hidden == 64
    without = models.from_config({"model_type": family, **CASES[family]}, head=False)
    assert without.parameters == sum(parameter.numel() for parameter in base.parameters())
    held = memory.estimate(known, Plan(64, "fsdp", 3, data=4))
    assert held.parameters == known.parameters or known.experts > 1
    assert strategy.search(known, hardware.cluster("A100-80", 2), 64).best.cost.tokens_per_second > 0


def test_a_token_is_multiplied_with_the_experts_that_it_is_sent_to():
    known = models.from_config({"model_type": "gpt_oss", **CASES["gpt_oss"]})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **CASES["gpt_oss"]))
    block = model.model.layers[0]
    routed = sum(p.numel() for name, p in block.named_parameters() if "experts" in name and p.ndim == 3)
    others = sum(p.numel() for name, p in block.named_parameters() if "experts" not in name and p.ndim == 2)
    assert known.layer_matmul == pytest.approx(others + routed / 2, rel=0.01)
    assert (known.experts, known.experts_per_token) == (4, 2) and known.gated and known.rms_norm and known.causal


def test_course_train_is_told_what_it_is_and_not_what_it_may_not_know():
    bart, electra, phi = (
        models.from_config({"model_type": family, **CASES[family]}) for family in ("bart", "electra", "phi")
    )
    assert "encoder with a decoder" in to_launchers.why_not(Plan(32), bart)
    assert to_launchers.options(Plan(32), electra)["task"] == "masked_lm"
    assert to_launchers.options(Plan(32), phi)["task"] == "causal_lm"
    assert "may not know" in to_launchers.why_not(Plan(32, "megatron", pipeline=2), phi)


def test_what_transformers_does_not_build_is_one_line():
    with pytest.raises(ModelError, match="no architecture `lama`"):
        models.from_config({"model_type": "lama"})
    with pytest.raises(ModelError, match="does not build `cohere`"):
        models.from_config({"model_type": "cohere", **SMALL, "num_attention_heads": "many"})


def test_counting_asks_no_other_rank_under_zero_3(monkeypatch):
    """As transformers' from_config does, which makes each parameter on all ranks together."""

    def asked():
        raise AssertionError("from_config was called")

    monkeypatch.setattr("transformers.modeling_utils.is_deepspeed_zero3_enabled", asked)
    with pytest.raises(AssertionError):
        AutoModel.from_config(AutoConfig.for_model("gpt2", n_layer=1))
    for head in (True, False):
        assert models.from_config({"model_type": "gpt2", "n_layer": 1}, head=head).layers == 1
