"""Baselines of a fine-tuned transformer: the commonest class, the class shares, TF-IDF with logistic regression."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from course_lib.errors import DataError
from course_lib.training import intervals

TFIDF_C = 10.0
"""Inverse strength of the L2 penalty; best of 1, 3, 10, 30 by 5-fold cross-validation on training rows of the
bundled tweets. A fixed default: nothing is tuned on the rows that are scored."""


def majority_class(train_labels: Sequence[int], test_labels: Sequence[int], num_classes: int) -> dict[str, Any]:
    """Score of always answering the commonest class of the training split (the smallest number among equals).

    Args:
        train_labels: class numbers.
        test_labels: class numbers to score on.
        num_classes: classes of the model.
    Returns:
        `accuracy` and `macro_f1`, fractions of 1, and `interval95`, a pair for each.
    Raises:
        DataError: a split is empty.
    """
    _refuse_empty(train_labels, test_labels)
    counts = Counter(int(label) for label in train_labels)
    commonest = min(counts, key=lambda label: (-counts[label], label))
    return _score(test_labels, [commonest] * len(test_labels), range(num_classes))


def class_shares_loss(train_labels: Sequence[int], test_labels: Sequence[int], num_classes: int) -> float:
    """Mean loss, in nats, of answering the class shares of the training split whatever the row: a constant's best.

    Each class counts one row more than the training split has of it, so that one which is missing there does not cost
    infinitely much (Laplace's rule). Tokens as labels give the loss of their frequencies.

    Args:
        train_labels: class numbers.
        test_labels: class numbers to score on.
        num_classes: classes that there are.
    Raises:
        DataError: a split is empty.
    """
    _refuse_empty(train_labels, test_labels)
    counts, scored = Counter(map(int, train_labels)), Counter(map(int, test_labels))
    log_all = math.log(len(train_labels) + num_classes)
    return sum(times * (log_all - math.log(counts[label] + 1)) for label, times in scored.items()) / len(test_labels)


def tfidf_logistic_regression(
    train_texts: Sequence[str], train_labels: Sequence[int], test_texts: Sequence[str], test_labels: Sequence[int]
) -> dict[str, Any]:
    """Score of a linear classifier on TF-IDF weighted words and pairs of words.

    Args:
        train_texts: texts to fit on.
        train_labels: their class numbers.
        test_texts: texts to score on.
        test_labels: their class numbers.
    Returns:
        `accuracy` and `macro_f1`, fractions of 1, and `interval95`, a pair for each.
    Raises:
        DataError: a split is empty, the training split has one class only, or no text has a word.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer  # 1 s, which only this baseline pays
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    _refuse_empty(train_labels, test_labels)
    if len(set(train_labels)) < 2:
        raise DataError(
            f"all {len(train_labels)} training labels are {train_labels[0]}, and a classifier needs two",
            "use a split with several classes, or --baselines false",
        )
    vectorizer = TfidfVectorizer(ngram_range=(1, 2))
    try:
        train_features = vectorizer.fit_transform(train_texts)
    except ValueError as error:  # scikit-learn's "empty vocabulary"
        raise DataError(
            "no training text has a word of two letters, which TF-IDF needs",
            "check the text column, or use --baselines false",
        ) from error
    with threadpool_limits(1):  # the vectors are short: a second thread costs ten times what it gives
        classifier = LogisticRegression(C=TFIDF_C, max_iter=1000).fit(train_features, train_labels)
    predicted = classifier.predict(vectorizer.transform(test_texts))
    return _score(test_labels, predicted, sorted({*train_labels, *test_labels}))


def _refuse_empty(train_labels: Sequence[int], test_labels: Sequence[int]) -> None:
    for name, labels in (("training", train_labels), ("test", test_labels)):
        if not len(labels):
            raise DataError(f"the {name} split of the baselines is empty")


def _score(labels: Sequence[int], predicted: Sequence[int], classes: Iterable[int]) -> dict[str, Any]:
    from sklearn.metrics import accuracy_score, f1_score

    numbers = {label: number for number, label in enumerate(classes)}
    macro_f1 = f1_score(labels, predicted, average="macro", zero_division=0)
    pairs = Counter((numbers[guess], numbers[label]) for guess, label in zip(predicted, labels, strict=True))
    hits = sum(count for (guess, label), count in pairs.items() if guess == label)
    return {
        "accuracy": float(accuracy_score(labels, predicted)),
        "macro_f1": float(macro_f1),
        "interval95": {
            "accuracy": intervals.accuracy_interval(hits, len(labels)),
            "macro_f1": intervals.macro_f1_interval(pairs, len(numbers)),
        },
    }
