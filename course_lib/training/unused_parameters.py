"""Finds out whether a model's loss leaves trainable parameters out, which DDP has to know before it wraps the model."""

import re

import torch
from torch import Tensor, nn

TOKENS = 8
"""Of the row that a model is looked at with."""
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
    if any(BY_CHANCE.search(name) and isinstance(value, int | float) and value > 0
           for name, value in vars(config).items()):
        return True
    trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
    was = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return not trainable <= reached(model(**_row(model, device)).logits)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return True  # it does not take such a row: looking for unused parameters is never wrong
    finally:
        for module, training in was.items():
            module.training = training


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


def _row(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """One row without padding; it ends with the token where T5 and BART read their answer."""
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    ids = torch.arange(5, 5 + TOKENS, device=device)[None] % config.vocab_size
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int):
        ids[0, -1] = end
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
