"""Set-up of lesson 11's loop: tokenized tweets, a pretrained model, the scores of each row."""

import copy
import math
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_lib.config import Config
from course_lib.training.baselines import class_shares_loss, majority_class
from course_lib.training.run import build_trainer

SCORED = 64
"""Rows that are scored at a time."""


@dataclass(frozen=True)
class Yardsticks:
    """Scores that a model has to beat on the scored rows.

    Attributes:
        constant: loss, in nats, of a constant that knows the class shares of the training split.
        accuracy: of always answering the commonest class.
        macro_f1: of the same.
    """

    constant: float
    accuracy: float
    macro_f1: float


class Tweets:
    """The training split to draw batches from, the first rows of the test split to score on, and the model's start.

    Args:
        config: names data, model and lengths; nothing is trained by it.
        rows: of the test split that are scored.
        layers: the last ones of the model, which are trained with the head; the others stay as they are.
    """

    def __init__(self, config: Config, rows: int, layers: int = 2):
        trainer, self.data = build_trainer(config)
        self._tokenizer, self._length = trainer.tokenizer, config.data.max_length
        self._start = cast(Any, trainer.model.cpu())
        body = self._start.base_model
        for part in (body.embeddings, *body.encoder.layer[:-layers]):
            part.requires_grad_(False)
        self.train_rows = len(self.data.splits["train"])
        self.scored = self._texts("test", list(range(rows)))
        train, scored = list(self.data.splits["train"]["label"]), self.scored[1]
        self.names = self.data.label_names or ()
        majority = majority_class(train, scored, len(self.names))
        self.yardsticks = Yardsticks(
            class_shares_loss(train, scored, len(self.names)),
            majority["accuracy"],
            majority["macro_f1"],
        )

    def fresh(self, seed: int) -> nn.Module:
        """The pretrained body with a head that this seed draws; dropout goes on from the seed, too."""
        torch.manual_seed(seed)
        model = copy.deepcopy(self._start)
        model.classifier.reset_parameters()
        return model.train()

    def batches(self, steps: int, size: int) -> list[list[int]]:
        """Rows of the training split for so many steps, in an order that torch's generator draws."""
        return torch.randperm(self.train_rows)[: steps * size].view(steps, size).tolist()

    def batch(self, rows: list[int]) -> dict[str, Tensor]:
        """Rows of the training split as a model takes them: (rows, longest) int64, and labels (rows,)."""
        return self._encoded(*self._texts("train", rows))

    def score(self, model: nn.Module) -> pd.DataFrame:
        """A line for each scored row: text, label and predicted by name, and the loss in nats."""
        model.eval()
        lines: list[tuple[Any, ...]] = []
        with torch.inference_mode():
            for first in range(0, len(self.scored[0]), SCORED):
                texts, labels = self.scored[0][first : first + SCORED], self.scored[1][first : first + SCORED]
                batch = self._encoded(texts, labels)
                logits = model(**batch).logits
                losses = cross_entropy(logits, batch["labels"], reduction="none")
                lines += zip(texts, labels, logits.argmax(-1).tolist(), losses.tolist(), strict=True)
        named = [(text, self.names[label], self.names[answer], loss) for text, label, answer, loss in lines]
        return pd.DataFrame(named, columns=["text", "label", "predicted", "loss"])

    def _texts(self, split: str, rows: list[int]) -> tuple[list[str], list[int]]:
        chosen = self.data.splits[split].select(rows)
        return list(chosen["text"]), list(chosen["label"])

    def _encoded(self, texts: list[str], labels: list[int]) -> dict[str, Tensor]:
        encoded = self._tokenizer(texts, padding=True, truncation=True, max_length=self._length, return_tensors="pt")
        return {**encoded, "labels": torch.tensor(labels)}


def confusion_counts(scores: pd.DataFrame, names: tuple[str, ...]) -> list[list[int]]:
    """Counts of rows by class (first index) and answer."""
    counted = pd.crosstab(scores["label"], scores["predicted"]).reindex(index=names, columns=names, fill_value=0)
    return counted.to_numpy().tolist()


def macro_f1(counts: list[list[int]]) -> float:
    """The mean of the classes' F1, from ``counts[actual][predicted]``."""
    f1 = [2 * row[i] / max(sum(row) + sum(other[i] for other in counts), 1) for i, row in enumerate(counts)]
    return sum(f1) / len(f1)


def tells_apart(one: pd.DataFrame, other: pd.DataFrame) -> dict[str, float]:
    """Two models' mean losses compared: the gap and its standard errors over rows, of different rows and of the same.

    Args:
        one: as :meth:`Tweets.score` gives it.
        other: of the same rows in the same order.

    Returns:
        ``gap``, other less one; ``separate``, the error as if each had been scored on rows of its own,
        sqrt(s1**2 / n + s2**2 / n); ``paired``, that of the mean of the rows' differences, s_d / sqrt(n). In nats.
    """
    if list(one["text"]) != list(other["text"]):
        raise ValueError("the two were scored on different rows")
    differences = other["loss"] - one["loss"]
    return {
        "gap": float(differences.mean()),
        "separate": math.hypot(one["loss"].sem(), other["loss"].sem()),
        "paired": float(differences.sem()),
    }
