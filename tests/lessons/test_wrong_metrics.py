"""The wrong ways are wrong by what is claimed, and the sums are right."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, f1_score

from course_lib.lessons import wrong_metrics as wm

SPLITS = [(10, 4, 2), (8, 4, 3), (3, 4, 3), (1, 4, 4), (455, 64, 3), (16, 4, 2), (5, 8, 1)]


@pytest.fixture
def answers():
    random = np.random.default_rng(0)
    references = np.sort(random.integers(0, 3, 50))
    return np.where(random.random(50) < 0.4, random.integers(0, 3, 50), references), references


@pytest.mark.parametrize("split", SPLITS)
def test_the_formula_counts_the_repeated_rows(split):
    rows, batch_size, ranks = split
    even, uneven = wm.dealt(*split), wm.dealt(*split, even=False)
    assert sum(map(len, even)) - rows == wm.repeated_rows(*split)
    assert sorted(np.concatenate(uneven)) == list(range(rows)), "a row was dropped or doubled"
    assert set(np.concatenate(even)) == set(range(rows))
    assert len({len(rank) for rank in even}) == 1
    assert ranks == 1 or len(even[0]) % batch_size == 0


def test_the_repeated_rows_are_the_first():
    even = wm.dealt(10, 4, 2)
    assert [rank.tolist() for rank in even] == [[0, 1, 2, 3, 8, 9, 0, 1], [4, 5, 6, 7, 2, 3, 4, 5]]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_averages_over_ranks_differ_and_stay_within_the_bound(answers, ranks):
    right, rows = wm.scores(*answers, 3), wm.dealt(50, 8, ranks, even=False)
    averaged = wm.averaged_over_ranks(*answers, rows, 3)
    error = abs(averaged["accuracy"] - right["accuracy"])
    assert 1e-3 < error <= wm.averaging_bound([len(rank) for rank in rows])
    assert abs(averaged["macro_f1"] - right["macro_f1"]) > 1e-3


def test_with_equal_ranks_the_average_accuracy_is_right_and_the_average_f1_is_not(answers):
    right, rows = wm.scores(*answers, 3), np.split(np.arange(50), 5)
    averaged = wm.averaged_over_ranks(*answers, rows, 3)
    assert wm.averaging_bound([10] * 5) == 0
    assert averaged["accuracy"] == pytest.approx(right["accuracy"], abs=1e-12)
    assert abs(averaged["macro_f1"] - right["macro_f1"]) > 0.01


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_repeated_rows_move_the_accuracy_by_their_share(answers, ranks):
    predictions, references = answers
    rows, repeated = wm.dealt(50, 8, ranks), wm.repeated_rows(50, 8, ranks)
    right, kept = (wm.scores(*answers, 3), wm.with_repeats(*answers, rows, 3))
    share = repeated / (50 + repeated)
    again = np.mean(predictions[:repeated] == references[:repeated])
    assert kept["accuracy"] - right["accuracy"] == pytest.approx(share * (again - right["accuracy"]), abs=1e-12)
    assert abs(kept["accuracy"] - right["accuracy"]) > 1e-3


def test_losses_of_batches_with_unlike_numbers_of_targets():
    sums = np.array([[8.0, 2], [90.0, 30], [2.0, 2]])  # mean losses 4, 3 and 1
    assert wm.loss_from_sums(sums) == pytest.approx(100 / 34)
    assert wm.mean_of_losses(sums) == pytest.approx(8 / 3)
    assert wm.mean_of_perplexities(sums) == pytest.approx((np.exp(4) + np.exp(3) + np.exp(1)) / 3)
    assert wm.mean_of_perplexities(sums) > np.exp(wm.mean_of_losses(sums))


def test_confusion_matrices_of_the_ranks_add_up(answers):
    predictions, references = answers
    ranks = wm.dealt(50, 8, 3, even=False)
    total = sum(wm.confusion_matrix(torch.tensor(predictions[rows]), torch.tensor(references[rows]), 3)
                for rows in ranks)
    assert total.tolist() == confusion_matrix(references, predictions, labels=range(3)).tolist()
    assert wm.macro_f1(total) == pytest.approx(f1_score(references, predictions, average="macro"), abs=1e-12)


def test_a_class_that_never_occurs_is_left_out():
    answers = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])
    confusion = wm.confusion_matrix(*map(torch.tensor, answers), 3)
    assert wm.macro_f1(confusion) == pytest.approx(wm.scores(*answers, 3)["macro_f1"], abs=1e-12)
    assert wm.macro_f1(confusion) == pytest.approx((2 * 2 / 5 + 2 / 3) / 2)
