"""Optimizer states, adapters and what they compute: the formulas beside what PyTorch keeps and multiplies."""

import argparse

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from course_lib import cli
from course_lib.commands import plan as command
from course_lib.errors import ConfigError
from course_lib.parallel.blocks import blocks
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

SIZES = {
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 300,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "llama": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 300,
    },
}


def built(family, layers=2):
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    config = AutoConfig.for_model(family, **SIZES[family] | {name: layers})
    return AutoModelForCausalLM.from_config(config), models.from_config(config.to_dict(), family)


def made(name, model):
    everything = list(model.parameters())
    return {
        "adamw": lambda: torch.optim.AdamW(everything),
        "sgd": lambda: torch.optim.SGD(everything, lr=0.1),
        "sgd-momentum": lambda: torch.optim.SGD(everything, lr=0.1, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(everything),
        "muon": lambda: Muon(
            muon_groups(model, [{"params": everything, "weight_decay": 0.0}]),
            lr=0.1,
            momentum=0.9,
            betas=(0.9, 0.95),
            eps=1e-8,
        ),
    }[name]()


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw-8bit"])
def test_states_are_those_that_pytorch_keeps(family, name):
    model, known = built(family)
    optimizer = made(name, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = sum(
        state.nbytes
        for states in optimizer.state.values()
        for key, state in states.items()
        if isinstance(state, torch.Tensor) and key != "step"
    )
    formula = memory.estimate(known, Plan(32, "ddp", optimizer=name)).optimizer
    assert formula == pytest.approx(kept)
    assert (kept < 8 * known.parameters) is (name != "adamw")


def test_eight_bits_and_four():
    """2 bytes and a scale for 256 each; 4 bits and 0.127 for scales (arXiv 2305.14314 section 3)."""
    model = models.load("llama-8b")
    assert optimizers.bytes_per_parameter("adamw-8bit", model) == (2.03125, 2.03125)
    assert pytest.approx(0.127, abs=5e-4) == 8 * adapters.NF4 - 4
    assert optimizers.traffic("adamw", model) == 30 and optimizers.traffic("sgd", model) == 14


def test_muon_multiplies_what_its_iterations_say():
    """Newton-Schulz on a tall matrix, counted by PyTorch."""
    model, known = built("llama")
    optimizer = made("muon", model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    assert counted.get_total_flops() == pytest.approx(optimizers.flops("muon", known), rel=0.01)
    assert optimizers.flops("adamw", known) == 0


class Adapted(nn.Module):
    """A frozen layer and an adapter of rank 4 beside it: LoRA by hand."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        rows, columns = layer.weight.shape
        self.down, self.up = (
            nn.Linear(one, other, bias=False, dtype=layer.weight.dtype)
            for one, other in ((columns, rank), (rank, rows))
        )

    def forward(self, hidden):
        return self.layer(hidden) + self.up(self.down(hidden))


def with_adapters(layers, rank):
    torch.manual_seed(0)
    model, known = built("llama", layers)
    model = model.to(torch.bfloat16).train().requires_grad_(False)
    for block in blocks(model).values():
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear):
                block.set_submodule(name, Adapted(layer, rank))
    return model, known


def of_a_step(layers, rank):
    """Trained parameters, FLOPs forward and backward, and bytes kept."""
    model, known = with_adapters(layers, rank)
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    hidden = torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)  # so that the first block's counts too
    with FlopCounterMode(display=False) as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        logits = model(inputs_embeds=hidden).logits
    with FlopCounterMode(display=False) as backward:
        logits.float().sum().backward()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    products = [
        sum(count for operation, count in counted.get_flop_counts()["Global"].items() if "mm" in str(operation))
        for counted in (forward, backward)
    ]
    return trained, *products, sum(size for size, _ in kept.values()), known


def test_adapters_are_trained_and_frozen_weights_have_no_gradient():
    """One block's parameters, FLOPs and bytes, by the difference of three blocks and two."""
    three, two, rank = of_a_step(3, 4), of_a_step(2, 4), 4
    known, tokens = three[4], 128
    trained, forward, backward, kept = (more - less for more, less in zip(three[:4], two[:4], strict=True))
    assert trained == adapters.of_a_block(known, rank)
    chip = hardware.accelerator("A100-80")
    plan = Plan(64, "ddp", micro_batch=2, lora_rank=rank)
    there, back = work.block(known, plan, chip)
    assert forward == 2 * tokens * (known.layer_matmul + trained)
    assert backward == 2 * tokens * (known.layer_matmul + 2 * trained)
    full, _ = work.block(known, Plan(64, "ddp", micro_batch=2), chip)
    rate = chip.matmul_rate("bf16")
    assert there.matmul == pytest.approx(full.matmul + 2 * tokens * trained / rate)
    assert back.matmul - there.matmul == pytest.approx(2 * tokens * trained / rate)
    formula = activations.of_block(known, 2, 64, flash=True, fused=False) + adapters.kept(known, rank, tokens, 2)
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


@pytest.mark.parametrize(
    "more", [{"optimizer": "lion"}, {"lora_rank": -1}, {"base_bits": 4}, {"optimizer": "muon", "lora_rank": 4}]
)
def test_what_no_plan_can_be(more):
    with pytest.raises(ConfigError):
        Plan(32, "ddp", **more)
    with pytest.raises(ConfigError, match="whole matrices"):
        Plan(32, "fsdp", 3, optimizer="adafactor")


def test_the_search_takes_them_and_says_who_runs_them(capsys):
    """The command's lists are the planner's; every layout has the settings; `course train` is told its optimizer."""
    assert (command.OPTIMIZERS, command.FAMILIES) == (OPTIMIZERS, strategy.FAMILIES)
    model, cluster = models.load("gpt2-xl"), hardware.cluster("A100-80", 8)
    for name in OPTIMIZERS:
        plans = list(layouts.layouts(model, 8, 8, 1024, 64, "bf16", settings={"optimizer": name}))
        assert plans and all(plan.optimizer == name for plan in plans)
        runs = [
            to_launchers.options(plan, model).get("optimizer") for plan in plans if to_launchers.runs_here(plan, model)
        ]
        assert (name == "adamw-8bit") is (not runs) and set(runs) <= {
            {"adamw": None, "sgd-momentum": "sgd"}.get(name, name)
        }
    assert "optim" in to_launchers.training_arguments(Plan(32, "ddp", optimizer="adamw-8bit"))
    found = strategy.search(model, cluster, 1024, 64, settings={"lora_rank": 8, "base_bits": 4})
    assert {candidate.plan.tensor * candidate.plan.pipeline for candidate in found.candidates} == {1}
    assert "QLoRA 8" in found.best.plan.strategy
    assert cost.estimate(model, found.best.plan, cluster).tokens_per_second == found.best.cost.tokens_per_second
    asked = "plan --model gpt2-xl --gpu T4 --gpus 1 --lora-rank 8 --loss linear"
    assert cli.main(asked.split()) == 0
    assert "PEFT's LoRA" in " ".join(capsys.readouterr().out.split())
    parser = argparse.ArgumentParser()
    command.register(parser)
    assert set(command.SETTINGS) <= set(Plan.__dataclass_fields__) and RECIPES["autocast"].total == 16
