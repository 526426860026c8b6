"""The Hugging Face Trainer's arguments mean here what they mean there: both trainers in one process, step by step."""

import copy
import dataclasses

import numpy as np
import pytest
from torch.utils.data import Sampler
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

from course_lib.config import files as config_files
from course_lib.data.batching import GlobalBatchSampler
from course_lib.training.trainer import Trainer as OurTrainer
from tests.long_cases import some
from tests.training import quick

OWN = {
    "model": "tiny-bert",
    "dataset": "tweets",
    "max_length": 16,
    "max_train_samples": 70,
    "max_eval_samples": 8,
    "training_type": "basic",
    "device": "cpu",
    "mixed_precision": "no",
    "group_by_length": False,
    "keep_best": False,
    "tracker": "none",
}
COMMON = {
    "per_device_train_batch_size": 16,
    "weight_decay": 0.01,
    "num_train_epochs": 2,
    "seed": 3,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": "none",
}


@pytest.fixture(scope="module")
def prepared():
    """Data, and a model without dropout, whose masks would differ."""
    config = config_files.load(overrides=OWN)
    loaded, data, processor = quick.prepared(config.data, config.model, 0)
    quick.without_dropout(loaded.model)
    return loaded, data, processor


def by_step(lines):
    """Loss and learning rate of each logged step."""
    return {line["step"]: (line["loss"], line["learning_rate"]) for line in lines if "loss" in line}


def ours(prepared, folder, arguments):
    """What is logged of each step, and the steps of the evaluations."""
    loaded, data, processor = prepared
    config = config_files.load(overrides=OWN | arguments | {"output_dir": str(folder)})
    folder.mkdir()
    loaded = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
    trainer = OurTrainer(config, loaded, data, processor)
    trainer.train()
    trainer.engine.close()
    lines = quick.logged(folder)
    return by_step(lines), [line["step"] for line in lines if "loss" not in line]


class InOurOrder(Sampler):
    """All rows in the order that our sampler gives them, epoch by epoch."""

    def __init__(self, lengths, seed):
        self.sampler, self.epoch = GlobalBatchSampler(lengths, 16, seed=seed, group_by_length=False), 0

    def __iter__(self):
        self.epoch += 1
        return iter(np.concatenate(list(self.sampler.global_batches(self.epoch - 1))).tolist())

    def __len__(self):
        return len(self.sampler.lengths)


def theirs(prepared, folder, arguments):
    loaded, data, _ = prepared
    rows = {split: data.splits[split].select_columns(["input_ids", "labels"]) for split in ("train", "validation")}
    settings = TrainingArguments(output_dir=str(folder), use_cpu=True, **arguments)

    class InOrder(Trainer):
        def _get_train_sampler(self, *given):
            seed = settings.seed if settings.data_seed is None else settings.data_seed
            return InOurOrder(data.splits["train"]["length"][:], seed)

    trainer = InOrder(
        model=copy.deepcopy(loaded.model),
        args=settings,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=DataCollatorWithPadding(loaded.tokenizer),
    )
    trainer.train()
    lines = trainer.state.log_history
    return by_step(lines), [line["step"] for line in lines if "eval_loss" in line]


CASES = {
    "linear with warm-up": {"optim": "adamw_torch", "warmup_steps": 3},
    "a share of warm-up": {"warmup_steps": 0.3, "lr_scheduler_type": "cosine"},
    "constant with warm-up": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
    "cosine of one whole cycle": {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1.0}},
    "restarts": {
        "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "warmup_steps": 1,
    },
    "polynomial": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-5}},
    "inverse root": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    "least rate": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "warm-up, stable, decay": {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 2,
        "lr_scheduler_kwargs": {"num_decay_steps": 3},
    },
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "the last rows left out": {"dataloader_drop_last": True},
    "another order": {"data_seed": 11},
    "the first step logged": {"logging_first_step": True, "logging_steps": 4},
    "each epoch logged": {"logging_strategy": "epoch", "logging_steps": None},
    "evaluation waits for steps": {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 5},
    "evaluation waits for an epoch": {"eval_strategy": "epoch", "eval_delay": 2},
    "so many steps": {"max_steps": 4, "max_grad_norm": 0.5, "adam_beta2": 0.95},
}


SHORT = ("linear with warm-up", "restarts", "sgd", "the last rows left out", "each epoch logged", "so many steps")


@pytest.mark.parametrize("case", some(CASES, *SHORT, "evaluation waits for steps"))
def test_the_same_arguments_train_the_same(case, prepared, tmp_path):
    """Losses (nats) and learning rates of the same logged steps; the loss of a last, smaller batch too."""
    arguments = {name: value for name, value in (COMMON | CASES[case]).items() if value is not None}
    here, evaluated = ours(prepared, tmp_path / "ours", arguments)
    there, evaluated_there = theirs(prepared, tmp_path / "theirs", arguments)
    last = max(here)
    assert there.keys() | {last} == here.keys()
    for step, (loss, rate) in there.items():
        assert here[step] == (pytest.approx(loss, abs=2e-5), pytest.approx(rate, rel=1e-6, abs=1e-12))
    if "eval_strategy" in arguments:
        assert evaluated == evaluated_there
    if case == "the last rows left out":
        assert last == 8, "70 rows are 4 batches of 16 per epoch"


def test_the_cases_differ_from_each_other(prepared, tmp_path):
    """So that agreement says something: without its argument, each numeric case trains differently."""
    plain, _ = ours(prepared, tmp_path / "plain", COMMON)
    for case in ("linear with warm-up", "restarts", "sgd", "the last rows left out", "another order"):
        other, _ = ours(prepared, tmp_path / case.replace(" ", "-"), COMMON | CASES[case])
        assert set(other) != set(plain) or any(abs(other[step][0] - plain[step][0]) > 1e-4 for step in plain), case
