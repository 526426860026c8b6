"""Checks of a module's wrapper: ranks agree on it, it stays as it was; and hooks that always run.

A collective over tensors that differ in shape hangs, or mixes one parameter's numbers into another's, without a word.
"""

import functools
import hashlib
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from course_lib.errors import ModelError
from course_lib.parallel.sharding import names_of


def check_ranks_agree(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compare names, shapes, dtypes and requires_grad of parameters and buffers; a collective call.

    One digest a rank travels; the descriptions themselves only where the digests differ.

    Raises:
        ModelError: on every rank, with the first rank that differs from the group's first, and where.
    """
    # --- phase 1: 64 characters per rank, however many parameters there are ---
    mine = _descriptions(module)
    ranks = dist.get_world_size(group)
    digests = [""] * ranks
    dist.all_gather_object(digests, hashlib.sha256(repr(mine).encode()).hexdigest(), group=group)
    if len(set(digests)) == 1:
        return
    # --- phase 2: they differ, which every rank knows, so that all come here: find out where ---
    every: list[dict[str, str]] = [{}] * ranks
    dist.all_gather_object(every, mine, group=group)
    odd = next(rank for rank in range(ranks) if digests[rank] != digests[0])
    first, other = (dist.get_global_rank(group, rank) if group is not None else rank for rank in (0, odd))
    raise ModelError(
        f"rank {other}'s model is not rank {first}'s: {_difference(every[0], every[odd])}",
        "build the same model on every rank",
    )


def _descriptions(module: nn.Module) -> dict[str, str]:
    """Each parameter and buffer in words, by name, in module order."""
    described = {
        name: f"parameter {tuple(weight.shape)} {weight.dtype}{'' if weight.requires_grad else ' frozen'}"
        for name, weight in module.named_parameters()
    }
    return described | {name: f"buffer {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in module.named_buffers()}


def _difference(first: dict[str, str], other: dict[str, str]) -> str:
    """The first of two models' differences."""
    for name in [*first, *other]:
        if first.get(name) != other.get(name):
            return f"`{name}` is {other.get(name, 'missing')}, and was to be {first.get(name, 'absent')}"
    return f"the order of the parameters: {', '.join(other)}, and was to be {', '.join(first)}"


def check_kinds(module: nn.Module, wrapper: str, *, flat: bool = True) -> None:
    """Refuse parameters that cannot lie in a flat buffer, and gradients that cannot be summed in one.

    Args:
        module: to be wrapped.
        wrapper: what would wrap it, for the message.
        flat: whether the parameters themselves, not only gradients, come to lie in buffers.
    Raises:
        ModelError: embeddings with sparse gradients; with ``flat``, complex parameters, or none at all.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise ModelError(
                f"the gradient of `{name}.weight` is sparse, and {wrapper} sums dense ones",
                "make the embedding with sparse=False, or use torch's DistributedDataParallel",
            )
    if not flat:
        return
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ModelError(
            f"{type(module).__name__} has no parameters, and {wrapper} would share nothing out",
            "wrap a model that has some",
        )
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ModelError(
                f"parameter `{name}` is complex, and {wrapper} adds up real numbers",
                "use DataParallel, or two real parameters with torch.view_as_complex",
            )


class UnchangedModule:
    """Notices that a wrapped module is not the one that was wrapped: its gradients would not be reduced any more.

    Args:
        module: as it is wrapped.
        wrapper: what wraps it, for the message.
    """

    def __init__(self, module: nn.Module, wrapper: str):
        self._module, self._wrapper = module, wrapper
        self._names = names_of(module)
        self._states = self._state()

    def is_unchanged(self) -> bool:
        """Compare with what was wrapped; cheap, for each forward, and no communication."""
        return self._state() == self._states

    def refuse(self) -> None:
        """Say what has changed.

        Raises:
            ModelError: a parameter added, removed, replaced, frozen or unfrozen, or of another shape, dtype or device.
        """
        states, names = self._state(), names_of(self._module)
        for parameter, name in names.items():
            if parameter not in self._names:
                self._refuse(name, "was replaced" if name in self._names.values() else "was added")
            before, now = self._states[id(parameter)], states[id(parameter)]
            if before[0] != now[0]:
                self._refuse(name, "was unfrozen" if now[0] else "was frozen")
            if before != now:
                self._refuse(name, "got another shape, dtype or device")
        for parameter, name in self._names.items():
            if parameter not in names:
                self._refuse(name, "was removed")

    def _state(self) -> dict[int, tuple]:
        # By identity: a parameter that was replaced by an equal one has no hook, and its gradient would not be sent.
        return {id(p): (p.requires_grad, p.dtype, p.device, p.shape) for p in self._module.parameters()}

    def _refuse(self, name: str, what: str) -> NoReturn:
        raise ModelError(
            f"parameter `{name}` {what} after the model was wrapped by {self._wrapper}",
            "change the model first, then wrap it",
        )


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
