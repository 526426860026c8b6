"""Architectures of no bundled model: counted on the built model, to the parameter."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from course_lib.errors import ModelError
from course_lib.planning import hardware, memory, models, strategy, to_launchers
from course_lib.planning.plan import Plan
from tests.planning.model_cases import SMALL, built_parameters

CASES = SMALL["built"]


def planned(family, head=True):
    return models.from_config({"model_type": family, **CASES[family]}, head=head)


@pytest.mark.parametrize("family", CASES)
def test_parameters_are_those_of_the_built_model(family):
    assert family not in models.families()
    config = AutoConfig.for_model(family, **CASES[family])
    known = planned(family)
    assert known.parameters == built_parameters(config)
    assert known.layers == (5 if family == "bart" else 4) and known.vocab == 320 and known.hidden == 64
    assert planned(family, head=False).parameters == built_parameters(config, head=False)
    held = memory.estimate(known, Plan(64, "fsdp", 3, data=4))
    assert held.parameters == known.parameters or known.experts > 1
    assert strategy.search(known, hardware.cluster("A100-80", 2), 64).best.cost.tokens_per_second > 0


def test_a_token_is_multiplied_with_the_experts_that_it_is_sent_to():
    known = planned("gpt_oss")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **CASES["gpt_oss"]))
    block = model.model.layers[0]
    routed = sum(p.numel() for name, p in block.named_parameters() if "experts" in name and p.ndim == 3)
    others = sum(p.numel() for name, p in block.named_parameters() if "experts" not in name and p.ndim == 2)
    assert known.layer_matmul == pytest.approx(others + routed / 2, rel=0.01)
    assert (known.experts, known.experts_per_token) == (4, 2) and known.gated and known.rms_norm and known.causal


def test_course_train_is_told_what_it_is_and_not_what_it_may_not_know():
    assert "encoder with a decoder" in to_launchers.why_not(Plan(32), planned("bart"))
    assert to_launchers.options(Plan(32), planned("electra"))["task"] == "masked_lm"
    assert to_launchers.options(Plan(32), planned("phi"))["task"] == "causal_lm"
    assert "may not know" in to_launchers.why_not(Plan(32, "megatron", pipeline=2), planned("phi"))


def test_what_transformers_does_not_build_is_one_line():
    with pytest.raises(ModelError, match="no architecture `lama`"):
        models.from_config({"model_type": "lama"})
    with pytest.raises(ModelError, match="does not build `cohere`"):
        models.from_config({"model_type": "cohere", **SMALL["small"], "num_attention_heads": "many"})


def test_counting_asks_no_other_rank_under_zero_3(monkeypatch):
    """As transformers' from_config does, which makes each parameter on all ranks together."""

    def asked():
        raise AssertionError("from_config was called")

    monkeypatch.setattr("transformers.modeling_utils.is_deepspeed_zero3_enabled", asked)
    with pytest.raises(AssertionError):
        AutoModel.from_config(AutoConfig.for_model("gpt2", n_layer=1))
    for head in (True, False):
        assert models.from_config({"model_type": "gpt2", "n_layer": 1}, head=head).layers == 1
