"""Batches: shapes, padding, labels of each task, and masks that depend on a row's seed alone."""

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from course_lib.data.collating import IGNORE, Batch, Collator, moved
from course_lib.modeling.inputs import unpadded_rows

PAD, MASK, CLS, SEP = 0, 4, 2, 3
VOCABULARY = np.arange(5, 1000)


def rows(*lengths, **columns):
    return [
        {
            "input_ids": [CLS, *range(10, 8 + length), SEP],
            "labels": number % 3,
            "length": length,
            **{name: values[number] for name, values in columns.items()},
        }
        for number, length in enumerate(lengths)
    ]


def masking(**options):
    return Collator("masked_lm", PAD, mask_token_id=MASK, ordinary=VOCABULARY, **options)


# Padding


def test_rows_are_padded_to_the_longest():
    batch = Collator("classification", PAD)(rows(3, 7, 5))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()} == {
        "input_ids": ((3, 7), torch.int64),
        "attention_mask": ((3, 7), torch.int64),
        "labels": ((3,), torch.int64),
    }
    assert batch["input_ids"][0].tolist() == [CLS, 10, SEP, PAD, PAD, PAD, PAD]
    assert batch["attention_mask"].tolist() == [[1] * length + [0] * (7 - length) for length in (3, 7, 5)]
    assert batch["labels"].tolist() == [0, 1, 2]


def test_padding_on_the_left():
    batch = Collator("causal_lm", PAD, padding_side="left")(rows(3, 5))
    assert batch["input_ids"].tolist() == [[PAD, PAD, CLS, 10, SEP], [CLS, 10, 11, 12, SEP]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1] * 5]
    assert batch["labels"].tolist() == [[IGNORE, IGNORE, CLS, 10, SEP], [CLS, 10, 11, 12, SEP]]


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({}, 9),
        ({"pad_to": 20}, 20),
        ({"pad_to_multiple_of": 8}, 16),
        ({"pad_to": 20, "pad_to_multiple_of": 8}, 24),
        ({"pad_to_multiple_of": 8, "max_positions": 12}, 12),
        ({"pad_to_multiple_of": 3}, 9),
    ],
)
def test_the_width_of_a_batch(options, width):
    batch = Collator("classification", PAD, **options)(rows(4, 9))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, width)
    assert batch["attention_mask"].sum(1).tolist() == [4, 9]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_keeps_what_it_knows_of_its_padding(workers):
    """Through a worker process, to another device, and through Accelerate's loader."""
    given, collator = rows(3, 7, 7, 7), Collator("classification", PAD)
    loader = DataLoader(given, batch_size=2, collate_fn=collator, num_workers=workers)
    assert [batch.unpadded for batch in loader] == [(False, True), (True, True)]
    assert Collator("classification", PAD, pad_to=8)(given).unpadded == (False,) * 4
    prepared = prepare_data_loader(loader, torch.device("meta"), num_processes=1, process_index=0, put_on_device=True)
    for batch in prepared:
        assert isinstance(batch, Batch) and batch["input_ids"].is_meta and batch.unpadded[1]
    plain = dict(collator(given))
    assert unpadded_rows(plain) is None and moved(plain, torch.device("cpu")).keys() == plain.keys()


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, tuple])
def test_ids_may_be_lists_arrays_or_tensors(kind):
    given = [{**row, "input_ids": kind(row["input_ids"])} for row in rows(3, 6)]
    for collator in (Collator("classification", PAD), masking()):
        assert all(torch.equal(tensor, collator(rows(3, 6))[name]) for name, tensor in collator(given).items())


@pytest.mark.parametrize(
    "collator", [Collator("classification", PAD), Collator("causal_lm", PAD), masking()], ids=lambda config: config.task
)
def test_filler_rows_have_no_targets(collator):
    batch = collator(rows(6, 6, 6, ignore=[False, True, True], mask_seed=[(1, 0, row) for row in range(3)]))
    targets = (batch["labels"] != IGNORE).view(3, -1).any(1)
    assert targets.tolist() == [True, False, False]
    assert batch["attention_mask"].all()


# Masks


def test_causal_labels_are_the_tokens_also_where_they_equal_the_padding():
    batch = Collator("causal_lm", SEP)(rows(3, 4))
    assert batch["labels"].tolist() == [[CLS, 10, SEP, IGNORE], [CLS, 10, 11, SEP]]


def test_a_rows_mask_depends_on_its_seed_and_on_nothing_else():
    lengths = (30, 12, 50, 7)
    seeds = [(42, 3, row) for row in range(4)]
    whole = masking()(rows(*lengths, mask_seed=seeds))
    for number, length in enumerate(lengths):
        alone = masking(pad_to=64, padding_side="left")(rows(length, mask_seed=[seeds[number]]))
        for name in ("input_ids", "labels"):
            assert torch.equal(alone[name][0, -length:], whole[name][number, :length])
    other = masking()(rows(*lengths, mask_seed=[(42, 4, row) for row in range(4)]))
    assert not torch.equal(other["labels"], whole["labels"])


def test_without_a_seed_a_row_is_masked_alike_each_time():
    first, again = masking()(rows(40, 20)), masking()(rows(9, 40))
    assert torch.equal(first["labels"][0], again["labels"][1])


def test_masks_have_the_rates_of_bert():
    length, count = 130, 2000
    batch = masking()(rows(*[length] * count, mask_seed=[(0, 0, row) for row in range(count)]))
    original = torch.tensor(rows(length)[0]["input_ids"])
    read, labels = batch["input_ids"], batch["labels"]
    predicted = labels != IGNORE
    assert torch.equal(read[~predicted], original.expand(count, -1)[~predicted])
    assert torch.equal(labels[predicted], original.expand(count, -1)[predicted])
    tokens = count * (length - 2)
    shares = {"predicted": (predicted.sum() / tokens, 0.15, tokens)}
    targets = int(predicted.sum())
    masked, kept = read[predicted] == MASK, read[predicted] == labels[predicted]
    shares |= {
        "masked": (masked.float().mean(), 0.8, targets),
        "kept": (kept.float().mean(), 0.1, targets),
        "replaced": ((~masked & ~kept).float().mean(), 0.1, targets),
    }
    for name, (share, wanted, size) in shares.items():
        error = 5 * (wanted * (1 - wanted) / size) ** 0.5
        assert float(share) == pytest.approx(wanted, abs=error), name
    drawn = read[predicted][~masked & ~kept]
    assert drawn.min() >= 5 and drawn.max() < 1000 and len(drawn.unique()) > 0.9 * len(VOCABULARY)
    by_position = predicted.float().mean(0)
    assert by_position[0] == by_position[-1] == 0 and by_position[1:-1].min() > 0.1 and by_position[1:-1].max() < 0.2


def test_every_row_has_a_target_and_special_tokens_none():
    count = 500
    batch = masking(mlm_probability=0.01)(rows(*[4] * count, mask_seed=[(1, 1, row) for row in range(count)]))
    predicted = batch["labels"] != IGNORE
    assert predicted.sum(1).min() == 1 and not predicted[:, [0, 3]].any()
    assert 0.4 < predicted[:, 1].float().mean() < 0.6
    bare = masking()([{"input_ids": [CLS, SEP]}, {"input_ids": [CLS, 12, SEP]}])
    assert (bare["labels"] != IGNORE).sum(1).tolist() == [0, 1]


def test_tokens_beyond_the_vocabulary_are_left_alone():
    batch = masking(mlm_probability=0.99)([{"input_ids": [CLS, 5000, 1000, 999, SEP]}])
    assert batch["labels"].tolist() == [[IGNORE, IGNORE, IGNORE, 999, IGNORE]]
