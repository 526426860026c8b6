"""What every engine does, and the plain one: DDP through Accelerate."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch import nn
from torch.optim import Optimizer

from course_lib.config import Config
from course_lib.errors import ConfigError
from course_lib.parallel.sharding import Shard
from course_lib.training.engines import process_group
from course_lib.training.overflow import OverflowWatch
from course_lib.training.precision import autocast, pick_device, pick_precision
from course_lib.training.unwrapping import deepspeed_left_alone, take_back_forward


class Engine:
    """Distributed data parallel through Accelerate, and the face of every other engine.

    Attributes:
        accelerator: joins the ranks; made by :meth:`connect`.
        model: the bare model.
        wrapped: what the forward pass calls.
        optimizer: the torch optimizer whose groups the learning-rate schedule moves.
        shards_state: whether a rank holds only a part, so that checkpoints are written in pieces.
        casts: whether the engine itself computes in the low precision, parameters and activations: autocast besides
            would give float32 between the matrix products, and cast at each of them.
    """

    shards_state = False
    needs_group = False
    """Whether one process, too, has to have a process group."""
    casts = False
    accelerator: Accelerator
    model: nn.Module
    wrapped: nn.Module
    optimizer: Optimizer

    def __init__(self, config: Config):
        self.config, self.strategy = config, config.parallel.strategy

    def connect(self) -> None:
        """Join the ranks.

        Raises:
            ConfigError: this machine cannot run the engine; the reason, and what to do.
        """
        device = pick_device(self.config.run.device)
        if device.type == "cuda":
            process_group.use_own_gpu()
        precision = pick_precision(self.config.run.mixed_precision, device)
        self.refuse(device, precision)
        with self.environment(), process_group.group_of_one() if self.needs_group else contextlib.nullcontext():
            options = {"cpu": device.type == "cpu"} | self.plugins(device, precision)
            options["kwargs_handlers"] = [process_group.process_group(device, self.config.guard.watchdog),
                                          *options.get("kwargs_handlers", ())]
            self.accelerator = Accelerator(mixed_precision=precision, **options,
                                           dataloader_config=DataLoaderConfiguration(non_blocking=True))

    def refuse(self, device: torch.device, precision: str) -> None:
        """Raise ConfigError for what the engine cannot do on that device."""
        if self.config.parallel.offload != "none" and device.type == "cpu":
            raise ConfigError("offload moves state off a GPU, and this run is on the CPU", "use --offload none")
        if self.shards_state and precision == "fp16" and self.config.parallel.chosen_engine != "deepspeed":
            raise ConfigError(f"fp16 needs a scaler that knows the shards of {self.strategy}",
                              "use --mixed_precision bf16, or --engine deepspeed")

    def environment(self) -> AbstractContextManager[None]:
        """Environment variables that the accelerator is made under."""
        return contextlib.nullcontext()

    def plugins(self, device: torch.device, precision: str) -> dict[str, Any]:
        """Further arguments of the accelerator."""
        # static_graph stays off: it spares the search for unused parameters, which is off as well, its first backward
        # sends nothing before its end, and a first backward under no_sync it does not survive.
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        if self.config.parallel.bucket_mb is not None:
            ddp.bucket_cap_mb = self.config.parallel.bucket_mb  # type: ignore[assignment]
        return {"kwargs_handlers": [ddp]}

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Take the model, on its device, and its optimizer, which has made no step."""
        self.model, self.optimizer = model, optimizer
        self.wrapped, self.scaled_optimizer = self.accelerator.prepare(model, optimizer)
        self.overflow = OverflowWatch()
        take_back_forward(model)

    def autocast(self, precision: str) -> AbstractContextManager:
        """What the forward pass runs under."""
        return autocast("no" if self.casts else precision, self.accelerator.device)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; gradients travel with the last alone."""
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.wrapped)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of a micro-batch's loss; the mean over the ranks counts."""
        self.accelerator.backward(loss)

    def step(self, max_norm: float) -> torch.Tensor:
        """Clip to a global L2 norm, update, and clear the gradients; gives the norm before clipping."""
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), max_norm)
        with self.overflow.watching(self.accelerator.scaler):
            self.scaled_optimizer.step()
        self.scaled_optimizer.zero_grad()
        return norm

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step found an overflow under fp16 and left the weights alone."""
        return self.overflow.skipped()

    @property
    def knows_at_once(self) -> bool:
        """Whether :attr:`step_was_skipped` answers without waiting for the GPU."""
        return self.accelerator.scaler is None

    def bare_model(self) -> nn.Module:
        """The model without what was wrapped around it; its weights may be elsewhere."""
        with deepspeed_left_alone():
            return self.accelerator.unwrap_model(self.wrapped, keep_fp32_wrapper=False)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The model's state dict, whole, on the main rank; elsewhere nothing. A collective call."""
        return self.model.state_dict() if self.accelerator.is_main_process else {}

    def load_whole_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put whole weights in, the same on every rank. A collective call."""
        self.model.load_state_dict(weights)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every tensor of the model's state dict."""
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    # What follows is for engines that shard state.

    trained_names: list[str]
    """Names of the trained parameters, in the order of the optimizer's groups."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that a state dict holds, the same on every rank."""
        raise NotImplementedError

    def load_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Put :meth:`buffers` back."""
        raise NotImplementedError

    def pieces(self) -> dict[str, Shard]:
        """This rank's piece of every parameter, by name, whose data may be overwritten."""
        raise NotImplementedError

    def optimizer_pieces(self) -> dict[str, Shard]:
        """This rank's piece of every tensor of optimizer state, by ``parameter/state``."""
        raise NotImplementedError

    def prepare_optimizer_pieces(self, states: Mapping[str, int]) -> dict[str, Shard]:
        """Room for the optimizer's state before its first step.

        Args:
            states: number of elements by ``parameter/state``, as a checkpoint holds them.
        """
        raise NotImplementedError

    def refresh(self) -> None:
        """Bring the new contents of the pieces to where forward pass and optimizer read them. A collective call."""
        raise NotImplementedError

    def resident(self) -> dict[str, list[torch.Tensor]] | None:
        """Tensors of model state now on this rank, by kind; None where module and optimizer show them."""
        return None

    def state(self) -> dict[str, Any]:
        """What else a checkpoint has to hold."""
        scaler = self.accelerator.scaler
        return {"scaler": scaler.state_dict() if scaler else {}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Put :meth:`state` back."""
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])
