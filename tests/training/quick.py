"""A training that is over in seconds."""

import copy
import dataclasses
import functools
import json
from unittest import mock

import torch

from course_lib import modeling
from course_lib.config import build
from course_lib.data import DataConnector, DataProcessor
from course_lib.system.seeding import seed_everything
from course_lib.training import run
from course_lib.training.engines.base import StepEngine
from course_lib.training.trainer import Trainer

QUICK = {
    "model": "tiny-gpt2",
    "max_train_samples": 64,
    "max_eval_samples": 8,
    "max_length": 32,
    "eval_steps": 0,
    "save_steps": 0,
    "device": "cpu",
    "mixed_precision": "no",
    "progress_bar": False,
    "baselines": False,
    "batch_size": 4,
    "tracker": "none",
    "keep_best": False,
}


@functools.lru_cache(maxsize=8)
def prepared(data, model, seed):
    """The untrained model, its data and their processor, made once in a module."""
    text = DataConnector(data, seed).load()
    options = {"label_names": text.label_names, "texts": text.training_texts, "max_length": data.max_length}
    loaded = modeling.load(model, data.task, seed=seed, **options)
    processor = DataProcessor(data, loaded.tokenizer, max_positions=loaded.max_positions)
    return loaded, processor.process(text), processor


def trainer_of(config, callbacks=()):
    """A trainer of a copy of that model, on the ranks that are here."""
    loaded, data, processor = prepared(config.data, config.model, config.run.seed)
    loaded = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
    seed_everything(config.run.seed)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    return Trainer(config, loaded, data, processor, callbacks)


def train(folder, callbacks=(), **options):
    """Train on the ranks that are here as the command line does; their process group stays, for the next training."""
    with mock.patch.object(StepEngine, "close", lambda engine: engine.ranks.barrier()):
        return run.train(build(QUICK | {"output_dir": str(folder)} | options), callbacks)


def without_dropout(model):
    """Whose random numbers are each rank's own."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def logged(folder):
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    """Those that a run logged."""
    return [line["loss"] for line in logged(folder) if "loss" in line]
