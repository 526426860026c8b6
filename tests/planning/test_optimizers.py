"""Optimizer states, adapters and what they compute: the formulas beside what PyTorch keeps and multiplies."""

import argparse

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from course_lib import cli
from course_lib.commands import plan as command
from course_lib.modeling import lora
from course_lib.parallel.muon import Muon, muon_groups
from course_lib.planning import (
    activations,
    adapters,
    cost,
    hardware,
    layouts,
    memory,
    models,
    optimizers,
    strategy,
    to_launchers,
    work,
)
from course_lib.planning.plan import OPTIMIZERS, RECIPES, Plan
from tests.planning.model_cases import kept_for_backward, known, llama


def built(family, layers=2):
    sizes = {"vocab_size": 300, "num_hidden_layers": layers}
    config = llama(**sizes, num_key_value_heads=2)
    if family == "gpt2":
        dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        config = AutoConfig.for_model("gpt2", **sizes, n_embd=64, n_head=4, n_positions=64, **dropouts)
    return AutoModelForCausalLM.from_config(config), known(config)


def of_muon(model):
    groups = muon_groups(model, [{"params": list(model.parameters()), "weight_decay": 0.0}])
    return Muon(groups, lr=0.1, momentum=0.9, betas=(0.9, 0.95), eps=1e-8)


MAKERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "sgd-momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "muon": of_muon,
}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw-8bit"])
def test_states_are_those_that_pytorch_keeps(family, name):
    model, planned = built(family)
    optimizer = MAKERS[name](model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [(key, state) for of_one in optimizer.state.values() for key, state in of_one.items()]
    kept = sum(state.nbytes for key, state in states if isinstance(state, torch.Tensor) and key != "step")
    assert memory.estimate(planned, Plan(32, "ddp", optimizer=name)).optimizer == pytest.approx(kept)
    assert (kept < 8 * planned.parameters) is (name != "adamw")


def test_eight_bits_and_four():
    """2 bytes and a scale for 256 each; 4 bits and 0.127 for scales (arXiv 2305.14314 section 3)."""
    model = models.load("llama-8b")
    assert optimizers.bytes_per_parameter("adamw-8bit", model) == (2.03125, 2.03125)
    assert pytest.approx(0.127, abs=5e-4) == 8 * adapters.NF4 - 4
    assert optimizers.traffic("adamw", model) == 30 and optimizers.traffic("sgd", model) == 14


def test_muon_multiplies_what_its_iterations_say():
    """Newton-Schulz on a tall matrix, counted by PyTorch."""
    model, planned = built("llama")
    optimizer = of_muon(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    assert counted.get_total_flops() == pytest.approx(optimizers.flops("muon", planned), rel=0.01)
    assert optimizers.flops("adamw", planned) == 0


def of_a_step(layers, rank):
    """Trained parameters, FLOPs forward and backward, and bytes kept, of a model with adapters; and the planner's."""
    torch.manual_seed(0)
    model, planned = built("llama", layers)
    lora.add_lora(model.train(), rank)
    model.to(torch.bfloat16)
    hidden = torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)  # so that the first block's counts too
    with FlopCounterMode(display=False) as forward, kept_for_backward(model) as kept:
        logits = model(inputs_embeds=hidden).logits
    with FlopCounterMode(display=False) as backward:
        logits.float().sum().backward()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    products = [
        sum(count for operation, count in counted.get_flop_counts()["Global"].items() if "mm" in str(operation))
        for counted in (forward, backward)
    ]
    return trained, *products, sum(kept.values()), planned


def test_adapters_are_trained_and_frozen_weights_have_no_gradient():
    """One block's parameters, FLOPs and bytes, by the difference of three blocks and two."""
    three, two, rank = of_a_step(3, 4), of_a_step(2, 4), 4
    planned, tokens = three[4], 128
    trained, forward, backward, kept = (more - less for more, less in zip(three[:4], two[:4], strict=True))
    assert trained == adapters.of_a_block(planned, rank)
    chip = hardware.accelerator("A100-80")
    plan = Plan(64, "ddp", micro_batch=2, lora_rank=rank)
    there, back = work.block(planned, plan, chip)
    assert forward == 2 * tokens * (planned.layer_matmul + trained)
    assert backward == 2 * tokens * (planned.layer_matmul + 2 * trained)
    full, _ = work.block(planned, Plan(64, "ddp", micro_batch=2), chip)
    rate = chip.matmul_rate("bf16")
    assert there.matmul == pytest.approx(full.matmul + 2 * tokens * trained / rate)
    assert back.matmul - there.matmul == pytest.approx(2 * tokens * trained / rate)
    formula = activations.of_block(planned, 2, 64, flash=True, fused=False) + adapters.kept(planned, rank, tokens, 2)
    assert formula == pytest.approx(kept, rel=0.15)


def test_adapters_leave_gradients_and_states_of_themselves_alone():
    model = models.load("llama-8b")
    full, lora, qlora = (
        memory.estimate(model, Plan(2048, "ddp", compiled=True, **more))
        for more in ({}, {"lora_rank": 16}, {"lora_rank": 16, "base_bits": 4})
    )
    trained = model.layers * adapters.of_a_block(model, 16)
    assert trained == 41_943_040, "what PEFT prints for Llama 3 8B, rank 16, all linear layers"
    assert lora.gradients == qlora.gradients == 4 * trained and lora.optimizer == 8 * trained
    assert lora.parameters == pytest.approx(2 * model.parameters + 4 * trained)
    assert 0.3 < qlora.parameters / lora.parameters < 0.4 and lora.total < 0.22 * full.total
    assert full.total > 120 * 2**30 > 24 * 2**30 > qlora.total


def test_the_commands_lists_are_the_planners():
    parser = argparse.ArgumentParser()
    command.register(parser)
    assert (command.OPTIMIZERS, command.FAMILIES) == (OPTIMIZERS, strategy.FAMILIES)
    assert set(command.SETTINGS) <= set(Plan.__dataclass_fields__) and RECIPES["autocast"].total == 16


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_layout_has_the_optimizer_and_course_train_is_told(name):
    model = models.load("gpt2-xl")
    plans = list(layouts.layouts(model, 8, 8, 1024, 64, "bf16", settings={"optimizer": name}))
    told = {to_launchers.options(plan, model).get("optimizer") for plan in plans if to_launchers.runs_here(plan, model)}
    assert {plan.optimizer for plan in plans} == {name}
    assert told == {"adamw": {None}, "sgd-momentum": {"sgd"}, "adamw-8bit": set()}.get(name, {name})


def test_the_search_takes_adapters_and_says_who_runs_them(capsys):
    assert "optim" in to_launchers.training_arguments(Plan(32, "ddp", optimizer="adamw-8bit"))
    model, cluster = models.load("gpt2-xl"), hardware.cluster("A100-80", 8)
    found = strategy.search(model, cluster, 1024, 64, settings={"lora_rank": 8, "base_bits": 4})
    assert {candidate.plan.tensor * candidate.plan.pipeline for candidate in found.candidates} == {1}
    assert "QLoRA 8" in found.best.plan.strategy
    assert cost.estimate(model, found.best.plan, cluster).tokens_per_second == found.best.cost.tokens_per_second
    asked = "plan --model gpt2-xl --gpu T4 --gpus 1 --lora-rank 8 --loss linear"
    assert cli.main(asked.split()) == 0
    assert "PEFT's LoRA" in " ".join(capsys.readouterr().out.split())
