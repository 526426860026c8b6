"""A model's blocks through ``torch.compile``, each by itself."""

from collections.abc import Iterable

import torch
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module], dynamic: bool | None) -> None:
    """Compile the forward of each block, in place; names and hooks of the modules stay as they are.

    To be called before an engine wraps the model. Its gathers, frees and reductions hang on hooks of the blocks, or
    around the whole model: compiled with them, a graph would break at each. Blocks are alike, so one graph serves all
    of them and the first step waits for one compilation (torchtitan compiles so, too).

    Args:
        blocks: of a transformer, or of a pipeline's stages.
        dynamic: True for graphs that serve any size; None for one that serves the sizes of the first batch, and another
            for any size if others come.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=dynamic)  # type: ignore[method-assign]
