"""``--communication``: the course's own data parallelism that sends less each step, or only now and then."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from course_lib.config import Config
from course_lib.config.parallel import CommunicationConfig
from course_lib.parallel.communication.diloco import DiLoCo, plain_sum
from course_lib.parallel.communication.hooks import StatefulHook
from course_lib.parallel.communication.local_sgd import LocalSGD, LocalTraining
from course_lib.parallel.communication.power_sgd import PowerSGD
from course_lib.parallel.communication.quantized_all_reduce import QuantizedAllReduce
from course_lib.parallel.communication.top_k import TopK
from course_lib.training.checkpoints.formats import put_back
from course_lib.training.checkpoints.stored_state import StoredState
from course_lib.training.engines.from_scratch import ScratchDDP
from course_lib.training.ranks import Ranks

QUANTIZATION_BLOCK = 256
"""Elements that share a scale in int8 and int4."""


class CompressingState(StoredState):
    """Whole state, and of each rank what its hook remembers."""

    hook: Any

    def rank_state(self) -> dict[str, Any]:
        return {"hook": self.hook.state_dict()} if isinstance(self.hook, StatefulHook) else {}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        if isinstance(self.hook, StatefulHook) and state:
            self.hook.load_state_dict({name: tensor.to(self.ranks.device) for name, tensor in state["hook"].items()})


class Compressing(ScratchDDP):
    """A gradient of fewer bytes each step; what a hook remembers is saved for every rank."""

    stored_class = CompressingState

    def __init__(self, config: Config, ranks: Ranks):
        super().__init__(config, ranks)
        self.hook = make_hook(config.communication)

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().wrap(model, optimizer)
        self.stored.hook = self.hook

    def describe(self) -> Mapping[str, Any]:
        return {**super().describe(), "communication": self.config.communication.communication}


class LocalState(StoredState):
    """The weights that all agreed on, and of each rank its own."""

    wrapped: LocalTraining

    def agreed(self) -> AbstractContextManager[None]:
        return self.wrapped.agreed()

    def whole_weights(self) -> dict[str, torch.Tensor]:
        with self.agreed():
            return {name: tensor.clone() for name, tensor in super().whole_weights().items()}

    def load_whole_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load_whole_weights(weights)
        self.wrapped.adopt()

    def rank_state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "local": self.wrapped.state_dict_of_rank(),
        }

    def load_rank_state(self, state: dict[str, Any]) -> None:
        if not state:
            return self.wrapped.adopt()
        self.model.load_state_dict(state["model"])
        put_back(self.optimizer, state["optimizer"])
        device = self.ranks.device
        self.wrapped.load_state_dict_of_rank({name: tensor.to(device) for name, tensor in state["local"].items()})


class Local(ScratchDDP):
    """Ranks that train by themselves between two agreements: weights and optimizer states are different on each."""

    stored_class = LocalState
    trains_apart = True
    by_ddp = False
    wrapped: LocalTraining

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        how = self.config.communication
        if how.communication == "local_sgd":
            self.wrapped = LocalSGD(model, sync_every=how.sync_every, group=None)
        else:
            self.wrapped = DiLoCo(
                model,
                sync_every=how.sync_every,
                outer_lr=how.outer_lr,
                outer_momentum=how.outer_momentum,
                group=None,
                sum_over_ranks=plain_sum,
            )

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def clip(self, max_norm: float) -> torch.Tensor:
        """Each rank clips by its own gradient's norm; gives the root mean square of all, the same on each."""
        square = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).square()
        dist.all_reduce(square)  # four bytes: were one rank's not finite, all have to stop
        return (square / self.ranks.num_processes).sqrt()

    def update(self) -> None:
        self.optimizer.step()
        self.wrapped.after_step()

    def describe(self) -> Mapping[str, Any]:
        return {**super().describe(), "communication": self.config.communication.communication}


def make_hook(how: CommunicationConfig) -> PowerSGD | TopK | QuantizedAllReduce:
    """The communication hook that a config names."""
    if how.communication == "powersgd":
        return PowerSGD(how.powersgd_rank, error_feedback=how.error_feedback)
    if how.communication == "topk":
        return TopK(how.topk_density, error_feedback=how.error_feedback)
    return QuantizedAllReduce({"int8": 8, "int4": 4}[how.communication], QUANTIZATION_BLOCK)
