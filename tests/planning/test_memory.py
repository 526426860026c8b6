"""The memory model: every exact published row to the printed digit, and tensors really saved."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from course_lib.planning import models
from course_lib.planning.activations import of_block
from course_lib.planning.memory import zero_model_states
from course_lib.planning.pipeline_ranks import in_flight
from course_lib.planning.plan import RECIPES
from tests.planning.model_cases import PUBLISHED, SMALL, kept_for_backward, published


def as_printed(value, printed):
    """A number in the form of the paper's table: cut to an integer, or rounded half up to its decimals."""
    if "." not in printed:
        return str(int(value + 1e-9))
    decimals = len(printed.split(".")[1])
    return f"{math.floor(value * 10**decimals + 0.5 + 1e-9) / 10**decimals:.{decimals}f}"


ZERO = [row for row in published("zero_model_state_memory") if "dp" in row["config"]]


@pytest.mark.parametrize("row", ZERO, ids=lambda row: row["id"])
def test_every_cell_of_zeros_table_1(row):
    config, printed = row["config"], row["value"]["printed"]
    model_states = zero_model_states(config["params"], config["dp"], config["zero_stage"], config["K"])
    assert as_printed(model_states / 1e9, printed) == printed and len(ZERO) == 54


def test_zeros_largest_models():
    """The theory of arXiv 1910.02054, table 2."""
    rows = published("zero_max_model_size")
    assert len(rows) == 2
    for config, value in ((row["config"], row["value"]) for row in rows):
        for stage, name in enumerate(("baseline", "Pos", "Pos_g", "Pos_g_p")):
            largest = config["mp"] * config["gpu_memory_GB"] / zero_model_states(1, config["dp"], stage)
            printed = value["theoretical_B"][name]
            assert math.floor(largest * 10) / 10 == pytest.approx(printed, rel=0.006 if printed < 1000 else 0.025)


def test_every_recipe_of_bytes_per_parameter():
    names = {
        "bf16-+-fp32-mixed-precision-baseline": "mixed, accumulating in fp32",
        "without-fp32-grad-accumulation": "mixed",
        "Transformer-Engine": "Transformer Engine",
        "FP8-LM-O3": "FP8-LM O3",
        "DeepSeek-V3": "DeepSeek-V3",
        "nanotron-FP8": "nanotron FP8",
    }
    rows = {row["id"]: row["value"]["bytes_per_param"] for row in published("bytes_per_param")}
    assert rows == {f"playbook-bytes-{name}": RECIPES[recipe].total for name, recipe in names.items()}


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
    rows = {row["id"].removeprefix("korthikanti-"): row for row in published("activation_memory_formula")}
    others = {"eq1-parts", "eq5", "interleave"}
    assert set(rows) == {f"t2-{name}" for name in TECHNIQUES} | others
    for name, technique in TECHNIQUES.items():
        tensor = t if technique.get("tensor") else 1
        options = {option: value for option, value in technique.items() if option != "tensor"}
        formula = rows[f"t2-{name}"]["value"]["bytes_per_layer"].replace("sbh*", "s*b*h*")
        expected = eval(formula, {"s": s, "b": b, "h": h, "a": a, "t": t})
        assert of_block(model, b, s, tensor=tensor, **options) == pytest.approx(expected, rel=1e-12), name
    assert of_block(model, b, s) == (11 + 19 + 4) * s * b * h + 5 * a * s * s * b
    one = of_block(model, b, s, tensor=t, sequence_parallel=True)
    # p micro-batches in flight times L / p blocks: the pipeline's size cancels
    whole = s * b * h * layers / t * (34 + 5 * a * s / h)
    assert in_flight("1f1b", p, 64) * layers / p * one == pytest.approx(whole)
    assert in_flight("interleaved", p, 64, m) / p == pytest.approx(1 + (p - 1) / (p * m))


def test_gpt3s_share_of_attention_scores():
    """5as/h = 80, and selective recomputation saves 70 % (arXiv 2205.05198 section 5)."""
    row = next(row for row in PUBLISHED if row["id"] == "korthikanti-ratio-GPT-3")
    c, value = row["config"], row["value"]
    model = gpt(c["h"], c["a"])
    whole = of_block(model, 1, c["s"], tensor=8, sequence_parallel=True)
    kept = of_block(model, 1, c["s"], tensor=8, sequence_parallel=True, checkpointing="selective")
    assert 5 * c["a"] * c["s"] / c["h"] == value["5as/h"]
    assert round(100 * (1 - kept / whole)) == value["selective_saves_pct"]


def saved_bytes(config, layers, tokens, sequences):
    """Bytes that autograd keeps for the backward pass of the blocks of a bf16 model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**config, **{"n_layer" if "n_embd" in config else "num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    inputs = torch.randint(0, 300, (sequences, tokens))
    with kept_for_backward(model) as kept:
        model(inputs).logits.sum()
    return sum(kept.values())


@pytest.mark.parametrize("name", SMALL["blocks"])
def test_activations_are_those_that_autograd_saves(name):
    """By the difference of four blocks and two, in transformers' own code, unfused."""
    config, tokens, sequences = SMALL["blocks"][name], 64, 2
    measured = (saved_bytes(config, 4, tokens, sequences) - saved_bytes(config, 2, tokens, sequences)) / 2
    formula = of_block(models.from_config(config), sequences, tokens, flash=True, fused=False)
    assert formula == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_fused_kernels_keep_less(name):
    model = models.from_config(SMALL["blocks"][name])
    fused, plain = (of_block(model, 1, 64, flash=True, fused=fused) for fused in (True, False))
    assert fused < plain
