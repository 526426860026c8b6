"""Metrics over a whole split, right for any number of processes.

Counts and sums travel, never averages: each rank's rows are gathered, the rows that evened out
the last batch are dropped, and the metric is computed once over all of them.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from course_lib.data.collating import moved
from course_lib.modeling.inputs import model_inputs, padding_known, unpadded_rows
from course_lib.training import intervals
from course_lib.training.loss import loss_of_rows

BATCHES = 64
"""Whose scores are brought to the host together: on a GPU it has to wait for them."""


class ClassificationCounts:
    """Accuracy and macro-F1 of what has been added, from counts per class.

    Macro-F1 is the unweighted mean of the F1, 2 TP / (2 TP + FP + FN), of every class that is predicted or referred
    to, as by default in scikit-learn and ``evaluate``: a class that does not occur says nothing.
    :mod:`course_lib.lessons.evaluation.reference_metrics` has the same by these two, a second of import that ranks
    would pay.

    Args:
        num_labels: classes of the model.
    """

    def __init__(self, num_labels: int):
        self.hits, self.predicted, self.actual = torch.zeros(3, num_labels, dtype=torch.int64)
        self.pairs: Counter[tuple[int, int]] = Counter()

    def add(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        """Add rows: int64 [n] each, classes from 0, on the CPU."""
        classes = len(self.hits)
        self.hits += torch.bincount(references[predictions == references], minlength=classes)
        self.predicted += torch.bincount(predictions, minlength=classes)
        self.actual += torch.bincount(references, minlength=classes)
        pairs, counts = torch.stack([predictions, references], 1).unique(dim=0, return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            self.pairs[pair[0], pair[1]] += count

    def compute(self) -> dict[str, float]:
        """``accuracy`` and ``macro_f1``, fractions of 1."""
        f1 = 2 * self.hits.double() / (self.predicted + self.actual).clamp(min=1)
        accuracy = self.hits.sum().double() / self.actual.sum()
        return {"accuracy": accuracy.item(), "macro_f1": f1[self.predicted + self.actual > 0].mean().item()}

    def intervals(self) -> dict[str, intervals.Interval]:
        """Of both; see :mod:`course_lib.training.intervals`."""
        return {
            "accuracy": intervals.accuracy_interval(int(self.hits.sum()), int(self.actual.sum())),
            "macro_f1": intervals.macro_f1_interval(self.pairs, len(self.hits)),
        }


def evaluate_split(
    model: Callable[..., Any],
    loader: DataLoader,
    task: str,
    num_labels: int | None,
    *,
    device: torch.device,
    precision: AbstractContextManager,
    gather: Callable[[Any], Any] = lambda tensors: tensors,
    scores: Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]] | None = None,
    with_intervals: bool = False,
) -> dict[str, Any]:
    """Loss and metrics over every row of a loader.

    Args:
        model: called with what :func:`model_inputs` gives; in evaluation mode while this runs.
        loader: this rank's batches.
        task: ``classification``, ``causal_lm`` or ``masked_lm``.
        num_labels: classes, for classification.
        device: where the batches go.
        precision: autocast context.
        gather: brings the ranks' tensors together along dimension 0 and drops the rows that were
            repeated to even out the last batch: ``Accelerator.gather_for_metrics``.
        scores: in the model's place, :func:`scores_of_rows` of a batch, where no rank has the whole model.
        with_intervals: add ``interval95``, the 95 % interval of each metric as a pair.
    Returns:
        ``loss`` (nats per target) with ``accuracy`` and ``macro_f1``, or with ``perplexity``
        (exp of the loss, weighted by tokens), and ``rows``.
    """
    totals = _Totals(num_labels or 0)
    with torch.no_grad():  # not inference_mode: what an engine gathers in it, the next backward could not use
        for batch in loader:
            batch = moved(batch, device)
            with precision, padding_known(unpadded_rows(batch)):
                if scores:
                    scored = scores(batch)
                else:
                    logits = model(**model_inputs(batch)).logits
                    scored = scores_of_rows(logits, batch["labels"], task)
            totals.add(gather((*scored, batch["labels"]) if num_labels else scored))
    return totals.result() | ({"interval95": totals.intervals()} if with_intervals else {})


class _Totals:
    """Totals of an evaluation so far; the newest scores are still on the device.

    Args:
        num_labels: classes; 0 for a language model.
    """

    def __init__(self, num_labels: int):
        self.num_labels, self.metrics = num_labels, ClassificationCounts(num_labels)
        self.sums, self.rows = torch.zeros(2, dtype=torch.float64), 0
        self.squares = torch.zeros(3, dtype=torch.float64)
        self.waiting: list[tuple[torch.Tensor, ...]] = []

    def add(self, scored: tuple[torch.Tensor, ...]) -> None:
        """Add the rows of one batch, of all ranks.

        Args:
            scored: float32 [B, 2], losses and targets; for classification with int64 [B], predictions and labels.
        """
        self.waiting.append(scored)
        if len(self.waiting) == BATCHES:
            self._fetch()

    def result(self) -> dict[str, float]:
        """See :func:`evaluate_split`."""
        self._fetch()
        loss = (self.sums[0] / self.sums[1]).item()
        answers = self.metrics.compute() if self.num_labels else {"perplexity": math.exp(min(loss, 700.0))}
        return {"loss": loss} | answers | {"rows": self.rows}

    def intervals(self) -> dict[str, intervals.Interval]:
        """Of each metric of :meth:`result`, which comes first."""
        moments = torch.cat([torch.tensor([self.rows], dtype=torch.float64), self.sums, self.squares])
        ends = intervals.loss_interval(moments.numpy())
        loss = {"loss": ends} if ends else {}
        if self.num_labels:
            return loss | self.metrics.intervals()
        return loss | ({"perplexity": (math.exp(min(ends[0], 700.0)), math.exp(min(ends[1], 700.0)))} if ends else {})

    def _fetch(self) -> None:
        """Bring what waits to the host, and add it up there batch by batch in float64, which not every GPU has."""
        if not self.waiting:
            return
        losses, *answers = (torch.cat(parts).cpu() for parts in zip(*self.waiting, strict=True))
        for part in losses.split([len(scored[0]) for scored in self.waiting]):
            self.sums += part.double().sum(0)
        loss, targets = losses.double().T
        self.squares += torch.stack([(loss * loss).sum(), (loss * targets).sum(), (targets * targets).sum()])
        self.rows += len(losses)
        if answers:
            self.metrics.add(*answers)
        self.waiting.clear()


def scores_of_rows(logits: torch.Tensor, labels: torch.Tensor, task: str) -> tuple[torch.Tensor, ...]:
    """Scores for the metrics: each row's loss and targets, see :func:`loss_of_rows`, and its class if it has one.

    Returns:
        float32 [B, 2], and for classification int64 [B].
    """
    losses = loss_of_rows(logits, labels, task)
    return (losses, logits.argmax(-1)) if task == "classification" else (losses,)


def larger_is_better(metric: str) -> bool:
    """Whether a metric is to be maximised."""
    return metric in ("accuracy", "macro_f1")


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the block, and the mode from before after it."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
