"""Model and optimizer as a run's files hold them, where every rank has all of both."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from course_lib.training.checkpoints import safetensors_tree, sharded
from course_lib.training.checkpoints.formats import (
    BUFFERS,
    MODEL,
    OPTIMIZER,
    check_model,
    check_optimizer,
    device_of_step,
    is_sharded,
    put_back,
)
from course_lib.training.ranks import Ranks


class StoredState:
    """Writes and reads a run's model and optimizer; every rank holds both whole.

    Args:
        ranks: of the run.
        model: the bare model, before anything is cut off it.
        frozen: names in its state dict of what no file of the run holds: the frozen weights beside adapters.

    Attributes:
        wrapped: what the engine put around the model.
        optimizer: whose state is kept.
        scaler: of the loss under fp16; None where losses are not scaled.
    """

    optimizer: Optimizer
    wrapped: Any
    scaler: GradScaler | None = None

    def __init__(self, ranks: Ranks, model: nn.Module, frozen: frozenset[str] = frozenset()):
        self.ranks, self.model, self.frozen = ranks, model, frozen

    def remember_order(self, optimizer: Optimizer) -> None:
        """Take note of the order in which an optimizer has the parameters, before an engine changes them."""

    def take(self, model: nn.Module, wrapped: Any, optimizer: Optimizer) -> None:
        """Keep what is to be stored, now that an engine has wrapped it."""
        self.model, self.wrapped, self.optimizer = model, wrapped, optimizer

    # --- files ---

    def write(self, folder: Path) -> None:
        """Store what every rank holds alike; called on the main rank."""
        safetensors_tree.save(self.stored_weights(), folder / MODEL)
        safetensors_tree.save(self.optimizer.state_dict(), folder / OPTIMIZER)

    def check(self, folder: Path) -> None:
        """Refuse a checkpoint of another model or optimizer before anything is changed.

        Raises:
            CheckpointError: with what differs.
        """
        if is_sharded(folder):
            return  # its shards are checked as they are read
        check_model(safetensors_tree.load(folder / MODEL), self.shapes(), folder)
        check_optimizer(safetensors_tree.load(folder / OPTIMIZER), self.optimizer, folder)

    def read(self, folder: Path) -> None:
        """Fill model and optimizer from a checkpoint of either form. A collective call."""
        if not is_sharded(folder):
            self.load_whole_weights(safetensors_tree.load(folder / MODEL))
            put_back(self.optimizer, safetensors_tree.load(folder / OPTIMIZER))
            return
        shapes, weights = self.shapes(), safetensors_tree.load(folder / BUFFERS)
        weights |= {name: flat.view(shapes[name]) for name, flat in sharded.whole(folder, "model/").items()}
        self.model.load_state_dict(weights, strict=False)  # a tied parameter is stored under its first name alone
        parameters = dict(self.model.named_parameters())
        for key, flat in sharded.whole(folder, "optimizer/").items():
            name, state = key.rsplit("/", 1)
            parameter = parameters[name]
            self.optimizer.state[parameter][state] = (
                flat.view(()).to(device_of_step(self.optimizer, parameter))
                if state == "step"
                else flat.view(parameter.shape).to(parameter.device)
            )

    # --- the model ---

    def bare_model(self) -> nn.Module:
        """The model without what was wrapped around it; its weights may be elsewhere."""
        return self.model

    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that this rank computes with, by their names in the whole model."""
        return dict(self.model.named_parameters())

    def parameters_by_part(self) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """:meth:`parameters` in sets, each with a number that is the same on the ranks that hold the same set."""
        return [(self.ranks.part, self.parameters())]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every tensor that a file of the run holds."""
        return {name: tuple(tensor.shape) for name, tensor in self.stored_weights().items()}

    def stored_weights(self) -> dict[str, torch.Tensor]:
        """Of the model's state dict on this rank, what a file of the run holds: all, except for ``frozen``."""
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in self.frozen}

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The model's state dict, whole except for ``frozen``, on the main rank; elsewhere nothing. Collective."""
        return self.stored_weights() if self.ranks.is_main else {}

    def load_whole_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put whole weights in, the same on every rank. A collective call."""
        held = {name: tensor for name, tensor in self.model.state_dict().items() if name in self.frozen}
        self.model.load_state_dict(held | dict(weights))

    def agreed(self) -> AbstractContextManager[None]:
        """Within it every rank has the weights that all agree on; where they train apart, a collective call."""
        return contextlib.nullcontext()

    # --- what else a checkpoint holds ---

    def extra_state(self) -> dict[str, Any]:
        """State that a checkpoint has to hold beside model, optimizer and schedule."""
        return {"scaler": self.scaler.state_dict() if self.scaler else {}}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Put :meth:`extra_state` back."""
        if self.scaler and state.get("scaler"):  # a run in another precision had none
            self.scaler.load_state_dict(state["scaler"])

    def rank_state(self) -> dict[str, Any]:
        """State that a checkpoint has to hold of this rank alone; a collective call."""
        return {}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Put :meth:`rank_state` back, after all else; empty where a checkpoint has none for these ranks."""
