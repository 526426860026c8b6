"""Optimizers and learning-rate schedules, by their names in the config."""

import math
import re

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from course_lib.config import OptimConfig
from course_lib.config import lr_schedules as schedules
from course_lib.parallel.muon import Muon, muon_groups

NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Parameters that don't decay, by what their names in lower case have in them."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups of trainable parameters: what decays; and biases and norms, which do not.

    Which these are is said by their names, and by ``nn.LayerNorm``, as in the Hugging Face Trainer
    (``get_decay_parameter_names``): T5's ``relative_attention_bias`` is a bias, though a matrix.
    """
    within_norms = {
        parameter for module in model.modules() if isinstance(module, nn.LayerNorm) for parameter in module.parameters()
    }
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decays = {name: p not in within_norms and not NO_DECAY.search(name.lower()) for name, p in trainable.items()}
    groups = [
        {"params": [p for name, p in trainable.items() if decays[name]], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable.items() if not decays[name]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """The optimizer that the config names, with torch's fused kernels where they exist."""
    groups = parameter_groups(model, config.weight_decay)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=True)
    if config.optimizer == "muon":
        return Muon(
            muon_groups(model, groups),
            lr=config.learning_rate,
            momentum=config.momentum,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
        )
    return torch.optim.Adafactor(groups, lr=config.learning_rate)


def learning_rate_factor(step: int, *, shape: str, warmup: int, total: int) -> float:
    """Share of the peak learning rate at an optimizer step, counted from 0.

    Rises linearly over ``warmup`` steps, then stays (constant), falls linearly to 0 at ``total``
    (linear), or follows half a cosine to 0 (cosine; arXiv 1608.03983, eq. 5, one cycle).
    """
    if step < warmup:
        return step / warmup
    if shape == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - done if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def make_scheduler(optimizer: Optimizer, config: OptimConfig, total_steps: int) -> LambdaLR:
    """The schedule that the config names, over the run's optimizer steps."""
    more = schedules.arguments(config.lr_scheduler, config.lr_scheduler_kwargs)
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)  # as transformers rounds
    if config.lr_scheduler not in schedules.OWN or more:
        from transformers import get_scheduler

        return get_scheduler(config.lr_scheduler, optimizer, warmup, total_steps, more)
    return LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, shape=config.lr_scheduler, warmup=warmup, total=total_steps)
    )
