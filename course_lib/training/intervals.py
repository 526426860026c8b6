"""Confidence intervals of a score, 95 %, over rows like those that it was computed on.

They say what the choice of the scored rows leaves open, not what another seed of the training would change.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
"""Share of such intervals that hold the value they are of."""

DRAWS = 2000
"""Resamples of the bootstrap: its ends then vary by about a twentieth of the interval's half width."""

SEED = 0
"""Of those draws: the same rows and answers give the same interval."""

Interval = tuple[float, float]
"""Its two ends."""


def _z() -> float:
    return NormalDist().inv_cdf((1 + LEVEL) / 2)


def accuracy_interval(hits: int, rows: int) -> Interval:
    """Wilson's interval of a share of rows, which holds for few rows and for shares near 0 and 1.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209; R. G. Newcombe, Statist. Med. 17 (1998) 857, method 3. The
    same as ``scipy.stats.binomtest(hits, rows).proportion_ci(method="wilson")``, whose import takes every rank longer
    than a small evaluation.

    Args:
        hits: rows answered rightly.
        rows: all of them, at least one.
    """
    z, share = _z(), hits / rows
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z / (1 + z * z / rows) * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    return max(0.0, middle - half), min(1.0, middle + half)


def macro_f1_interval(counts: Mapping[tuple[int, int], int], num_labels: int) -> Interval:
    """Percentile bootstrap over rows of macro-F1.

    Rows drawn with replacement are, as counts of the confusion matrix, one multinomial draw: no row has to be kept.
    Source: B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. Where macro-F1 is 0 or 1 no
    draw differs from the rows themselves, which says nothing; there accuracy's interval is taken.

    Args:
        counts: rows by class predicted and class they have; pairs that do not occur may be left out.
        num_labels: classes of the model; the mean is over those that occur in a draw.
    """
    pairs, numbers = np.array(list(counts)), np.array(list(counts.values()))
    rows = numbers.sum()
    drawn = np.random.default_rng(SEED).multinomial(rows, numbers / rows, size=DRAWS)
    sums = np.zeros((DRAWS, num_labels))  # of 2 TP and of 2 TP + FP + FN, class by class
    hits = np.zeros_like(sums)
    for (predicted, actual), column in zip(pairs, drawn.T, strict=True):
        sums[:, predicted] += column
        sums[:, actual] += column
        if predicted == actual:
            hits[:, actual] += 2 * column
    scores = (hits / np.maximum(sums, 1)).sum(1) / (sums > 0).sum(1)
    low, high = np.quantile(scores, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    if low == high and low in (0.0, 1.0):
        return accuracy_interval(round(low) * int(rows), int(rows))
    return float(low), float(high)


def loss_interval(moments: np.ndarray) -> Interval | None:
    """Normal interval of the mean loss per target, the rows being what was drawn.

    The mean is a ratio of two sums over rows, R = sum l / sum t; its variance is about
    n / (n - 1) sum (l - R t)^2 / (sum t)^2 (W. G. Cochran, Sampling Techniques, 3rd edition (1977), section 6.4,
    without the correction for a finite population). With one target per row that is the squared error of a mean.

    Args:
        moments: float64 [6], sums over the rows: 1, loss, targets, loss^2, loss x targets, targets^2.
    Returns:
        The interval; None for a single row, which says nothing of how rows differ.
    """
    rows, loss, targets, squares, mixed, targets_squared = (float(moment) for moment in moments)
    ratio = loss / targets
    if rows < 2:
        return None
    spread = max(0.0, squares - 2 * ratio * mixed + ratio * ratio * targets_squared)
    half = _z() * math.sqrt(rows / (rows - 1) * spread) / targets
    return ratio - half, ratio + half
