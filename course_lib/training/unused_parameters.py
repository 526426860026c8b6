"""Finds out whether a model's loss leaves trainable parameters out, which DDP has to know before it wraps the model."""

import re
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.modeling.probing import probe_row, undisturbed

BY_CHANCE = re.compile(r"(?:^|_)experts$|layerdrop$")
"""Fields of a config that are above 0 where a step may leave out what the step before used."""


def may_leave_out(model: nn.Module) -> bool:
    """Whether some step of a model may give a trainable parameter no gradient.

    XLNet, RoFormer and SqueezeBERT have parameters that no task's loss uses, which the graph of one forward shows.
    Mixtures of experts and models that drop layers may leave out others in each step.

    Args:
        model: of transformers, with a head; its parameters and mode stay as they are.
    """
    config = getattr(model, "config", None)
    if any(
        BY_CHANCE.search(name) and isinstance(value, int | float) and value > 0 for name, value in vars(config).items()
    ):
        return True
    left_out = never_reached(model)
    return left_out is None or bool(left_out)  # where it cannot be seen: looking for unused parameters is never wrong


def never_reached(model: nn.Module) -> set[Tensor] | None:
    """The trainable parameters that the graph of one forward of a few tokens does not have, so that no loss uses them.

    Returns:
        None where the model does not take such a row.
    """
    trainable: set[Tensor] = {parameter for parameter in model.parameters() if parameter.requires_grad}
    try:
        with torch.enable_grad(), undisturbed(model):
            return trainable - reached(model(**probe_row(model)).logits)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def reached(root: Tensor) -> set[Tensor]:
    """The leaves that a backward from a tensor would give gradients to."""
    leaves: set[Tensor] = set()
    waiting, seen = [root.grad_fn], {root.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):  # where gradients of a leaf are accumulated
            leaves.add(node.variable)
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        waiting += new
    return leaves


def leave_undecayed(optimizer: Optimizer, parameters: Collection[Tensor]) -> None:
    """Move some parameters to the optimizer's group without weight decay, in place; nothing where it has none.

    DeepSpeed updates flat buffers, and takes the gradient of a parameter that no loss reaches for zeros: with that an
    optimizer leaves it alone, except for the decay.
    """
    without = next((group for group in optimizer.param_groups if group.get("weight_decay") == 0), None)
    if without is None:
        return
    for group in optimizer.param_groups:
        if group is not without:
            without["params"] += [p for p in group["params"] if p in parameters]
            group["params"] = [p for p in group["params"] if p not in parameters]
