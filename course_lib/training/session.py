"""One run on its ranks: engine, data, model, progress and files, as trainer, callbacks and checkpoints share them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from course_lib.config import Config
from course_lib.data.batching import GlobalBatchSampler, StreamSteps, evaluation_loader, workers
from course_lib.data.processing import DataProcessor, ProcessedData
from course_lib.hangs.desync import digest_of
from course_lib.modeling.loading import LoadedModel
from course_lib.modeling.lora import frozen_names
from course_lib.parallel.clock import Clock, Phases, Stopwatch
from course_lib.system.seeding import seed_everything
from course_lib.training.cpu_kernels import pick_kernels
from course_lib.training.engines import build_engine, process_group
from course_lib.training.engines.base import StepEngine
from course_lib.training.engines.compose import compose
from course_lib.training.evaluation import evaluate_split, evaluating
from course_lib.training.precision import use_tf32
from course_lib.training.router_loss import RouterLoss
from course_lib.training.state import TrainState
from course_lib.training.throughput import Throughput

Batch = dict[str, torch.Tensor]


class Session:
    """Evaluates a model on the ranks of its engine; a :class:`~course_lib.training.trainer.Trainer` also trains it.

    Args:
        config: the run.
        loaded: model and tokenizer.
        data: tokenized splits; all but ``train`` can be evaluated.
        processor: made ``data``, and makes its batches.

    Attributes:
        engine: wraps the model and makes the steps, as ``training_type``, ``strategy`` and ``engine`` say.
        ranks: the processes, and what they say to each other.
        model: the bare ``nn.Module``, or this rank's part of it.
        wrapped: what the forward pass calls; the model itself, or what the engine put around it.
        stored: model and optimizer as files hold them.
        origin: folder or Hub name of the weights that training began with; None where they are nowhere else.
        cpu_kernels: ``torch`` or ``fast``; None where the device is no CPU.
        base: a digest of the frozen weights beside adapters; None where there are none.
    """

    # --- of a session that trains ---
    state: TrainState
    """Progress."""
    sampler: GlobalBatchSampler | StreamSteps
    optimizer: Optimizer
    scheduler: LambdaLR
    learning_rate: float
    """Of the last step."""
    changes: list[dict[str, Any]]
    """What each resumed part of the run was told other than the part before: the ``step`` after which it began, and
    ``changed``, values by option as [before, from then on]."""
    train_step: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """One optimizer step over micro-batches; gives this process's part of the loss, and the gradient's norm."""
    router_loss: RouterLoss | None
    """Auxiliary loss of the model's routers, where one is asked for."""
    clock: Clock
    """Of the device."""
    phases: Phases
    """Seconds by phase."""
    stopwatch: Stopwatch
    """Seconds of the steps; stopped while they wait for something else."""
    throughput: Throughput
    """Rows, tokens and FLOPs, and what they are of the hardware's peak."""

    architecture: dict[str, Any]
    """The model's config as plain values."""

    base: int | None = None

    def __init__(self, config: Config, loaded: LoadedModel, data: ProcessedData, processor: DataProcessor):
        self.config, self.data = config, data
        self.callbacks: list[Any] = []  # of class Callback, whose hooks take a session
        self.tokenizer, self.source, self.origin = loaded.tokenizer, loaded.source, loaded.base
        self.output_dir, self.task = config.output_dir, data.task
        self.num_labels = len(data.label_names) if data.label_names else None
        self.best_metric = config.run.best_metric or ("macro_f1" if self.num_labels else "loss")
        self.best_file: Path = self.output_dir / "best.safetensors"

        self.engine: StepEngine = build_engine(config)
        self.ranks = ranks = self.engine.ranks
        self.rank, self.num_processes, self.is_main = ranks.rank, ranks.num_processes, ranks.is_main
        self.device, self.precision = ranks.device, ranks.precision
        seed_everything(config.run.seed, ranks.random_stream)
        self.tf32 = use_tf32(config.run.tf32, self.precision, self.device)
        self.cpu_kernels = pick_kernels(config, self.device)

        self.collator = processor.collator(self.device.type)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.workers = workers(config.data.num_workers, self.device.type, here)
        self.pins = config.data.pin_memory and self.device.type == "cuda"
        self.eval_loaders: dict[str, Any] = {
            split: evaluation_loader(
                rows, config.run.eval_batch_size, self.collator, config.run.seed, self.workers, self.pins
            )
            for split, rows in data.splits.items()
            if split != "train"
        }

    def compose(self, loaded: LoadedModel, *, trains: bool) -> None:
        """Lay the model out over the ranks, with an optimizer if it ``trains``; deal the rows to evaluate out."""
        frozen = [loaded.model.get_parameter(name).detach().flatten() for name in sorted(frozen_names(loaded.model))]
        self.base = digest_of(frozen) if frozen else None
        compose(self.engine, loaded.model, self._before_wrapping, trains=trains)
        process_group.have_patience(self.config.guard.watchdog)
        self.model, self.wrapped = self.engine.model, self.engine.wrapped
        self.eval_loaders = {split: self.ranks.deal(loader) for split, loader in self.eval_loaders.items()}

    def _before_wrapping(self) -> None:
        """Let callbacks look at this rank's share of the model."""
        self.model, self.stored = self.engine.model, self.engine.stored
        self.tell("on_connect")

    def evaluate(
        self, split: str, intervals: bool = False, gather: Callable[[Any], Any] | None = None
    ) -> dict[str, Any]:
        """Metrics over every row of a split, the same on every process; with their 95 % intervals if asked for.

        Args:
            split: its name.
            intervals: add ``interval95``.
            gather: brings the ranks' scores together in place of ``ranks.gather``.
        """
        with self.stored.agreed(), evaluating(self.wrapped):
            return evaluate_split(
                self.wrapped,
                self.eval_loaders[split],
                self.task,
                self.num_labels,
                device=self.device,
                precision=self.engine.autocast(),
                gather=gather or self.ranks.gather,
                scores=self.engine.scores,
                with_intervals=intervals,
            )

    def say(self, line: str) -> None:
        """Print one line, on the main rank."""
        if self.is_main:
            print(line, flush=True)

    def tell(self, hook: str, *arguments: Any, to: Sequence[Any] | None = None) -> None:
        """Call one hook of every callback, or of those given."""
        for callback in self.callbacks if to is None else to:
            getattr(callback, hook)(self, *arguments)
