"""Seconds in which this host starts one operation, measured on blocks so narrow that the device is never waited for."""

import statistics
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from course_lib.planning import hardware, models, work
from course_lib.planning.plan import Plan

LAYERS = (2, 10)
"""Blocks of the two models whose times are subtracted, so that embedding, loss and clearing gradients drop out."""
PASSES = 20
"""Timed passes of each, after a quarter as many untimed."""
NARROW = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def device_here(accelerator: str) -> torch.device | None:
    """This machine's device of a kind, by the catalogue's name; None where it has none."""
    if accelerator == "CPU":
        return torch.device("cpu")
    chip = hardware.of_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return torch.device("cuda") if chip and chip.name == accelerator else None


def launch_seconds(device: torch.device) -> float:
    """Median seconds per operation over the forward and backward passes of transformers' Llama blocks.

    Args:
        device: what the operations are started on; on an accelerator they are waited for once, after all passes.
    """
    few, many = (_of_a_pass(layers, device) for layers in LAYERS)
    known = models.from_config(LlamaConfig(**NARROW).to_dict())
    operations = sum(work.operations(known, Plan(8, "fsdp", 3)))
    return max(many - few, 0.0) / (LAYERS[1] - LAYERS[0]) / operations


def _of_a_pass(layers: int, device: torch.device) -> float:
    config = LlamaConfig(**NARROW, num_hidden_layers=layers)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train().to(device)
    ids = torch.ones(1, 8, dtype=torch.int64, device=device)
    seconds = []
    for _ in range(PASSES + PASSES // 4):
        started = time.perf_counter()
        model(ids, labels=ids).loss.backward()
        seconds.append(time.perf_counter() - started)
        model.zero_grad()
    return statistics.median(seconds[PASSES // 4 :])
