"""Accuracy and macro-F1 by ``evaluate`` and scikit-learn, beside those that lesson 04 and the trainers count."""

from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import accuracy_score, f1_score


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
        return evaluate.MetricInfo(
            description="accuracy and macro-F1",
            citation="",
            inputs_description="",
            features=datasets.Features({"predictions": column, "references": column}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "macro_f1": float(f1_score(references, predictions, average="macro", zero_division=0)),
        }


def scores(predictions: np.ndarray, references: np.ndarray, num_labels: int) -> dict[str, float]:
    """``accuracy`` and ``macro_f1`` over the rows, predictions and references being int64 [n]."""
    return ClassificationMetrics(num_labels).compute(predictions=predictions, references=references)
