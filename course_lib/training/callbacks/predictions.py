"""Prediction of every row, in the data set's order, on any number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from course_lib.data.batching import SequentialKeys
from course_lib.data.cache import column
from course_lib.training.session import Session


@dataclass(frozen=True, eq=False)
class Predictions:
    """Of the N rows of a split, in its order.

    Attributes:
        labels: the right class, int64 [N].
        predicted: the model's class, int64 [N].
        losses: cross-entropy in nats, float64 [N].
    """

    labels: np.ndarray
    predicted: np.ndarray
    losses: np.ndarray

    def confusion(self, classes: int) -> list[list[int]]:
        """Rows by right class and predicted class, [C, C]."""
        counts = np.zeros((classes, classes), dtype=int)
        np.add.at(counts, (self.labels, self.predicted), 1)
        return counts.tolist()

    def wrong(self, texts: Sequence[str], label_names: Sequence[str], count: int) -> list[list[Any]]:
        """Row number, text, label, prediction and loss of wrong rows, those of the highest loss first."""
        rows = np.flatnonzero(self.labels != self.predicted)
        rows = rows[np.argsort(-self.losses[rows], kind="stable")][:count]
        return [
            [
                int(row),
                texts[int(row)],
                label_names[self.labels[row]],
                label_names[self.predicted[row]],
                round(float(self.losses[row]), 4),
            ]
            for row in rows
        ]


def predict(trainer: Session, split: str) -> Predictions:
    """Predict every row of a split of a classification data set. A collective call."""
    gathered: list[tuple[torch.Tensor, ...]] = []

    def gather(tensors: Any) -> Any:
        gathered.append(tuple(trainer.ranks.gather(tensors)))
        return gathered[-1]

    trainer.evaluate(split, gather=gather)
    losses, predicted, labels = (torch.cat(parts).cpu().numpy() for parts in zip(*gathered, strict=True))
    # Evaluation goes through the rows by length; the ranks' shares come together in that order.
    rows = trainer.data.splits[split]
    order = np.concatenate(list(SequentialKeys(column(rows, "length")).parts()))
    back = np.argsort(order, kind="stable")
    return Predictions(labels[back], predicted[back], losses[back, 0].astype(np.float64))
