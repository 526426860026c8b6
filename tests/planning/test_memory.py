"""The memory model: every exact published row to the printed digit, and tensors really saved."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from course_lib.planning import models
from course_lib.planning.activations import of_block
from course_lib.planning.memory import zero_model_states
from course_lib.planning.pipeline_ranks import in_flight
from course_lib.planning.plan import RECIPES

PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))


def rows(kind):
    return [row for row in PUBLISHED if row["kind"] == kind]


def as_printed(value, printed):
    """A number in the form of the paper's table: cut to an integer, or rounded half up to its decimals."""
    if "." not in printed:
        return str(int(value + 1e-9))
    decimals = len(printed.split(".")[1])
    return f"{math.floor(value * 10**decimals + 0.5 + 1e-9) / 10**decimals:.{decimals}f}"


def test_every_cell_of_zeros_table_1():
    seen = 0
    for row in rows("zero_model_state_memory"):
        if "dp" not in row["config"]:
            continue
        config, value = row["config"], row["value"]
        model_states = zero_model_states(config["params"], config["dp"], config["zero_stage"], config["K"])
        printed = value["printed"]
        assert as_printed(model_states / 1e9, printed) == printed, row["id"]
        seen += 1
    assert seen == 54


def test_zeros_fused_buffer_and_largest_models():
    """A fused fp32 buffer of 3 billion parameters, arXiv 1910.02054 section 6.2; table 2's theory."""
    row = next(row for row in PUBLISHED if row["id"] == "zero-fused-buffer")
    assert 4 * row["config"]["params"] / 1e9 == 12 and "12" in json.dumps(row["value"])
    seen = 0
    for row in rows("zero_max_model_size"):
        config = row["config"]
        for stage, name in enumerate(("baseline", "Pos", "Pos_g", "Pos_g_p")):
            largest = config["mp"] * config["gpu_memory_GB"] / zero_model_states(1, config["dp"], stage)
            printed = row["value"]["theoretical_B"][name]
            assert math.floor(largest * 10) / 10 == pytest.approx(printed, rel=0.006 if printed < 1000 else 0.025)
            seen += 1
    assert seen == 8


def test_every_recipe_of_bytes_per_parameter():
    names = {
        "bf16-+-fp32-mixed-precision-baseline": "mixed, accumulating in fp32",
        "without-fp32-grad-accumulation": "mixed",
        "Transformer-Engine": "Transformer Engine",
        "FP8-LM-O3": "FP8-LM O3",
        "DeepSeek-V3": "DeepSeek-V3",
        "nanotron-FP8": "nanotron FP8",
    }
    shares = rows("bytes_per_param")
    assert len(shares) == len(names) == 6
    for row in shares:
        recipe = RECIPES[names[row["id"].removeprefix("playbook-bytes-")]]
        assert recipe.total == row["value"]["bytes_per_param"], row["id"]


TECHNIQUES = {
    "none": {},
    "tp": {"tensor": True},
    "tp_sp": {"tensor": True, "sequence_parallel": True},
    "tp_sel": {"tensor": True, "checkpointing": "selective"},
    "tp_sp_sel": {"tensor": True, "sequence_parallel": True, "checkpointing": "selective"},
    "full": {"tensor": True, "checkpointing": "full"},
}


def gpt(h, a, layers=4, vocab=51200, s=2048):
    return models.from_config(
        {"model_type": "gpt2", "n_embd": h, "n_head": a, "n_layer": layers, "vocab_size": vocab, "n_positions": s}
    )


@pytest.mark.parametrize(
    ("h", "a", "s", "b", "t"), [(6144, 64, 2048, 4, 8), (12288, 96, 2048, 1, 8), (1024, 16, 512, 3, 2)]
)
def test_every_formula_of_korthikanti(h, a, s, b, t):
    """The rows' formulas are evaluated as they are written."""
    model, layers, p, m = gpt(h, a), 24, 4, 3
    seen = []
    for row in rows("activation_memory_formula"):
        name = row["id"].removeprefix("korthikanti-t2-")
        if name in TECHNIQUES:
            options = dict(TECHNIQUES[name])
            tensor = t if options.pop("tensor", False) else 1
            formula = row["value"]["bytes_per_layer"].replace("sbh*", "s*b*h*")
            expected = eval(formula, {"s": s, "b": b, "h": h, "a": a, "t": t})
            assert of_block(model, b, s, tensor=tensor, **options) == pytest.approx(expected, rel=1e-12)
            seen.append(name)
    one = of_block(model, b, s, tensor=t, sequence_parallel=True)
    shards = {
        "korthikanti-eq1-parts": of_block(model, b, s) == (11 + 19 + 4) * s * b * h + 5 * a * s * s * b,
        # p micro-batches in flight times L / p blocks: the pipeline's size cancels
        "korthikanti-eq5": in_flight("1f1b", p, 64) * layers / p * one
        == pytest.approx(s * b * h * layers / t * (34 + 5 * a * s / h)),
        "korthikanti-interleave": in_flight("interleaved", p, 64, m) / p == pytest.approx(1 + (p - 1) / (p * m)),
    }
    for row in rows("activation_memory_formula"):
        if row["id"] in shards:
            assert shards[row["id"]], row["id"]
            seen.append(row["id"])
    assert len(seen) == len(rows("activation_memory_formula")) == 9


def test_gpt3s_share_of_attention_scores():
    """5as/h = 80, and selective recomputation saves 70 % (arXiv 2205.05198 section 5)."""
    row = next(row for row in PUBLISHED if row["id"] == "korthikanti-ratio-GPT-3")
    c, value = row["config"], row["value"]
    model = gpt(c["h"], c["a"])
    whole = of_block(model, 1, c["s"], tensor=8, sequence_parallel=True)
    kept = of_block(model, 1, c["s"], tensor=8, sequence_parallel=True, checkpointing="selective")
    assert 5 * c["a"] * c["s"] / c["h"] == value["5as/h"]
    assert round(100 * (1 - kept / whole)) == value["selective_saves_pct"]


CPU_MODELS = {
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 300, "attn_pdrop": 0.0},
    "gpt2, no dropout": {
        "model_type": "gpt2",
        "n_embd": 128,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 300,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 352,
        "vocab_size": 300,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "ffn_dim": 512,
        "word_embed_proj_dim": 128,
        "vocab_size": 300,
        "dropout": 0.1,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 300,
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 352,
        "vocab_size": 300,
    },
}


def saved_bytes(config, layers, tokens, sequences):
    """Bytes that autograd keeps for the backward pass of the blocks of a bf16 model, weights left out."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**config, "n_layer" if "n_layer" in config else "num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor is held, so no address comes twice
        return tensor

    inputs = torch.randint(0, 300, (sequences, tokens))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs).logits.sum()
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("name", CPU_MODELS)
def test_activations_are_those_that_autograd_saves(name):
    """By the difference of four blocks and two, in transformers' own code, unfused."""
    config, tokens, sequences = CPU_MODELS[name], 64, 2
    measured = (saved_bytes(config, 4, tokens, sequences) - saved_bytes(config, 2, tokens, sequences)) / 2
    formula = of_block(models.from_config(config), sequences, tokens, flash=True, fused=False)
    assert formula == pytest.approx(measured, rel=0.15)


def test_fused_kernels_keep_less():
    for name in ("gpt2", "llama"):
        model = models.from_config(CPU_MODELS[name])
        fused, plain = (of_block(model, 1, 64, flash=True, fused=fused) for fused in (True, False))
        assert fused < plain
