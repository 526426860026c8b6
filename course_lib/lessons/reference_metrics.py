"""Metrics of a split over several ranks, combined wrongly in the usual ways, and rightly from sums.

Each wrong way stands in working code somewhere. The lesson on distributed evaluation measures how
far off it is; :mod:`course_lib.training.evaluation` is what the trainers use.
"""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from sklearn.metrics import accuracy_score, f1_score
from torch.utils.data import BatchSampler


class ClassificationMetrics(evaluate.Metric):
    """Accuracy and macro-F1 as one ``evaluate`` metric that needs no download.

    Macro-F1 is the unweighted mean of the F1 of every class that is predicted or referred to.

    Args:
        num_labels: classes of the model.
    """

    def __init__(self, num_labels: int, **kwargs: Any):
        self.num_labels = num_labels
        super().__init__(keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        column = datasets.Value("int64")
        return evaluate.MetricInfo(description="accuracy and macro-F1", citation="", inputs_description="",
                                   features=datasets.Features({"predictions": column, "references": column}))

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "macro_f1": float(f1_score(references, predictions, average="macro", zero_division=0)),
        }


def dealt(num_rows: int, batch_size: int, num_processes: int, even: bool = True) -> list[np.ndarray]:
    """Rows that Accelerate gives each rank: whole batches in turn.

    Args:
        num_rows: rows of the split.
        batch_size: rows per rank in one batch.
        num_processes: ranks.
        even: repeat rows, from the first on, until every rank has as many full batches.
    Returns:
        For each rank its row numbers, int64, in order.
    """
    batches = BatchSampler(range(num_rows), batch_size, drop_last=False)
    if num_processes == 1:
        return [np.concatenate(list(batches))]
    shards = [BatchSamplerShard(batches, num_processes, rank, even_batches=even) for rank in range(num_processes)]
    return [np.array([row for batch in shard for row in batch], np.int64) for shard in shards]


def repeated_rows(num_rows: int, batch_size: int, num_processes: int) -> int:
    """How many rows are repeated to give every rank as many full batches."""
    in_one_round = batch_size * num_processes
    return -num_rows % in_one_round if num_processes > 1 else 0


def averaging_bound(rows_of_ranks: Sequence[int]) -> float:
    """The most by which the mean of the ranks' accuracies can miss the accuracy of all rows.

    Both are weighted means of the ranks' accuracies, with weights 1/N and n_r/n; accuracies lie
    between 0 and 1, so the two differ by at most half the sum of the weights' differences.
    """
    shares = np.asarray(rows_of_ranks) / np.sum(rows_of_ranks)
    return float(np.abs(shares - 1 / len(shares)).sum() / 2)


def scores(predictions: np.ndarray, references: np.ndarray, num_labels: int) -> dict[str, float]:
    """``accuracy`` and ``macro_f1`` over the rows, predictions and references being int64 [n]."""
    return ClassificationMetrics(num_labels).compute(predictions=predictions, references=references)


def averaged_over_ranks(predictions: np.ndarray, references: np.ndarray, ranks: Sequence[np.ndarray],
                        num_labels: int) -> dict[str, float]:
    """Wrong: the mean of what each rank scores on its own rows.

    Args:
        predictions: int64 [n].
        references: int64 [n].
        ranks: row numbers of each rank.
        num_labels: classes of the model.
    """
    rank_scores = [scores(predictions[rows], references[rows], num_labels) for rows in ranks if len(rows)]
    return {name: float(np.mean([score[name] for score in rank_scores])) for name in rank_scores[0]}


def with_repeats(predictions: np.ndarray, references: np.ndarray, ranks: Sequence[np.ndarray],
                 num_labels: int) -> dict[str, float]:
    """Wrong: the score over the rows of all ranks, the repeated ones counted again. Arguments as above."""
    rows = np.concatenate(list(ranks))
    return scores(predictions[rows], references[rows], num_labels)


def mean_of_losses(sums: np.ndarray) -> float:
    """Wrong: the mean of mean losses, each with the same weight.

    Args:
        sums: [K, 2], of each batch, rank or row its summed loss (nats) and its number of targets.
    """
    return float(np.mean(sums[:, 0] / sums[:, 1]))


def mean_of_perplexities(sums: np.ndarray) -> float:
    """Wrong: the mean of perplexities. Arguments as for :func:`mean_of_losses`.

    Never below exp(:func:`mean_of_losses`), by Jensen's inequality.
    """
    return float(np.mean(np.exp(sums[:, 0] / sums[:, 1])))


def loss_from_sums(sums: np.ndarray) -> float:
    """Right: the loss of a target, in nats. Arguments as for :func:`mean_of_losses`; perplexity is its exp."""
    total, targets = sums.sum(axis=0)
    return float(total / targets)


def confusion_matrix(predictions: torch.Tensor, references: torch.Tensor, num_labels: int) -> torch.Tensor:
    """Counts by class, int64 [C, C]: row the reference, column the prediction. Matrices of disjoint rows add up."""
    cells = references * num_labels + predictions
    return torch.bincount(cells, minlength=num_labels**2).view(num_labels, num_labels)


def macro_f1(confusion: torch.Tensor) -> float:
    """Right: the mean F1 of the classes, that occur, from counts over all rows."""
    occurs = (confusion.sum(0) + confusion.sum(1) > 0).numpy()
    return float(np.mean(np.array(f1_by_class(confusion))[occurs]))


def f1_by_class(confusion: torch.Tensor) -> list[float]:
    """The F1 of every class, 2 hits / (predicted + actual), from counts over all rows: int64 [C, C]."""
    hits = confusion.diagonal().double()
    occurrences = confusion.sum(0) + confusion.sum(1)  # as a prediction and as a reference
    return (2 * hits / occurrences.clamp(min=1)).tolist()
