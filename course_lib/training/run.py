"""One run from its config to its summary: data, model, training, evaluation, baselines, files."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from course_lib import modeling
from course_lib.config import Config
from course_lib.config.learning import AdapterConfig
from course_lib.data import DataConnector, DataProcessor, TextData
from course_lib.data.cache import progress_bars
from course_lib.data.class_names import Classes
from course_lib.errors import DataError, TrainingInterrupted
from course_lib.launching import launch_environment
from course_lib.launching.determinism import PROMISE, deterministic
from course_lib.modeling import lora, nf4
from course_lib.modeling.loading import LoadedModel
from course_lib.system import machine
from course_lib.system.seeding import seed_everything
from course_lib.training import baselines, launchfiles
from course_lib.training.callbacks.base import Callback
from course_lib.training.callbacks.guards import guards
from course_lib.training.callbacks.monitoring import monitors
from course_lib.training.callbacks.tracking import TrackingCallback
from course_lib.training.checkpoints import checkpoint, model_folder, run_folder
from course_lib.training.precision import hint
from course_lib.training.session import Session
from course_lib.training.trainer import Trainer


def build_trainer(config: Config, callbacks: Iterable[Callback] = ()) -> tuple[Trainer, TextData]:
    """Load the data and the model that a config names, and make the trainer for them."""
    text = DataConnector(config.data, config.run.seed).load()
    seed_everything(config.run.seed)
    loaded = load_base(config, text)
    if config.adapter.lora_r is not None:
        adapt(loaded, config.adapter, config.run.seed)
    processor = DataProcessor(config.data, loaded.tokenizer, max_positions=loaded.max_positions)
    trainer = Trainer(config, loaded, processor.process(text), processor, callbacks)
    return trainer, text


def load_base(config: Config, text: TextData) -> LoadedModel:
    """The model that a config names, for its data, before anything is put beside its weights."""
    return modeling.load(
        config.model,
        config.data.task,
        label_names=text.label_names,
        texts=text.training_texts,
        seed=config.run.seed,
        max_length=config.data.max_length,
    )


def adapt(loaded: LoadedModel, adapter: AdapterConfig, seed: int) -> None:
    """Freeze a model's weights, in 4 bits where asked for, and put adapters beside them, in place.

    Modules whose weights are new, a head's above all, are trained whole.
    """
    assert adapter.lora_r is not None
    if adapter.load_in_4bit:
        nf4.quantize_linear(loaded.model, lora.linear_layers(loaded.model))
    lora.add_lora(
        loaded.model, adapter.lora_r, adapter.lora_alpha, adapter.lora_dropout, adapter.targets, loaded.new, seed=seed
    )


def train(config: Config, callbacks: Iterable[Callback] = ()) -> dict[str, Any]:
    """Train as the config says, and leave config, metrics, checkpoints, model and summary in its folder.

    Called by every rank; returns the summary on each.

    Raises:
        CourseError: whatever the user can mend.
    """
    with deterministic(config.run.deterministic):
        return _train(config, callbacks)


def _train(config: Config, callbacks: Iterable[Callback]) -> dict[str, Any]:
    is_main = launch_environment.discover().rank == 0
    if is_main:
        run_folder.check(config)
    with run_folder.held(config.output_dir) if is_main else contextlib.nullcontext():
        try:
            return _trained(config, callbacks, is_main)
        except KeyboardInterrupt as stopped:
            if not stopped.args:  # before training, or after it: nothing to go on with
                raise
            number, kept = signal.Signals(stopped.args[0]), checkpoint.in_order(config.output_dir)
            raise TrainingInterrupted(
                f"stopped at once by a second {number.name}; "
                + (f"the last checkpoint is {kept[-1]}" if kept else "there is no checkpoint"),
                "go on with --resume_from_checkpoint auto",
                128 + number,
            ) from None


def _trained(config: Config, callbacks: Iterable[Callback], is_main: bool) -> dict[str, Any]:
    started = time.perf_counter()
    tracking = TrackingCallback(config)
    with progress_bars(config.run.progress_bar):
        trainer, text = build_trainer(config, [*callbacks, *guards(config), *monitors(config), tracking])
    trainer.go_on()  # a checkpoint that the config cannot go on from leaves the folder as it was
    if is_main:
        run_folder.claim(config)
        launchfiles.write(config, trainer.precision, trainer.num_processes, trainer.model)
    if line := hint(config, trainer.device):
        trainer.say(line)
    if config.run.deterministic:
        trainer.say(PROMISE[trainer.device.type])
    trainer.ranks.barrier()
    ready = time.perf_counter()
    trainer.train()
    split = "test" if "test" in trainer.eval_loaders else "validation"
    scores = trainer.evaluate(split, intervals=True)
    summary = _summary(trainer, text) | {"eval": {"split": split, **scores}}
    weights = trainer.stored.whole_weights()
    tracking.conclude(trainer, scores, split, text.splits[split]["text"])
    # The last that the ranks do together. What the main rank does from here on may take its time: nobody waits for it
    # in a collective, whose backend would end the waiting ranks after a while.
    trainer.engine.close()
    if is_main and config.run.baselines:
        summary["baselines"] = score_baselines(config, text, split)
    seconds = {"until_training": round(ready - started, 3), "total": round(time.perf_counter() - started, 3)}
    summary["seconds"] = seconds
    if is_main:
        base = model_folder.base_folder(config, trainer.origin, lambda: load_base(config, text))
        model_folder.write_model(
            config.output_dir / run_folder.MODEL,
            trainer.stored.bare_model(),
            weights,
            trainer.tokenizer,
            model_folder.model_card(config, summary, trainer.source, base),
            base,
            config.model.revision,
        )
        run_folder.write_summary(config, summary)
    tracking.finish(trainer, config.output_dir / run_folder.MODEL)
    return summary


def _summary(trainer: Trainer, text: TextData) -> dict[str, Any]:
    """What a run's summary says of a training that has ended; a collective call."""
    config, state = trainer.config, trainer.state
    memory = trainer.ranks.gather_objects(machine.peak_memory_bytes(trainer.device))
    return {
        "training_type": config.run.training_type,
        "strategy": strategy_of(config, trainer.num_processes),
        "engine": config.parallel.chosen_engine,
        "world_size": trainer.num_processes,
        "device": str(trainer.device.type),
        "mixed_precision": trainer.precision,
        "tf32": trainer.tf32,
        "cpu_kernels": trainer.cpu_kernels,
        "threads": torch.get_num_threads(),
        "data": {
            "name": text.name,
            "source": text.source,
            "notes": list(trainer.data.notes),
            "rows": {name: len(rows) for name, rows in text.splits.items()},
            "splits": {name: facts.as_dict() for name, facts in trainer.data.facts.items()},
        },
        "eval": {},
        "best": {"metric": trainer.best_metric, "value": state.best_value, "step": state.best_step},
        "baselines": {},
        "train": _progress(trainer),
        "memory": {"peak_bytes": memory},
        **trainer.engine.describe(),
        "seconds": {},
        "versions": {name: machine.version(name) for name in machine.ENGINES},
        "git_revision": run_folder.git_revision(),
        "model_dir": str(config.output_dir / run_folder.MODEL),
    }


def _progress(trainer: Trainer) -> dict[str, Any]:
    """Steps, rows, speed and loss of a training that has ended."""
    state = trainer.state
    rates = trainer.throughput.rates(state, trainer.num_processes)
    return {
        "steps": state.step,
        "epochs": state.epochs_done,
        "samples": state.samples,
        "tokens": state.tokens,
        **{name: rates.get(name) for name in ("samples_per_second", "tokens_per_second", "mfu")},
        "mfu_note": trainer.throughput.note,
        "seconds": round(state.seconds, 3),
        "final_loss": state.last_loss,
        "global_batch_size": trainer.sampler.global_batch_size,
        "phases": dict(trainer.phases.seconds),
        "changes": trainer.changes,
    }


def strategy_of(config: Config, num_processes: int) -> str:
    """The strategy, or ``single`` where one process ran without any."""
    strategy = config.parallel.strategy
    return "single" if num_processes == 1 and strategy == "ddp" else strategy


def score_baselines(config: Config, text: TextData, split: str) -> dict[str, dict[str, Any]]:
    """Scores of the majority class and of TF-IDF with logistic regression on the same rows."""
    if config.data.task != "classification":
        return {}
    train_rows, rows = text.splits["train"], text.splits[split]
    labels, wanted = list(train_rows["label"]), list(rows["label"])
    assert text.label_names
    return {
        "majority_class": baselines.majority_class(labels, wanted, len(text.label_names)),
        "tfidf_logistic_regression": baselines.tfidf_logistic_regression(
            list(train_rows["text"]), labels, list(rows["text"]), wanted
        ),
    }


def evaluate(config: Config, split: str) -> dict[str, Any]:
    """Score a trained model on one split of a data set, on every rank there is.

    Raises:
        DataError: the split is not there, or a class of the data is none of the model's.
        ModelError: the folder holds no trained model for the task.
    """
    with deterministic(config.run.deterministic):
        return _evaluate(config, split)


def _evaluate(config: Config, split: str) -> dict[str, Any]:
    loaded = modeling.load_trained(Path(config.model.model), config.data.task)
    text = DataConnector(config.data, config.run.seed).load()
    if split not in text.splits:
        raise DataError(f"{text.name} has no split `{split}`", f"choose from {', '.join(text.splits)}")
    if config.data.task == "classification":
        text = with_labels_of(text, loaded.model.config.label2id)
    processor = DataProcessor(config.data, loaded.tokenizer, max_positions=loaded.max_positions)
    config = config.replace(cpu_kernels="torch")  # the fast ones are for training, and so is their setting of malloc
    session = Session(config, loaded, processor.process(text), processor)
    session.compose(loaded, trains=False)
    scores = session.evaluate(split, intervals=True)
    session.engine.close()
    return {
        "model": config.model.model,
        "dataset": text.name,
        "split": split,
        **scores,
        "world_size": session.num_processes,
        "notes": [f"{split}: {session.data.facts[split].line(split)}", *session.data.notes],
    }


def with_labels_of(text: TextData, label2id: dict[str, int]) -> TextData:
    """The same rows, their classes numbered as the model numbers them."""
    assert text.label_names
    known = Classes(dict.fromkeys(label2id, 1))
    by_key = {known.key(name): number for name, number in label2id.items()}
    numbers = [label2id.get(name, by_key.get(known.key(name))) for name in text.label_names]
    if None in numbers:
        raise DataError(
            f"class `{text.label_names[numbers.index(None)]}` of {text.name} is none of the model's "
            f"({', '.join(label2id)})",
            "evaluate on data with the model's classes",
        )
    with progress_bars(False):
        splits = text.splits.map(lambda rows: {"label": [numbers[label] for label in rows["label"]]}, batched=True)
    return dataclasses.replace(text, splits=splits, label_names=tuple(sorted(label2id, key=label2id.__getitem__)))
