"""The plain PyTorch training loop: one process, one device, nothing hidden."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from course_lib.data.collating import moved, unpadded_rows
from course_lib.launching.interrupts import exit_code
from course_lib.modeling.masks import padding_known
from course_lib.training.frame import TrainerFrame
from course_lib.training.loss import count_targets, summed_loss
from course_lib.training.overflow import OverflowWatch
from course_lib.training.precision import pick_device

Batch = dict[str, torch.Tensor]


class BasicTrainer(TrainerFrame):
    """Trains a model on one device; see :class:`TrainerFrame` for its arguments."""

    rank, num_processes, is_main = 0, 1, True

    def connect(self) -> None:
        self.device = pick_device(self.config.run.device)

    def prepare(self) -> None:
        # fp16 gradients below 6e-8 would vanish, so the loss is scaled up (arXiv 1710.03740, section 3.2).
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.overflow = OverflowWatch()

    def train_epoch(self) -> None:
        state = self.state
        self.sampler.start_at(state.epoch, state.step_in_epoch)
        self.wrapped.train()
        batches = iter(self.train_loader)
        while not state.finished and state.step_in_epoch < state.steps_per_epoch:
            with self.phases("data"):
                micro_batches = list(itertools.islice(batches, self.sampler.accumulation))
                micro_batches = [self.to_device(batch) for batch in micro_batches]
            loss, gradient_norm = self.train_step(micro_batches)
            self.throughput.count(state, self.sampler.batches[state.step_in_epoch])
            state.step += 1
            state.step_in_epoch += 1
            self.after_step(loss, gradient_norm)
        if state.step_in_epoch == state.steps_per_epoch:
            state.epoch, state.step_in_epoch = state.epoch + 1, 0

    def train_step(self, micro_batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step over one global batch.

        The loss is the mean over all targets of the global batch: each micro-batch adds its sum
        divided by the number of targets in all of them. That gives the gradient of the large
        batch, whatever the lengths of its rows.

        Returns:
            This process's part of the mean loss, and the gradient's L2 norm before clipping.
        """
        targets = self.count_targets(micro_batches)
        total = torch.zeros((), device=self.device)
        for batch in micro_batches:
            with self.phases("forward"):
                loss = self.loss(batch, targets, len(micro_batches))
            with self.phases("backward"):
                self.scaler.scale(loss).backward()
            total += loss.detach()
        with self.phases("optimizer"):
            self.settle()
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            with self.overflow.watching(self.scaler):
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
            self.stepped(knows_at_once=not self.scaler.is_enabled())
        return total, norm

    unsettled = False

    def stepped(self, knows_at_once: bool) -> None:
        """An optimizer step was made, or skipped: move the learning rate on, as soon as it is known which."""
        self.unsettled = True
        if knows_at_once:
            self.settle()

    def settle(self) -> None:
        """Move the learning rate on for the last step, unless it was skipped.

        Under fp16 the GPU decides that. Asked right after the step the host would have to wait for it; asked before the
        next step, when the GPU has been given the next batch already, it waits for nothing but what is done.
        """
        if self.unsettled:
            self.unsettled = False
            if not self.step_was_skipped:
                self.scheduler.step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step found an overflow under fp16 and left the weights alone."""
        return self.overflow.skipped()

    def loss(self, batch: Batch, targets: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """A micro-batch's share of the loss of the global batch.

        With ``loss_weighting: micro_batch`` it is the naive share, the micro-batch's own mean over
        their number, which gives a target in a short micro-batch more weight than one in a long.
        """
        with self.autocast(), padding_known(unpadded_rows(batch)):
            logits = self.wrapped(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        total = summed_loss(logits, batch["labels"], self.task)
        if self.config.run.loss_weighting == "token":
            return total / targets
        return total / count_targets(batch["labels"], self.task).clamp(min=1) / micro_batches

    def count_targets(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Targets in the whole global batch, a scalar."""
        return torch.stack([count_targets(batch["labels"], self.task) for batch in micro_batches]).sum()

    def to_device(self, batch: Batch) -> Batch:
        """The batch on this trainer's device."""
        return moved(batch, self.device)

    @property
    def max_grad_norm(self) -> float:
        """Norm to clip to; infinity where clipping is off."""
        return self.config.optim.max_grad_norm or float("inf")

    def engine_state(self) -> dict[str, Any]:
        """State of the loss scaler, for the checkpoint."""
        return {"scaler": self.scaler.state_dict()}

    def load_engine_state(self, state: dict[str, Any]) -> None:
        """Put :meth:`engine_state` back."""
        self.scaler.load_state_dict(state["scaler"])

    def gather(self, tensors: Any) -> Any:
        return tensors

    def sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def from_main(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors

    def bare_model(self) -> nn.Module:
        """The model without what an engine wrapped around it; its weights may be elsewhere."""
        return self.model

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        """Let the engine end its part of the run."""

    def asked_to_stop(self, waited: bool) -> int:
        return exit_code(self.stop_request.vote)
