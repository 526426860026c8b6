"""The trainer: one loop for one process and for many; what differs between ways of training is in its engine."""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from course_lib.config import Config
from course_lib.data.batching import (
    GlobalBatchSampler,
    StreamSteps,
    end_workers,
    evaluation_loader,
    layout,
    stream_loader,
    training_loader,
    workers,
)
from course_lib.data.cache import column
from course_lib.data.collating import unpadded_rows
from course_lib.data.processing import DataProcessor, ProcessedData
from course_lib.data.streaming import TextStream
from course_lib.errors import ConfigError
from course_lib.hangs.desync import digest_of
from course_lib.launching import interrupts
from course_lib.launching.interrupts import StopRequest, stop_requests
from course_lib.metering.phases import Phases, Stopwatch
from course_lib.modeling.loading import LoadedModel
from course_lib.modeling.lora import frozen_names
from course_lib.modeling.masks import padding_known
from course_lib.parallel.clock import Clock
from course_lib.system.seeding import seed_everything
from course_lib.training import after_step
from course_lib.training.callbacks.base import Callback, EarlyStopping, JsonLinesLog, ProgressBar
from course_lib.training.callbacks.expert_load import ExpertLoad
from course_lib.training.checkpoints import resuming, saving, second_start
from course_lib.training.cpu_kernels import pick_kernels, use_fast_kernels
from course_lib.training.engines import build_engine, process_group
from course_lib.training.engines.compose import compose
from course_lib.training.evaluation import evaluate_split, evaluating
from course_lib.training.loss import count_targets, summed_loss
from course_lib.training.optimization import make_scheduler
from course_lib.training.precision import use_tf32
from course_lib.training.router_loss import RouterLoss
from course_lib.training.state import TrainState
from course_lib.training.throughput import Throughput

Batch = dict[str, torch.Tensor]


class Trainer:
    """Trains a model on the processes that its engine joins.

    Args:
        config: the run.
        loaded: model and tokenizer.
        data: tokenized splits; ``train`` is needed, ``validation`` is evaluated during training.
        processor: made ``data``, and makes its batches.
        callbacks: users' own code, called after the trainer's.

    Attributes:
        engine: wraps the model, carries the gradients and holds the state, as ``training_type``, ``strategy`` and
            ``engine`` say; see :mod:`course_lib.training.engines`.
        model: the bare ``nn.Module``, whose weights are saved.
        wrapped: what the forward pass calls; the model itself, or what the engine put around it.
        state: progress, see :class:`TrainState`.
        origin: folder or Hub name of the weights that training began with; None where they are nowhere else.
        base: a digest of the frozen weights beside adapters; None where there are none.
        changes: what each resumed part of the run was told other than the part before: the ``step`` after which it
            began, and ``changed``, values by option as [before, from then on].
        phases: seconds by phase.
        cpu_kernels: ``torch`` or ``fast``; None where the device is no CPU.
        throughput: rows, tokens and FLOPs, and what they are of the hardware's peak.
    """

    def __init__(
        self,
        config: Config,
        loaded: LoadedModel,
        data: ProcessedData,
        processor: DataProcessor,
        callbacks: Iterable[Callback] = (),
    ):
        self.config, self.data = config, data
        self.tokenizer, self.source, self.origin = loaded.tokenizer, loaded.source, loaded.base
        self.output_dir, self.task = config.output_dir, data.task
        self.architecture = second_start.architecture(loaded.model.config)
        self.num_labels = len(data.label_names) if data.label_names else None
        self.best_metric = config.run.best_metric or ("macro_f1" if self.num_labels else "loss")
        self.best_file = self.output_dir / "best.safetensors"

        self.engine = engine = build_engine(config)
        engine.connect()
        self.rank, self.num_processes, self.is_main = engine.rank, engine.num_processes, engine.is_main
        self.device, self.precision = engine.device, engine.precision
        seed_everything(config.run.seed, engine.random_stream)
        self.tf32 = use_tf32(config.run.tf32, self.precision, self.device)
        self.cpu_kernels = pick_kernels(config, self.device)

        self.sampler: GlobalBatchSampler | StreamSteps = self._sampler()
        pin = config.data.pin_memory and self.device.type == "cuda"
        collator = processor.collator(self.device.type)
        helpers = workers(config.data.num_workers, self.device.type, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if isinstance(self.sampler, StreamSteps):
            self.train_loader = stream_loader(self.sampler.stream, collator, helpers, pin)
        else:
            self.train_loader = training_loader(data.splits["train"], self.sampler, collator, helpers, pin, self.rank)
        self.eval_loaders = {
            split: evaluation_loader(rows, config.run.eval_batch_size, collator, config.run.seed, helpers, pin)
            for split, rows in data.splits.items()
            if split != "train"
        }
        steps = self.sampler.steps_per_epoch
        self.state = TrainState(
            steps_per_epoch=steps, max_steps=config.run.max_steps or max(1, round(config.run.num_epochs * steps))
        )

        if self.cpu_kernels == "fast":
            use_fast_kernels(loaded.model)
        self.changes: list[dict[str, Any]] = []
        patience = config.run.early_stopping_patience
        self.callbacks: list[Callback] = [
            ExpertLoad(loaded.model.config.model_type),
            ProgressBar(),
            JsonLinesLog(self.output_dir / "metrics.jsonl"),
        ]
        self.callbacks += ([EarlyStopping(patience)] if patience else []) + list(callbacks)
        frozen = [loaded.model.get_parameter(name).detach().flatten() for name in sorted(frozen_names(loaded.model))]
        self.base = digest_of(frozen) if frozen else None
        compose(engine, loaded.model, self.before_wrapping)
        coefficient = config.optim.router_aux_loss_coef
        self.router_loss = RouterLoss(engine.model, coefficient) if coefficient else None
        process_group.have_patience(config.guard.watchdog)
        self.model, self.wrapped, self.optimizer = engine.model, engine.wrapped, engine.optimizer
        self.train_loader = engine.deal(self.train_loader)
        self.eval_loaders = {split: engine.deal(loader) for split, loader in self.eval_loaders.items()}
        self.scheduler = make_scheduler(self.optimizer, config.optim, self.state.max_steps)

        self.throughput = Throughput(
            self.sampler.lengths,
            loaded.model.config,
            self.task,
            self.device,
            self.precision,
            adapters=bool(engine.frozen),
        )
        self.clock, self.stop_request = Clock(self.device), StopRequest()
        self.phases = Phases(self.clock)
        self.saver = saving.Saver(self)
        self.pending: list[torch.Tensor] = []
        self.votes: torch.Tensor
        self.learning_rate, self.first_update = 0.0, 0
        self.first_bad_step = torch.zeros((), dtype=torch.long, device=self.device)
        self.unsettled = self.has_gone_on = False

    def before_wrapping(self) -> None:
        """Let callbacks look at this rank's share of the model."""
        self.model = self.engine.model
        self.tell("on_connect")

    def _sampler(self) -> GlobalBatchSampler | StreamSteps:
        run, ranks = self.config.run, self.engine.data_ranks
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
                rank=self.engine.place.dp,
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
                self.throughput.agree(self.engine.gather_objects)
                self.stopwatch = Stopwatch()
                while not self.state.finished:
                    self.train_epoch()
                self.clock.settle()
                after_step.count_seconds(self)
                if "validation" in self.eval_loaders and self.state.evaluated_at != self.state.step:
                    after_step.validate(self)
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
                micro_batches = [self.engine.to_device(batch) for batch in micro_batches]
            loss, gradient_norm = self.train_step(micro_batches)
            if isinstance(self.sampler, StreamSteps):
                state.stream = self.sampler.place_after(micro_batches)
            else:
                self.throughput.count(state, self.sampler.batches[state.step_in_epoch])
            state.step += 1
            state.step_in_epoch += 1
            after_step.do_what_is_due(self, loss, gradient_norm)
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
                        whole = loss + self.router_loss.share(batch, engine) / len(micro_batches)
                with self.phases("backward"):
                    engine.backward(whole, last)
            total += loss.detach()
        with self.phases("optimizer"):
            self.settle()
            norm = engine.clip(self.config.optim.max_grad_norm or float("inf"))
            self.learning_rate = self.optimizer.param_groups[0]["lr"]  # the schedule moves on before it is logged
            engine.update()
            engine.zero_grad()
            self.unsettled = True
            if engine.knows_at_once:
                self.settle()
        return engine.own_part(total), norm

    def loss(self, batch: Batch, targets: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """A micro-batch's share of the loss of the global batch: summed over its targets, divided by those of all."""
        with self.engine.autocast(), padding_known(unpadded_rows(batch)):
            inputs, labels = self.engine.sequences.cut(batch)
            logits = self.wrapped(**inputs).logits
        loss = summed_loss(logits, labels, self.engine.sequences.scored_as, self.config.optim.label_smoothing_factor)
        return loss / self.divisor(batch, targets, micro_batches)

    def divisor(self, batch: Batch, targets: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """What a micro-batch's summed loss is divided by: the targets of the global batch.

        With ``loss_weighting: micro_batch`` it is the naive way, the micro-batch's own mean over the number of
        micro-batches, which gives a target in a short micro-batch more weight than one in a long.
        """
        if self.config.run.loss_weighting == "token":
            return targets
        own = count_targets(batch["labels"], self.task).clamp(min=1)
        return own * micro_batches * self.engine.data_ranks

    def count_targets(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Targets in the whole global batch, a scalar; the same reduction carries whether anyone was asked to stop."""
        own = torch.stack([count_targets(batch["labels"], self.task) for batch in micro_batches]).sum()
        own_vote = torch.full_like(own, self.stop_request.vote)  # filled in there: a copy would wait for the device
        numbers = [self.engine.counted_once(own), own_vote]
        if isinstance(self.sampler, StreamSteps):  # of whose rows a rank knows its own alone
            numbers += self.engine.counted_once(self.sampler.counts(micro_batches).to(self.device))
        targets, self.votes, *streamed = self.engine.sum(torch.stack(numbers))
        self.throughput.streamed += [torch.stack(streamed)] if streamed else []
        return targets

    def settle(self) -> None:
        """Move the learning rate on for the last step, unless it was skipped.

        Under fp16 the GPU decides that. Asked right after the step the host would have to wait for it; asked before the
        next step, when the GPU has been given the next batch already, it waits for nothing but what is done.
        """
        if self.unsettled:
            self.unsettled = False
            if not self.engine.step_was_skipped:
                self.scheduler.step()

    def evaluate(self, split: str, intervals: bool = False) -> dict[str, Any]:
        """Metrics over every row of a split, the same on every process; with their 95 % intervals if asked for."""
        with self.engine.agreed(), evaluating(self.wrapped):
            return evaluate_split(
                self.wrapped,
                self.eval_loaders[split],
                self.task,
                self.num_labels,
                device=self.device,
                precision=self.engine.autocast(),
                gather=self.engine.gather,
                scores=self.engine.scores,
                with_intervals=intervals,
            )

    def say(self, line: str) -> None:
        """Print one line, on the main rank."""
        if self.is_main:
            print(line, flush=True)

    def tell(self, hook: str, *arguments: Any, to: Sequence[Callback] | None = None) -> None:
        """Call one hook of every callback, or of those given."""
        for callback in self.callbacks if to is None else to:
            getattr(callback, hook)(self, *arguments)
