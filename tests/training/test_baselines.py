"""The baselines, against figures worked out by hand."""

import math

import pytest

from course_lib.errors import DataError
from course_lib.training import baselines


def test_majority_class_by_hand():
    # Class 1 is commonest in training; of four test rows two are 1. F1 of class 1: 2*2/(2*2+2) = 2/3, others 0.
    scores = baselines.majority_class([0, 1, 1, 2], [1, 1, 0, 2], num_classes=3)
    assert scores.pop("interval95")["accuracy"] == pytest.approx((0.150, 0.850), abs=5e-4)  # Wilson, 2 of 4
    assert scores == {"accuracy": 0.5, "macro_f1": pytest.approx(2 / 9)}


def test_macro_f1_is_over_the_classes_that_occur():
    assert baselines.majority_class([1, 1, 0], [1, 1], num_classes=4)["macro_f1"] == 1.0
    assert baselines.majority_class([1, 1, 0], [1, 0], num_classes=4)["macro_f1"] == pytest.approx(1 / 3)


def test_majority_class_is_learnt_from_training_and_a_tie_goes_to_the_smallest():
    assert baselines.majority_class([0, 0, 1], [1, 1, 1], num_classes=2)["accuracy"] == 0.0
    assert baselines.majority_class([2, 1, 2, 1], [1, 1, 2], num_classes=3)["accuracy"] == pytest.approx(2 / 3)


def test_a_constant_that_knows_the_class_shares_by_hand():
    # Three of four training rows are class 0; each class counts one more: shares 4/6 and 2/6.
    loss = baselines.class_shares_loss([0, 0, 0, 1], [0, 1], num_classes=2)
    assert loss == pytest.approx(-(math.log(4 / 6) + math.log(2 / 6)) / 2)
    many = [0] * 655 + [1] * 597 + [2] * 1783
    assert baselines.class_shares_loss(many, many, 3) < math.log(3), "a constant knows more than nothing"
    assert math.isfinite(baselines.class_shares_loss([0, 0], [1], 2)), "a class that training lacks"
    with pytest.raises(DataError, match="test split of the baselines is empty"):
        baselines.class_shares_loss([0], [], 2)


GOOD = ["good film", "great good acting", "good and great", "really good"]
BAD = ["bad film", "awful bad acting", "bad and awful", "really bad"]


@pytest.mark.parametrize(("labels", "score"), [([1, 0], 1.0), ([0, 1], 0.0)], ids=["right", "has no sight of these"])
def test_tfidf_learns_words(labels, score):
    scores = baselines.tfidf_logistic_regression(GOOD + BAD, [1] * 4 + [0] * 4, ["great film", "awful film"], labels)
    assert scores["accuracy"] == scores["macro_f1"] == score


def test_tfidf_reads_pairs_of_words():
    pairs = ["not good", "good not", "very bad", "bad very"] * 3
    scores = baselines.tfidf_logistic_regression(pairs, [0, 1, 0, 1] * 3, pairs[:4], [0, 1, 0, 1])
    assert scores["accuracy"] == 1.0  # the words alone are the same in both classes


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((["a b", "c d"], [1, 1], ["e f"], [1]), "all 2 training labels are 1"),
        ((["", "?"], [0, 1], ["e f"], [1]), "no training text has a word"),
        (([], [], ["e f"], [1]), "the training split of the baselines is empty"),
    ],
)
def test_what_cannot_be_fitted_is_said_in_one_line(arguments, what):
    with pytest.raises(DataError, match=what.replace("?", r"\?")):
        baselines.tfidf_logistic_regression(*arguments)
