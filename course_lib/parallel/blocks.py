"""Blocks of a transformer, and the parameters that belong to each.

A block is the unit that FSDP gathers, activation checkpointing recomputes and a pipeline hands out.
"""

from collections.abc import Collection, Iterable

import torch
from torch import nn

from course_lib.errors import ConfigError


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model by name, in the order in which they are registered.

    They are the members of the outermost ``nn.ModuleList``s whose members are all of one class: the layers of BERT,
    GPT-2, Llama, ``nn.TransformerEncoder``; both stacks of T5 and BART. A list that lies within a block (the experts
    of a mixture, the sub-layers of T5) is part of it; a list of lists (Funnel's blocks of layers) has their members.

    Raises:
        ConfigError: the model has no such list.
    """
    members: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # parents before their children: the outermost list comes first
        inside = any(name.startswith(f"{block}.") for block in members)
        if not isinstance(module, nn.ModuleList) or inside:
            continue
        kinds = {type(member) for member in module}
        if len(kinds) == 1 and kinds.isdisjoint((nn.ModuleList, nn.ModuleDict)):  # nobody calls a list itself
            members |= {f"{name}.{i}" if name else str(i): member for i, member in enumerate(module)}
    if not members:
        raise ConfigError(
            f"{type(model).__name__} has no nn.ModuleList of like blocks",
            "name the modules to shard by themselves with units=",
        )
    return members


def check_disjoint(units: Collection[nn.Module]) -> None:
    """Refuse a unit that lies within another.

    Raises:
        ConfigError: with the class of the inner one.
    """
    for unit in units:
        for inner in unit.modules():
            if inner is not unit and inner in units:
                raise ConfigError(
                    f"unit {type(inner).__name__} lies within unit {type(unit).__name__}",
                    "name units that don't overlap",
                )


def owners(model: nn.Module, units: Collection[nn.Module]) -> dict[nn.Parameter, nn.Module]:
    """The unit that each parameter belongs to, in module order; ``model`` itself for what lies outside them.

    A parameter that is tied across units (GPT-2's token embedding is its output head too) belongs to the model: it is
    needed from the first use to the last.
    """
    # --- phase 1: who uses each parameter: units, or the model itself for modules outside of them ---
    users: dict[nn.Parameter, set[nn.Module]] = {parameter: set() for parameter in model.parameters()}
    inside = {module for unit in units for module in unit.modules()}
    for unit in units:
        for parameter in unit.parameters():
            users[parameter].add(unit)
    for module in model.modules():
        if module not in inside:
            for parameter in module.parameters(recurse=False):
                users[parameter].add(model)
    # --- phase 2: one user owns it; what has several is the model's ---
    return {parameter: using.pop() if len(using) == 1 else model for parameter, using in users.items()}


def alike(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters grouped so that each group can lie in one flat buffer: one dtype, all trainable or all frozen."""
    groups: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
    return list(groups.values())
