"""What lesson 11 compares: yardsticks, scores by row, and the errors of a difference, by hand."""

import math

import pandas as pd
import pytest
import torch

from course_lib.config import build
from course_lib.lessons.tracking.tweets import Tweets, confusion_counts, macro_f1, tells_apart


def scored(losses, labels="aab", answers="aab"):
    return pd.DataFrame(
        {
            "text": [f"row {number}" for number in range(len(losses))],
            "loss": losses,
            "label": list(labels),
            "predicted": list(answers),
        }
    )


def test_rows_that_are_hard_for_both_models_cancel_in_the_paired_error():
    one, other = scored([0.1, 1.1, 2.1]), scored([0.2, 1.3, 2.2])
    found = tells_apart(one, other)
    assert found["gap"] == pytest.approx(0.4 / 3)
    spread = math.sqrt(sum((d - 0.4 / 3) ** 2 for d in (0.1, 0.2, 0.1)) / 2)
    assert found["paired"] == pytest.approx(spread / math.sqrt(3))
    separate = math.hypot(
        1 / math.sqrt(3), math.sqrt(((0.2 - 3.7 / 3) ** 2 + (1.3 - 3.7 / 3) ** 2 + (2.2 - 3.7 / 3) ** 2) / 2 / 3)
    )
    assert found["separate"] == pytest.approx(separate) and found["paired"] < 0.1 * found["separate"]


def test_different_rows_are_not_paired():
    with pytest.raises(ValueError, match="different rows"):
        tells_apart(scored([1.0, 2.0, 3.0]), scored([1.0, 2.0, 3.0]).iloc[::-1].reset_index(drop=True))


def test_macro_f1_counts_a_class_that_is_never_answered():
    counts = confusion_counts(scored([1.0] * 4, "aabc", "aaab"), ("a", "b", "c"))
    assert counts == [[2, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert macro_f1(counts) == pytest.approx((2 * 2 / (2 + 3) + 0 + 0) / 3)


def test_a_seed_draws_the_head_and_the_order_and_a_model_is_scored_row_by_row(tmp_path):
    config = build(
        {
            "model": "tiny-bert",
            "training_type": "basic",
            "max_length": 16,
            "device": "cpu",
            "tracker": "none",
            "output_dir": str(tmp_path / "never"),
        }
    )
    tweets = Tweets(config, rows=70)
    one, order = tweets.fresh(1), tweets.batches(3, 4)
    again, same = tweets.fresh(1), tweets.batches(3, 4)
    other, different = tweets.fresh(2), tweets.batches(3, 4)
    assert order == same != different and len({row for rows in order for row in rows}) == 12
    assert torch.equal(one.classifier.weight, again.classifier.weight)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)
    assert torch.equal(next(one.bert.parameters()), next(other.bert.parameters())), "the body is the pretrained one"
    scores = tweets.score(one)
    assert len(scores) == 70 and set(scores["label"]) <= set(tweets.names) and not (tmp_path / "never").exists()
    shares = scores["label"].value_counts(normalize=True)
    assert -(shares * shares.map(math.log)).sum() <= tweets.yardsticks.constant < math.log(3), "no constant does better"
    assert tweets.yardsticks.accuracy == pytest.approx(shares["positive"])
