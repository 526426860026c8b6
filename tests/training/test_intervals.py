"""95 % intervals of scores: other libraries' answers, and how often they hold what they are of."""

from collections import Counter

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import f1_score

from course_lib.training import intervals


def test_accuracy_as_scipy_has_it():
    for hits, rows in ((0, 1), (1, 1), (7, 9), (829, 1000)):
        wanted = stats.binomtest(hits, rows).proportion_ci(method="wilson")
        assert intervals.accuracy_interval(hits, rows) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def moments(loss, targets):
    return np.array([len(loss), loss.sum(), targets.sum(), loss @ loss, loss @ targets, targets @ targets])


def test_loss_of_one_target_per_row_is_the_error_of_a_mean():
    loss = np.random.default_rng(0).exponential(size=200)
    wanted = stats.norm.interval(0.95, loss.mean(), stats.sem(loss))
    assert intervals.loss_interval(moments(loss, np.ones(200))) == pytest.approx(wanted, abs=1e-9)
    assert intervals.loss_interval(moments(loss[:1], np.ones(1))) is None


def test_loss_of_many_targets_per_row_agrees_with_the_bootstrap():
    random = np.random.default_rng(1)
    targets = random.integers(5, 40, 400).astype(float)
    loss = targets * random.exponential(size=400)
    drawn = random.integers(0, 400, (4000, 400))
    wanted = np.quantile(loss[drawn].sum(1) / targets[drawn].sum(1), (0.025, 0.975))
    low, high = intervals.loss_interval(moments(loss, targets))
    assert (low, high) == pytest.approx(tuple(wanted), rel=0.02)
    naive = stats.norm.interval(0.95, 0, stats.sem(loss / targets))[1]
    assert abs((high - low) / 2 - naive) > 0.05 * naive, "rows of different lengths weigh differently"


def confused(random, rows, classes=3):
    actual = random.choice(classes, rows, p=[0.6, 0.3, 0.1])
    predicted = np.where(random.random(rows) < 0.75, actual, random.integers(0, classes, rows))
    return predicted, actual


def test_macro_f1_agrees_with_a_bootstrap_over_rows():
    random = np.random.default_rng(2)
    predicted, actual = confused(random, 300)
    draws = random.integers(0, 300, (400, 300))
    wanted = np.std([f1_score(actual[rows], predicted[rows], average="macro") for rows in draws])
    counts = Counter(zip(predicted.tolist(), actual.tolist(), strict=True))
    low, high = intervals.macro_f1_interval(counts, 3)
    assert (high - low) / (2 * 1.96) == pytest.approx(wanted, rel=0.12)  # 400 draws: 3.5 % of standard error
    assert intervals.macro_f1_interval(counts, 3) == (low, high), "the same rows give the same interval"
    assert low < f1_score(actual, predicted, average="macro") < high


def test_the_intervals_hold_what_they_are_of_nineteen_times_in_twenty():
    """400 evaluations of 400 rows each. Seeded, so it passes or fails for good; with another seed a true coverage of
    95 % would fall out of these bounds (4.6 standard errors) once in 200,000 times."""
    random, held = np.random.default_rng(3), Counter()
    truth_predicted, truth_actual = confused(random, 400_000)
    f1, accuracy = f1_score(truth_actual, truth_predicted, average="macro"), (truth_actual == truth_predicted).mean()
    for number in range(400):
        rows = slice(number * 400, (number + 1) * 400)
        counts = Counter(zip(truth_predicted[rows].tolist(), truth_actual[rows].tolist(), strict=True))
        low, high = intervals.macro_f1_interval(counts, 3)
        held["f1"] += low <= f1 <= high
        low, high = intervals.accuracy_interval(int((truth_predicted[rows] == truth_actual[rows]).sum()), 400)
        held["accuracy"] += low <= accuracy <= high
        loss = random.exponential(size=400)
        low, high = intervals.loss_interval(moments(loss, np.ones(400)))
        held["loss"] += low <= 1.0 <= high
    assert {name: 360 <= count <= 398 for name, count in held.items()} == dict.fromkeys(held, True), held


def test_a_perfect_score_is_not_certain():
    """Drawn rows are all right, too; a model that errs in a tenth of all rows answers 20 rightly once in eight."""
    assert intervals.macro_f1_interval({(0, 0): 12, (1, 1): 8}, 2) == intervals.accuracy_interval(20, 20)
    assert intervals.macro_f1_interval({(0, 1): 12, (1, 0): 8}, 2) == pytest.approx((0.0, 0.1611), abs=5e-5)
