"""Whole texts packed into rows: the best fit, nothing lost, positions that begin anew, and the line that says so."""

import random
from collections import Counter

import datasets
import numpy as np
import pytest

from course_lib.config import DataConfig, build
from course_lib.data import DataProcessor, TextData
from course_lib.data.collating import IGNORE, Collator
from course_lib.data.packing import best_fit
from course_lib.data.window_rows import plain_tokens
from course_lib.errors import ConfigError
from course_lib.modeling.inputs import model_inputs

TEXTS = [f"{row} " * (1 + row * 7 % 23) for row in range(80)] + ["long " * 40, "x"]
SIZE = 32


def by_looking(lengths, capacity):
    """Best fit decreasing as it is defined: every row is looked at for every text."""
    rows, room = [], []
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        fits = [row for row in range(len(rows)) if room[row] >= lengths[text]]
        if fits:
            row = min(fits, key=lambda row: room[row])
        else:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(text)
        room[row] -= lengths[text]
    return rows, room


@pytest.mark.parametrize("capacity", [1, 7, 64, 1000])
def test_each_text_goes_where_the_least_room_is_left(capacity):
    draw = random.Random(capacity)
    lengths = [draw.randint(1, capacity) for _ in range(700)]
    rows, (wanted, room) = best_fit(lengths, capacity), by_looking(lengths, capacity)
    assert sorted(text for row in rows for text in row) == list(range(700))
    assert all(sum(lengths[text] for text in row) <= capacity for row in rows)
    # Of rows with the same room either is a best fit: as many rows are filled as far.
    assert Counter(capacity - sum(lengths[text] for text in row) for row in rows) == Counter(room)
    assert len(rows) == len(wanted) <= 11 / 9 * -(-sum(lengths) // capacity) + 4
    assert rows == best_fit(tuple(lengths), capacity)


def processed(by_bytes, **options):
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})})
    config = DataConfig(task="causal_lm", max_length=SIZE, **options)
    return DataProcessor(config, by_bytes).process(TextData(splits, None, "test", "here", "print"))


@pytest.fixture(scope="module")
def packed(by_bytes):
    return processed(by_bytes, packing="best_fit")


def test_packed_rows_have_a_fingerprint_of_their_own(packed, by_bytes):
    assert packed.fingerprint == processed(by_bytes, packing="best_fit").fingerprint
    wrapped = processed(by_bytes)
    assert wrapped.fingerprint != packed.fingerprint and wrapped.facts["train"].packed_rows == 0


def test_every_text_is_in_one_row_whole_and_a_longer_one_in_pieces(packed, by_bytes):
    rows = packed.splits["train"]
    pieces = Counter()
    for row in rows:
        ends = np.cumsum(row["documents"])
        assert ends[-1] == len(row["input_ids"]) == row["length"] <= SIZE
        pieces.update(tuple(part) for part in np.split(row["input_ids"], ends[:-1]))
    texts = [[*ids, by_bytes.eos_token_id] for ids in plain_tokens(by_bytes, TEXTS)]
    wanted = Counter(tuple(ids[at : at + SIZE]) for ids in texts for at in range(0, len(ids), SIZE))
    assert pieces == wanted and len(rows) < pieces.total()


def test_the_facts_say_what_was_cut_and_how_full_the_rows_are(packed):
    facts, rows = packed.facts["train"], packed.splits["train"]
    longer = sum(len(text) + 1 > SIZE for text in TEXTS)
    assert (facts.rows, facts.cut_rows, facts.cut_tokens) == (len(TEXTS), longer, 0) and longer > 1
    assert facts.tokens == sum(rows["length"]) == sum(len(text) + 1 for text in TEXTS)
    assert facts.packed_rows == len(rows) and facts.filled == facts.tokens / (len(rows) * SIZE) > 0.9
    assert f"in pieces of {SIZE} tokens; packed into {len(rows)} rows of {SIZE} tokens, " in facts.line("train")
    assert f"{facts.filled:.1%} of whose places are filled" in facts.line("train")


@pytest.mark.parametrize(
    ("side", "positions"),
    [
        ("right", [[0, 1, 2, 0, 1], [0, 0, 0, 1, 2], [0, 1, 2, 0, 1]]),
        ("left", [[0, 1, 2, 0, 1], [0, 1, 2, 0, 0], [0, 1, 0, 1, 2]]),
    ],
)
def test_positions_begin_anew_and_no_text_predicts_the_next(side, positions):
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "documents": [3, 2]},
        {"input_ids": [4, 4], "documents": [1, 1]},
        {"input_ids": [1, 2, 3], "documents": [3], "ignore": True},
    ]
    batch = Collator("causal_lm", 0, side)(rows)
    assert batch["position_ids"].tolist() == positions
    assert batch["labels"][0].tolist() == [IGNORE, 6, 7, IGNORE, 9]
    assert (batch["labels"][1:] == IGNORE).all()
    assert list(model_inputs(batch)) == ["input_ids", "position_ids"] and batch.unpadded == (True, False, False)
    alone = Collator("causal_lm", 0, side)([{"input_ids": [5, 6]}])
    assert list(model_inputs(alone)) == ["input_ids", "attention_mask"]


def test_only_a_causal_language_model_packs():
    with pytest.raises(ConfigError, match="packing best_fit has no effect"):
        build({"packing": "best_fit"})
    assert not build({"packing": "best_fit", "task": "causal_lm"}).data.has_one_length
