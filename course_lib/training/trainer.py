"""The trainer: one loop for one process and for many; what differs between ways of training is in its engine."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from course_lib.config import Config
from course_lib.data.batching import (
    GlobalBatchSampler,
    StreamSteps,
    end_workers,
    layout,
    stream_loader,
    training_loader,
)
from course_lib.data.cache import column
from course_lib.data.processing import DataProcessor, ProcessedData
from course_lib.data.streaming import TextStream
from course_lib.errors import ConfigError
from course_lib.launching import interrupts
from course_lib.launching.interrupts import StopRequest, stop_requests
from course_lib.modeling.inputs import padding_known, unpadded_rows
from course_lib.modeling.loading import LoadedModel
from course_lib.parallel.clock import Clock, Phases, Stopwatch
from course_lib.training.after_step import AfterStep
from course_lib.training.callbacks.base import Callback, EarlyStopping, JsonLinesLog, ProgressBar
from course_lib.training.callbacks.expert_load import ExpertLoad
from course_lib.training.checkpoints import resuming, saving, second_start
from course_lib.training.cpu_kernels import use_fast_kernels
from course_lib.training.loss import count_targets, summed_loss
from course_lib.training.optimization import make_scheduler
from course_lib.training.router_loss import RouterLoss
from course_lib.training.session import Batch, Session
from course_lib.training.state import TrainState
from course_lib.training.throughput import Throughput


class Trainer(Session):
    """Trains a model on the processes that its engine joins.

    Args:
        config: the run.
        loaded: model and tokenizer.
        data: tokenized splits; ``train`` is needed, ``validation`` is evaluated during training.
        processor: made ``data``, and makes its batches.
        callbacks: users' own code, called after the trainer's.

    What a session that trains has, callbacks see; see :class:`~course_lib.training.session.Session`.
    """

    def __init__(
        self,
        config: Config,
        loaded: LoadedModel,
        data: ProcessedData,
        processor: DataProcessor,
        callbacks: Iterable[Callback] = (),
    ):
        super().__init__(config, loaded, data, processor)
        self.architecture = second_start.architecture(loaded.model.config)
        self.sampler = self._sampler()
        train_loader = self._train_loader()
        steps = self.sampler.steps_per_epoch
        self.state = TrainState(
            steps_per_epoch=steps, max_steps=config.run.max_steps or max(1, round(config.run.num_epochs * steps))
        )
        self.changes = []
        self.callbacks = [*self._own_callbacks(loaded), *callbacks]

        if self.cpu_kernels == "fast":
            use_fast_kernels(loaded.model)
        self.compose(loaded, trains=True)
        coefficient = config.optim.router_aux_loss_coef
        self.router_loss = RouterLoss(self.engine.model, coefficient) if coefficient else None
        self.optimizer, self.train_loader = self.engine.optimizer, self.ranks.deal(train_loader)
        self.scheduler = make_scheduler(self.optimizer, config.optim, self.state.max_steps)
        self.learning_rate, self._unsettled, self.has_gone_on = 0.0, False, False

        self.throughput = Throughput(
            self.sampler.lengths,
            loaded.model.config,
            self.task,
            self.device,
            self.precision,
            adapters=bool(self.stored.frozen),
        )
        self.clock, self.stop_request = Clock(self.device), StopRequest()
        self.phases = Phases(self.clock)
        self.saver = saving.Saver(self)
        self.after_step = AfterStep(self, self.saver, self.settle)
        self.votes: torch.Tensor

    def _own_callbacks(self, loaded: LoadedModel) -> list[Callback]:
        """What is told of each step before users' callbacks are."""
        patience = self.config.run.early_stopping_patience
        return [
            ExpertLoad(loaded.model.config.model_type),
            ProgressBar(),
            JsonLinesLog(self.output_dir / "metrics.jsonl"),
            *([EarlyStopping(patience)] if patience else []),
        ]

    def _train_loader(self) -> Any:
        """The loader of all ranks' training batches, not dealt out yet."""
        if isinstance(self.sampler, StreamSteps):
            return stream_loader(self.sampler.stream, self.collator, self.workers, self.pins)
        rows = self.data.splits["train"]
        return training_loader(rows, self.sampler, self.collator, self.workers, self.pins, self.rank)

    def _sampler(self) -> GlobalBatchSampler | StreamSteps:
        run, ranks = self.config.run, self.ranks.data_ranks
        rows, accumulation, rest = run.batch_size, run.gradient_accumulation_steps, 0
        if run.split_batches:
            rows, rest = divmod(run.batch_size, ranks)
        if rest or not rows:
            raise ConfigError(
                f"batch_size {run.batch_size} cannot be split over {ranks} processes", f"use a multiple of {ranks}"
            )
        if run.global_batch_size:
            rows, accumulation = layout(run.global_batch_size, ranks, run.batch_size)
        if self.data.shards is not None and self.data.make_rows is not None:
            stream = TextStream(
                self.data.shards,
                self.data.make_rows,
                window=self.config.data.stream_window,
                seed=run.seed if run.data_seed is None else run.data_seed,
                rank=self.ranks.place.dp,
                world_size=ranks,
                batch_size=rows,
                accumulation=accumulation,
                global_batch_size=run.global_batch_size,
                drop_last=run.drop_last,
                endless=True,
            )
            return StreamSteps(stream, run.max_steps or 0)
        sampler = GlobalBatchSampler(
            column(self.data.splits["train"], "length"),
            rows,
            ranks,
            accumulation,
            run.seed,
            self.config.data.group_by_length,
            run.global_batch_size,
            order_seed=run.data_seed,
            drop_last_batch=run.drop_last,
        )
        if not sampler.steps_per_epoch:
            raise ConfigError(
                f"drop_last leaves out all {len(sampler.lengths)} training rows, which fill no batch "
                f"of {sampler.global_batch_size}",
                "leave it out, or lower batch_size",
            )
        return sampler

    def go_on(self) -> None:
        """Read the checkpoint that the config names, if it names one, unless that is done.

        Raises:
            CheckpointError: there is no whole one, or it is of a run that this config cannot go on with.
        """
        if self.config.output.resume_from_checkpoint and not self.has_gone_on:
            resuming.resume(self)
        self.has_gone_on = True

    def train(self) -> TrainState:
        """Run to the end, from the checkpoint that the config names, if it names one.

        Raises:
            TrainingDiverged: a loss or gradient is not finite; the last good checkpoint is kept.
            TrainingInterrupted: Ctrl-C, SIGTERM or SIGUSR1; a checkpoint was written first.
        """
        self.go_on()
        if self.is_main:
            interrupts.remove_note(self.output_dir)
        begun: list[Callback] = []
        with stop_requests() as self.stop_request:
            try:
                for callback in self.callbacks:
                    self.tell("on_train_begin", to=[callback])
                    begun.append(callback)
                self.throughput.agree(self.ranks.gather_objects)
                self.stopwatch = Stopwatch()
                while not self.state.finished:
                    self.train_epoch()
                self.clock.settle()
                self.after_step.count_seconds()
                if "validation" in self.eval_loaders and self.state.evaluated_at != self.state.step:
                    self.after_step.validate()
                self.saver.load_best()
                self.saver.wait()
            finally:
                self.saver.let_end()
                end_workers(self.train_loader)
                self.tell("on_train_end", to=begun)
        return self.state

    def train_epoch(self) -> None:
        """Step to the end of the epoch or of the run."""
        state = self.state
        if isinstance(self.sampler, StreamSteps):
            self.sampler.stream.load_state_dict(state.stream or {})
        else:
            self.sampler.start_at(state.epoch, state.step_in_epoch)
        self.wrapped.train()
        batches = iter(self.train_loader)
        while not state.finished and state.step_in_epoch < state.steps_per_epoch:
            with self.phases("data"):
                micro_batches = list(itertools.islice(batches, self.sampler.accumulation))
                micro_batches = [self.ranks.to_device(batch) for batch in micro_batches]
            loss, gradient_norm = self.train_step(micro_batches)
            if isinstance(self.sampler, StreamSteps):
                state.stream = self.sampler.place_after(micro_batches)
            else:
                self.throughput.count(state, self.sampler.batches[state.step_in_epoch])
            state.step += 1
            state.step_in_epoch += 1
            self.after_step(loss, gradient_norm, self.stop_request.vote, self.votes)
        if state.step_in_epoch == state.steps_per_epoch:
            state.epoch, state.step_in_epoch = state.epoch + 1, 0

    def train_step(self, micro_batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step over one global batch.

        The loss is the mean over all targets of the global batch: each micro-batch of each process adds its sum
        divided by the number of targets in all of them. That gives the gradient of the large batch, whatever the
        lengths of its rows.

        Returns:
            This process's part of the mean loss, and the gradient's L2 norm before clipping.
        """
        engine, targets = self.engine, self.count_targets(micro_batches)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches, start=1):
            if engine.has_schedule:  # forward and backward of a pipeline's stages take turns
                with self.phases("pipeline"):
                    total += engine.run_schedule(batch, 1 / self.divisor(batch, targets, len(micro_batches)))
                continue
            last = number == len(micro_batches)
            with engine.accumulating(last):  # gradients add up; with the last micro-batch the ranks exchange them
                with self.phases("forward"):
                    loss = whole = self.loss(batch, targets, len(micro_batches))
                    if self.router_loss is not None:  # not in the loss that is logged, which is the model's
                        whole = loss + self.router_loss.share(batch, engine.sequences, self.ranks) / len(micro_batches)
                with self.phases("backward"):
                    engine.backward(whole, last)
            total += loss.detach()
        with self.phases("optimizer"):
            self.settle()
            norm = engine.clip(self.config.optim.max_grad_norm or float("inf"))
            self.learning_rate = self.optimizer.param_groups[0]["lr"]  # the schedule moves on before it is logged
            engine.update()
            engine.zero_grad()
            self._unsettled = True
        return self.ranks.own_part(total), norm

    def loss(self, batch: Batch, targets: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """A micro-batch's share of the loss of the global batch: summed over its targets, divided by those of all."""
        with self.engine.autocast(), padding_known(unpadded_rows(batch)):
            inputs, labels = self.engine.sequences.cut(batch)
            logits = self.wrapped(**inputs).logits
        loss = summed_loss(logits, labels, self.engine.sequences.scored_as, self.config.optim.label_smoothing_factor)
        return loss / self.divisor(batch, targets, micro_batches)

    def divisor(self, batch: Batch, targets: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """Divisor of a micro-batch's summed loss: the targets of the global batch.

        With ``loss_weighting: micro_batch`` it is the naive way, the micro-batch's own mean over the number of
        micro-batches, which gives a target in a short micro-batch more weight than one in a long.
        """
        if self.config.run.loss_weighting == "token":
            return targets
        own = count_targets(batch["labels"], self.task).clamp(min=1)
        return own * micro_batches * self.ranks.data_ranks

    def count_targets(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Targets in the whole global batch, a scalar; the same reduction carries whether anyone was asked to stop."""
        own = torch.stack([count_targets(batch["labels"], self.task) for batch in micro_batches]).sum()
        own_vote = torch.full_like(own, self.stop_request.vote)  # filled in there: a copy would wait for the device
        numbers = [self.ranks.counted_once(own), own_vote]
        if isinstance(self.sampler, StreamSteps):  # of whose rows a rank knows its own alone
            numbers += self.ranks.counted_once(self.sampler.counts(micro_batches).to(self.device))
        targets, self.votes, *streamed = self.ranks.sum(torch.stack(numbers))
        self.throughput.streamed += [torch.stack(streamed)] if streamed else []
        return targets

    def settle(self) -> None:
        """Move the learning rate on for the last step, unless it was skipped.

        Under fp16 the GPU decides that. Asked right after the step the host would have to wait for it; asked before the
        next step, when the GPU has been given the next batch already, it waits for nothing but what is done.
        """
        if self._unsettled:
            self._unsettled = False
            if not self.engine.step_was_skipped:
                self.scheduler.step()
