"""Hooks around a module that run whoever calls it, also by ``module.forward(…)``."""

import functools
from typing import Any

from torch import nn


def run_hooks_always(module: nn.Module) -> None:
    """Let ``module.forward(…)`` do what ``module(…)`` does; to be called when its hooks are in place.

    Python runs hooks in ``__call__`` alone. A model that calls ``layer.forward(…)`` (transformers' SqueezeBERT) would
    compute with weights that nobody gathered.
    """
    own, running = module.forward, [0]

    def enter(*_: Any) -> None:
        running[0] += 1

    def leave(*_: Any) -> None:
        running[0] -= 1

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) if running[0] else module(*args, **kwargs)

    module.register_forward_pre_hook(enter, prepend=True)
    # Always: a recomputation that stops early, or an error, leaves the forward by an exception.
    module.register_forward_hook(leave, always_call=True)
    module.forward = forward  # type: ignore[method-assign]
