"""A model's blocks through ``torch.compile``, each by itself."""

import torch
from torch import nn

from course_lib.parallel.blocks import blocks


def compile_blocks(model: nn.Module, dynamic: bool | None) -> None:
    """Compile the forward of each block, in place; names and hooks of the modules stay as they are.

    To be called before an engine wraps the model. Its gathers, frees and reductions hang on hooks of the blocks, or
    around the whole model: compiled with them, a graph would break at each. Blocks are alike, so one graph serves all
    of them and the first step waits for one compilation (torchtitan compiles so, too).

    Args:
        model: a transformer, whose blocks :func:`course_lib.parallel.blocks.blocks` finds.
        dynamic: True for graphs that serve any size; None for one that serves the sizes of the first batch, and another
            for any size if others come.
    Raises:
        ConfigError: the model has no blocks.
    """
    for block in blocks(model).values():
        block.forward = torch.compile(block.forward, dynamic=dynamic)  # type: ignore[method-assign]
