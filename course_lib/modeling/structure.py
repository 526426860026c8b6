"""Finds how a model that has no layout of its own is built around its blocks, so that it can be cut into stages.

Which modules stand before the blocks and which after is seen in one forward of a few tokens. Whether the cut is right
is then seen, too: stages in turn have to compute what the model does.
"""

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.errors import ConfigError
from course_lib.modeling.layouts import LAYOUTS, Layout
from course_lib.modeling.probing import probe_row, undisturbed
from course_lib.parallel.blocks import blocks

_seen: "weakref.WeakKeyDictionary[nn.Module, Layout]" = weakref.WeakKeyDictionary()
ChainedLogits = Callable[[nn.Module, Layout, dict[str, Tensor]], Tensor]
"""From a model, a layout and a batch to the logits of stages of that layout in turn."""


def layout_of(model: nn.Module, chained: ChainedLogits) -> Layout:
    """The layout of a model.

    Args:
        model: for a task, with a head.
        chained: cuts it and runs the stages.
    Raises:
        ConfigError: no head, no blocks, several stacks of them, or stages that would compute something else.
    """
    name, kind = type(model).__name__, getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(kind, str) or not hasattr(model, "base_model"):
        raise ConfigError(
            f"{name} cannot be cut into stages: it is no model of transformers", "write its stages as modules by hand"
        )
    if model.base_model is model:
        raise ConfigError(f"{name} cannot be cut into stages: it has no head", "use the model for a task")
    if kind in LAYOUTS:
        return LAYOUTS[kind]
    if model not in _seen:
        _seen[model] = _verified(model, name, chained)
    return _seen[model]


def _verified(model: nn.Module, name: str, chained: ChainedLogits) -> Layout:
    """The layout that a forward shows, once stages of it have computed the model's own logits."""
    instead = "use --training_type accelerated, or write its stages as modules by hand"
    with torch.no_grad(), undisturbed(model):
        batch = probe_row(model)
        seen, logits = _look(model, name, batch)
        # A table that is looked up before the blocks is added to the embeddings, or read by the blocks of all stages.
        for layout in dict.fromkeys((seen, replace(seen, added=()))):
            try:
                if torch.allclose(chained(model, layout, batch), logits, rtol=1e-4, atol=1e-5):
                    return layout
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
                continue  # what another forward does with hidden states that it did not expect: no layout of this model
    raise ConfigError(f"{name} cannot be cut into stages: in turn they don't compute what the model does", instead)


def _look(model: nn.Module, name: str, batch: dict[str, Tensor]) -> tuple[Layout, Tensor]:
    """What stands before and after the blocks in a forward, and its logits."""
    base: Any = model.base_model
    prefix, names = f"{model.base_model_prefix}.", list(blocks(model))
    stacks = {block.rpartition(".")[0] for block in names}
    if len(stacks) > 1 or getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{name} cannot be cut into stages: it has several stacks of blocks", "use --training_type accelerated"
        )
    (stack,) = stacks
    if not stack.startswith(prefix):
        raise ConfigError(
            f"{name} cannot be cut into stages: its blocks are not in its base model", "use --training_type accelerated"
        )
    beside = _beside(base, stack.removeprefix(prefix))
    calls: list[tuple[str, bool, bool]] = []  # what was called; whether it took ids, and handed hidden states on
    of_block: list[int] = []  # how many things it returned in a tuple
    first_block = model.get_submodule(names[0])
    with contextlib.ExitStack() as hooks:
        for path, module in [*beside.items(), ("", first_block)]:

            def note(_: Any, args: Any, output: Any, path: str = path) -> None:
                plain = bool(args) and isinstance(args[0], Tensor) and isinstance(output, Tensor)
                floating = plain and args[0].is_floating_point()
                calls.append((path, plain and not floating, floating))
                if not path:
                    of_block.append(len(output) if isinstance(output, tuple) else 0)

            handle = module.register_forward_hook(note)
            hooks.callback(handle.remove)
        logits = model(**batch).logits
    order = [path for path, *_ in calls]
    if "" not in order:
        raise ConfigError(
            f"{name} cannot be cut into stages: it does not call its blocks as modules",
            "use --training_type accelerated",
        )
    begin = order.index("")
    token = next(path for path, module in base.named_modules() if module is base.get_input_embeddings())
    embedding = next(path for path in beside if f"{token}.".startswith(f"{path}."))
    before = [call for call in calls[:begin] if call[0] != embedding]
    return Layout(
        embedding,
        added=tuple(path for path, ids, _ in before if ids),
        front=tuple(path for path, _, hands_on in before if hands_on),
        back=tuple(path for path, _, hands_on in calls[begin + 1 :] if path and hands_on),
        returns=of_block[0],
    ), logits


def _beside(base: nn.Module, stack: str) -> dict[str, nn.Module]:
    """The modules on the way from a base model to its list of blocks that are not on it, by name."""
    children: dict[str, nn.Module] = {}
    node, at = base, ""
    for part in stack.split("."):
        children |= {at + name: child for name, child in node.named_children() if name != part}
        node, at = node.get_submodule(part), f"{at}{part}."
    return children
