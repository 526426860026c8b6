"""Evaluation on real ranks gives the single process's figures, over every row once; the usual short cuts do not."""

import dataclasses
import functools
import math
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import accuracy_score, f1_score
from torch.nn.functional import cross_entropy

from course_lib.config import build
from course_lib.lessons.evaluation import reference_metrics
from course_lib.training import run as runs
from course_lib.training.engines import compose
from course_lib.training.engines.base import StepEngine
from course_lib.training.evaluation import ClassificationCounts
from course_lib.training.trainer import Trainer
from tests.ranks import on_ranks
from tests.training import quick


@pytest.fixture(scope="module", autouse=True)
def narrow_presets():
    """The usual ones: rows are told apart by their losses."""


MODELS = {"classification": "tiny-bert", "causal_lm": "tiny-gpt2", "masked_lm": "tiny-bert"}
UNEVEN, DEGENERATE = (37, 8), (5, 8)  # rows and rows in a batch: 37 and 5 share no factor with 2, 3 or 4
CASES = [(task, split) for task in MODELS for split in (UNEVEN, DEGENERATE)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """So little work is done sooner by one thread, here and in every rank."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


OPTIONS = quick.QUICK | {"max_length": 16, "max_train_samples": 400, "max_eval_samples": 40}


@functools.cache
def ingredients(task):
    """Config, model, rows and processor: a new model, its weights enlarged so that rows get unlike answers."""
    config = build(OPTIONS | {"task": task, "model": MODELS[task]})
    loaded, data, processor = quick.prepared(config.data, config.model, 0)
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)
    rows = data.splits["validation"].select(range(UNEVEN[0]))
    if task == "causal_lm":  # blocks are all of one length; rows of unlike lengths have unlike numbers of targets
        cut = [ids[: 4 + i % 13] for i, ids in enumerate(rows["input_ids"])]
        rows = datasets.Dataset.from_dict({"input_ids": cut, "length": [len(ids) for ids in cut]})
    data = dataclasses.replace(data, splits={"train": data.splits["train"], "validation": rows})
    return config, loaded, data, processor


def trainer_for(case, training_type):
    task, (num_rows, batch_size) = case
    config, loaded, data, processor = ingredients(task)
    splits = data.splits | {"validation": data.splits["validation"].select(range(num_rows))}
    config = config.replace(eval_batch_size=batch_size, training_type=training_type)
    return Trainer(config, loaded, dataclasses.replace(data, splits=splits), processor)


def row_by_row(case):
    """The oracle: one row at a time, without loaders, padding, gathering or code of the trainers."""
    trainer = trainer_for(case, "basic")
    trainer.model.eval()
    loader = trainer.eval_loaders["validation"]
    rows = []
    for key in loader.sampler:
        batch = loader.collate_fn([loader.dataset[key]])
        with torch.inference_mode():
            logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0]
        labels = batch["labels"][0]
        if trainer.task == "causal_lm":
            logits, labels = logits[:-1], labels[1:]
        total = cross_entropy(logits.double(), labels, reduction="sum", ignore_index=-100).item()
        row = [total, (labels != -100).sum().item()]
        rows.append(row + [logits.argmax().item(), labels.item()] if trainer.num_labels else row)
    table = np.array(rows)
    loss = table[:, 0].sum() / table[:, 1].sum()
    if not trainer.num_labels:
        return table, {"loss": loss, "perplexity": math.exp(loss), "rows": len(rows)}
    predictions, references = table[:, 2], table[:, 3]
    return table, {
        "loss": loss,
        "accuracy": accuracy_score(references, predictions),
        "rows": len(rows),
        "macro_f1": f1_score(references, predictions, average="macro", zero_division=0),
    }


@pytest.fixture(scope="module")
def oracles():
    """Of each case: the table of rows and the metrics, row by row; and the metrics that the plain loop finds."""
    return {case: (*row_by_row(case), trainer_for(case, "basic").evaluate("validation")) for case in CASES}


@pytest.mark.parametrize("classes, present", [(2, 2), (3, 3), (7, 4), (5, 1)])
def test_counts_that_are_added_up_give_scikit_learns_scores(classes, present):
    """Also where the model knows classes that no row has; the mean of the parts' scores is another number."""
    rows = np.random.default_rng(classes).integers(present, size=(2, 101))
    metrics, parts = ClassificationCounts(classes), []
    for part in np.split(rows, [13, 60], axis=1):
        alone = ClassificationCounts(classes)
        for each in (metrics, alone):
            each.add(*torch.from_numpy(part))
        parts.append(alone.compute())
    predictions, references = rows
    wanted = reference_metrics.scores(predictions, references, classes)
    assert metrics.compute() == pytest.approx(wanted, rel=1e-12)
    if present > 1:
        assert np.mean([part["macro_f1"] for part in parts]) != pytest.approx(wanted["macro_f1"], rel=1e-4)


@pytest.mark.parametrize("task", MODELS)
def test_the_rows_can_be_told_apart(oracles, task):
    """What the tests below rest on: unlike losses, more than one class right and wrong, unlike numbers of targets."""
    table, metrics, _ = oracles[task, UNEVEN]
    assert np.diff(np.sort(table[:, 0])).min() > 1e-5
    if task == "classification":
        assert len(set(table[:, 2])) > 1 and 0.1 < metrics["accuracy"] < 0.9
    else:
        assert table[:, 1].std() > 0.5


@on_ranks(2, 3, 4)
def test_the_short_cuts_give_other_figures(oracles):
    """Repeated rows counted again; and the mean of what each rank finds on its own rows."""
    for (task, (num_rows, batch_size)), (_, right, _) in oracles.items():
        trainer = trainer_for((task, (num_rows, batch_size)), "accelerated")
        ranks = trainer.ranks
        ranks.gather = ranks.accelerator.gather
        kept = trainer.evaluate("validation")
        assert kept["rows"] == num_rows + -num_rows % (batch_size * dist.get_world_size()) > num_rows, task
        ranks.gather = lambda tensors: tensors
        every = ranks.gather_objects(trainer.evaluate("validation"))
        if (num_rows, batch_size) == UNEVEN:
            for name in ("macro_f1", "loss", "accuracy") if task == "classification" else ("perplexity",):
                assert abs(np.mean([own[name] for own in every]) - right[name]) > 1e-4, (task, name)
                assert abs(kept[name] - right[name]) > 1e-4, (task, name)


@on_ranks(1, 2, 3, 4)
def test_every_rank_has_the_figures_of_one_process_over_each_row_once(oracles):
    """The rows that were scored are those of the split, none dropped or doubled, told apart by their losses."""
    for case, (table, right, single) in oracles.items():
        trainer, seen = trainer_for(case, "accelerated"), []
        gather = trainer.ranks.gather
        trainer.ranks.gather = lambda tensors, gather=gather, seen=seen: seen.append(gather(tensors)) or seen[-1]
        metrics = trainer.evaluate("validation")
        assert metrics == pytest.approx(single, rel=1e-6, abs=1e-6), case
        assert metrics == pytest.approx(right, rel=1e-5, abs=1e-5), case
        scored = np.column_stack([torch.cat(column).double() for column in zip(*seen, strict=True)])
        by_loss = [rows[np.argsort(rows[:, 0])] for rows in (scored, table)]
        np.testing.assert_allclose(*by_loss, rtol=1e-5, atol=1e-5)


def scores_without_an_optimizer(folder, kinds):
    """Of a saved model, by training type."""
    config = build(OPTIONS | {"task": "causal_lm", "model": folder})
    scores = {}
    with mock.patch.object(compose, "make_optimizer", side_effect=AssertionError("an optimizer is made")):
        for kind in kinds:
            with mock.patch.object(StepEngine, "close", lambda engine: engine.ranks.barrier()):  # the next needs them
                scores[kind] = runs.evaluate(config.replace(training_type=kind), "test")["loss"]
    return scores


def test_scoring_a_trained_model_builds_no_optimizer_and_a_pipeline_scores_it_too(tmp_path, ranks):
    _, loaded, _, _ = ingredients("causal_lm")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    alone = scores_without_an_optimizer(str(tmp_path), ["basic"])["basic"]
    kinds = ["accelerated", "pipeline"]
    for scores in ranks(2)(scores_without_an_optimizer, str(tmp_path), kinds):
        assert scores == pytest.approx(dict.fromkeys(kinds, alone), rel=1e-5)
