"""What every trainer does around its steps: log, evaluate, keep the best, save, stop.

A trainer says how to connect, prepare, step and join its processes (:mod:`interface`; :class:`BasicTrainer` for one,
and those built on it for several); this frame does the rest, alike for all.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from course_lib.config import Config
from course_lib.data.batching import (
    GlobalBatchSampler,
    end_workers,
    evaluation_loader,
    layout,
    training_loader,
    workers,
)
from course_lib.data.cache import column
from course_lib.data.processing import DataProcessor, ProcessedData
from course_lib.errors import EXIT_RESUME, ConfigError, TrainingDiverged, TrainingInterrupted
from course_lib.launching import interrupts
from course_lib.launching.interrupts import StopRequest, stop_requests
from course_lib.metering.phases import Phases, Stopwatch
from course_lib.modeling.loading import LoadedModel
from course_lib.parallel.clock import Clock
from course_lib.system.seeding import seed_everything
from course_lib.training.callbacks.base import Callback, EarlyStopping, JsonLinesLog, ProgressBar
from course_lib.training.checkpoints import checkpoint, resuming, safetensors_tree
from course_lib.training.compiling import compile_blocks
from course_lib.training.cpu_kernels import pick_kernels, use_fast_kernels
from course_lib.training.evaluation import evaluate_split, evaluating, larger_is_better
from course_lib.training.interface import TrainerInterface
from course_lib.training.optimization import make_optimizer, make_scheduler
from course_lib.training.precision import pick_precision, use_tf32
from course_lib.training.state import TrainState
from course_lib.training.throughput import Throughput


class TrainerFrame(TrainerInterface):
    """The part of a trainer that is the same for all of them.

    Args:
        config: the run.
        loaded: model and tokenizer.
        data: tokenized splits; ``train`` is needed, ``validation`` is evaluated during training.
        processor: made ``data``, and makes its batches.
        callbacks: users' own code, called after the trainer's.

    Attributes:
        model: the bare ``nn.Module``, whose weights are saved.
        wrapped: what the forward pass calls; the model itself, or an engine around it.
        state: progress, see :class:`TrainState`.
        phases: seconds by phase.
        cpu_kernels: ``torch`` or ``fast``; None where the device is no CPU.
        throughput: rows, tokens and FLOPs, and what they are of the hardware's peak.
    """

    def __init__(self, config: Config, loaded: LoadedModel, data: ProcessedData, processor: DataProcessor,
                 callbacks: Iterable[Callback] = ()):
        self.config, self.data = config, data
        self.model, self.tokenizer, self.source = loaded.model, loaded.tokenizer, loaded.source
        self.output_dir, self.task = config.output_dir, data.task
        self.num_labels = len(data.label_names) if data.label_names else None
        self.best_metric = config.run.best_metric or ("macro_f1" if self.num_labels else "loss")
        self.connect()
        seed_everything(config.run.seed, self.rank)
        self.precision = pick_precision(config.run.mixed_precision, self.device)
        self.tf32 = use_tf32(config.run.tf32, self.precision, self.device)
        self.cpu_kernels = pick_kernels(config, self.device)
        self.sampler = self._sampler()
        pin = config.data.pin_memory and self.device.type == "cuda"
        collator = processor.collator(self.device.type)
        helpers = workers(config.data.num_workers, self.device.type, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.train_loader = training_loader(data.splits["train"], self.sampler, collator, helpers, pin, self.rank)
        self.eval_loaders = {
            split: evaluation_loader(rows, config.run.eval_batch_size, collator, config.run.seed, helpers, pin)
            for split, rows in data.splits.items() if split != "train"
        }
        steps = self.sampler.steps_per_epoch
        self.state = TrainState(steps_per_epoch=steps,
                                max_steps=config.run.max_steps or max(1, round(config.run.num_epochs * steps)))
        if self.cpu_kernels == "fast":
            use_fast_kernels(self.model)
        self.model = self.take_part(self.model).to(self.device)
        patience = config.run.early_stopping_patience
        self.callbacks: list[Callback] = [ProgressBar(), JsonLinesLog(self.output_dir / "metrics.jsonl")]
        self.callbacks += ([EarlyStopping(patience)] if patience else []) + list(callbacks)
        self.tell("on_connect")
        if config.model.torch_compile:
            compile_blocks(self.model, dynamic=None if config.data.has_one_length else True)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.wrapped: nn.Module = self.model
        self.prepare()
        self.scheduler = make_scheduler(self.optimizer, config.optim, self.state.max_steps)
        self.throughput = Throughput(self.sampler.lengths, loaded.model.config, self.task, self.device, self.precision)
        self.clock, self.stop_request = Clock(self.device), StopRequest()
        self.phases = Phases(self.clock)
        self.pending: list[torch.Tensor] = []
        self.first_bad_step = torch.zeros((), dtype=torch.long, device=self.device)

    def _sampler(self) -> GlobalBatchSampler:
        run = self.config.run
        rows, accumulation, rest = run.batch_size, run.gradient_accumulation_steps, 0
        if run.split_batches:
            rows, rest = divmod(run.batch_size, self.data_ranks)
        if rest or not rows:
            raise ConfigError(f"batch_size {run.batch_size} cannot be split over {self.data_ranks} processes",
                              f"use a multiple of {self.data_ranks}")
        if run.global_batch_size:
            rows, accumulation = layout(run.global_batch_size, self.data_ranks, run.batch_size)
        return GlobalBatchSampler(column(self.data.splits["train"], "length"), rows, self.data_ranks, accumulation,
                                  run.seed, self.config.data.group_by_length, run.global_batch_size)

    def train(self) -> TrainState:
        """Run to the end, from the checkpoint that the config names, if it names one.

        Raises:
            TrainingDiverged: a loss or gradient is not finite; the last good checkpoint is kept.
            TrainingInterrupted: Ctrl-C, SIGTERM or SIGUSR1; a checkpoint was written first.
        """
        if self.config.output.resume_from_checkpoint:
            resuming.resume(self)
        if self.is_main:
            interrupts.remove_note(self.output_dir)
        begun: list[Callback] = []
        with stop_requests() as self.stop_request:
            try:
                for callback in self.callbacks:
                    self.tell("on_train_begin", to=[callback])
                    begun.append(callback)
                self.throughput.agree(self.gather_objects)
                self.stopwatch = Stopwatch()
                while not self.state.finished:
                    self.train_epoch()
                self.clock.settle()
                self.count_seconds()
                if "validation" in self.eval_loaders and self.state.evaluated_at != self.state.step:
                    self.validate()
                self.load_best()
                self.checkpoints_written()
            finally:
                self.let_checkpoints_end()
                end_workers(self.train_loader)
                self.tell("on_train_end", to=begun)
        return self.state

    def after_step(self, loss: torch.Tensor, gradient_norm: torch.Tensor) -> None:
        """Watch, log, evaluate, save and stop: whatever is due after an optimizer step.

        Args:
            loss: this process's part of the mean loss, a scalar.
            gradient_norm: L2 norm of the whole gradient, the same on every process.
        """
        state, config = self.state, self.config
        self.pending.append(loss)
        # An overflow under fp16 is no divergence: the scaler skips that step and lowers its scale.
        watched = self.sum_over_processes(loss.clone()) if self.precision == "fp16" else gradient_norm
        bad = (self.first_bad_step == 0) & ~torch.isfinite(watched)
        self.first_bad_step = torch.where(bad, state.step, self.first_bad_step)
        logs = state.step % config.run.logging_steps == 0 or state.finished
        evaluates = self.is_due(config.run.eval_steps) and "validation" in self.eval_loaders
        saves = self.is_due(config.output.save_steps)
        waits = logs or evaluates or saves or self.device.type == "cpu"
        if waits:  # on a GPU not after every step: the device would run out of work meanwhile
            self.check_finite()
            self.count_seconds()
        self.tell("on_step_end")
        if logs:
            self.log(gradient_norm)
        if evaluates:
            with self.stopwatch.stopped():
                self.validate()
        code = self.asked_to_stop(waits)
        if code and not waits:
            self.check_finite()
            self.count_seconds()
        if saves or code:
            with self.stopwatch.stopped():
                self.save_checkpoint()
        if code:
            self.checkpoints_written()
            if self.is_main and code == EXIT_RESUME:
                interrupts.leave_note(self.output_dir, state.step)
            raise TrainingInterrupted(f"interrupted at step {state.step}; a checkpoint is in {self.output_dir}",
                                      "go on with --resume_from_checkpoint auto", code)

    def is_due(self, every: int | None) -> bool:
        """Whether what is done every so many steps (None: each epoch; 0: never) is due after this step."""
        if every is None:
            return self.state.step_in_epoch == self.state.steps_per_epoch or self.state.finished
        return every > 0 and self.state.step % every == 0

    def check_finite(self) -> None:
        """Wait for the device; raise TrainingDiverged, on all processes, where a step so far was not finite."""
        if step := int(self.first_bad_step):
            self.checkpoints_written()
            kept = checkpoint.in_order(self.output_dir)
            raise TrainingDiverged(
                f"the loss or its gradient is not a finite number at step {step}; "
                + (f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint before it"),
                "lower --learning_rate, clip with --max_grad_norm, or look at the data of that step")

    def count_seconds(self) -> None:
        """Bring ``state.seconds`` and the phases up to date; the device has to have been waited for."""
        self.state.seconds += self.stopwatch.lap()
        self.phases.settle()

    def collect_losses(self) -> None:
        """Bring the losses of the steps since the last log together, into ``state.window``."""
        if self.pending:
            self.state.window += self.sum_over_processes(torch.stack(self.pending)).tolist()
            self.pending.clear()

    def log(self, gradient_norm: torch.Tensor) -> None:
        """Report the steps since the last line."""
        self.settle()
        self.collect_losses()
        state = self.state
        state.last_loss = sum(state.window) / len(state.window)
        state.window = []
        self.tell("on_log", {
            "step": state.step, "epoch": state.epochs_done, "loss": state.last_loss,
            "learning_rate": self.optimizer.param_groups[0]["lr"], "gradient_norm": float(gradient_norm),
            **self.throughput.rates(state, self.num_processes), "seconds": round(state.seconds, 3)})

    def evaluate(self, split: str) -> dict[str, float]:
        """Metrics over every row of a split, the same on every process."""
        with evaluating(self.wrapped):
            return evaluate_split(self.wrapped, self.eval_loaders[split], self.task, self.num_labels,
                                  device=self.device, precision=self.autocast(), gather=self.gather,
                                  scores=self.scores)

    def validate(self) -> None:
        """Evaluate on the validation split, and keep the weights where they are the best so far."""
        metrics, state = self.evaluate("validation"), self.state
        state.evaluated_at = state.step
        value, sign = metrics[self.best_metric], 1 if larger_is_better(self.best_metric) else -1
        if state.best_value is None or sign * value > sign * state.best_value:
            state.best_value, state.best_step, state.evaluations_since_best = value, state.step, 0
            if self.config.run.keep_best:
                self.save_best()
        else:
            state.evaluations_since_best += 1
        self.tell("on_evaluate", metrics)
        self.tell("on_log", {"step": state.step, "epoch": state.epochs_done}
                  | {f"eval.{name}": value for name, value in metrics.items()})

    @property
    def best_file(self) -> Path:
        """Weights of the best evaluation so far."""
        return self.output_dir / "best.safetensors"

    def save_best(self) -> None:
        """Write the weights beside their place and rename."""
        weights = self.whole_weights()
        if self.is_main:
            beside = self.best_file.with_name(f".{self.best_file.name}.writing")
            with checkpoint.saving(str(self.best_file)):
                try:
                    safetensors_tree.save(weights, beside)
                    os.replace(beside, self.best_file)
                finally:
                    beside.unlink(missing_ok=True)
        self.barrier()

    def load_best(self) -> None:
        """Put back the weights of the best evaluation, where they are not those that stand."""
        if self.config.run.keep_best and self.state.best_step not in (None, self.state.step):
            # The main rank alone has written it, and machines may share no disk.
            self.load_whole_weights(self.from_main(safetensors_tree.load(self.best_file) if self.is_main else {}))

    def save_checkpoint(self) -> None:
        """Write a checkpoint of this step, and delete those beyond save_total_limit."""
        self.settle()
        self.collect_losses()
        self.put_checkpoint(lambda folder: resuming.write_files(self, folder))
        self.tell("on_save", self.output_dir / checkpoint.name(self.state.step))

    def put_checkpoint(self, write_files: Callable[[Path], None]) -> None:
        """Write the checkpoint of this step. A collective call."""
        checkpoint.write(self.output_dir, self.state.step, write_files, is_main=self.is_main, barrier=self.barrier)
        if self.is_main:
            checkpoint.prune(self.output_dir, self.config.output.save_total_limit)

    def say(self, line: str) -> None:
        """Print one line, on the main rank."""
        if self.is_main:
            print(line, flush=True)

    def tell(self, hook: str, *arguments: Any, to: Sequence[Callback] | None = None) -> None:
        """Call one hook of every callback, or of those given."""
        for callback in self.callbacks if to is None else to:
            getattr(callback, hook)(self, *arguments)
