"""The validator refuses each planted fault with a line that names the action."""

import re
from dataclasses import replace

import pytest

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.actions import RECV_B, RECV_F, Action, B, F, Schedule
from course_lib.parallel.pipeline.passes import lower, messages
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.validation import check


def edit(schedule, rank, change):
    """The table with one row changed, by a function of its text."""
    row = tuple(map(Action.parse, change([str(action) for action in schedule.rows[rank]])))
    return replace(schedule, rows=(*schedule.rows[:rank], row, *schedule.rows[rank + 1 :]))


def without(cell):
    return lambda row: [each for each in row if each != cell]


def swapped(first, second):
    return lambda row: [{first: second, second: first}.get(each, each) for each in row]


def replaced(old, *new):
    return lambda row: [cell for each in row for cell in (new if each == old else (each,))]


def with_more(cell):
    return lambda row: [*row, cell]


def first(*cells):
    return lambda row: [*cells, *[each for each in row if each not in cells]]


def later(cell, after):
    return lambda row: replaced(after, after, cell)(without(cell)(row))


FAULTS = [
    ("1f1b", 1, without("1F3"), "1f1b lacks 1F3"),
    ("1f1b", 2, without("2B5"), "1f1b lacks 2I5"),
    ("zb_h1", 1, without("1W4"), "zb_h1 lacks 1W4"),
    ("zb_h1", 1, without("1I4"), "zb_h1 lacks 1I4"),
    ("gpipe", 0, with_more("0B7"), "rank 0 of gpipe has 0B7 twice"),
    ("1f1b", 0, replaced("0B2", "0B2", "0I2", "0W2"), "1f1b has 0B2 and 0I2 or 0W2"),
    ("1f1b", 3, swapped("3F2", "3B2"), "rank 3 of 1f1b has 3B2 before 3F2"),
    ("zb_h2", 2, swapped("2I1", "2W1"), "rank 2 of zb_h2 has 2W1 before 2I1"),
    ("interleaved", 1, replaced("5F0", "6F0"), "rank 1 of interleaved has 6F0: stage 6"),
    ("1f1b", 3, replaced("3F0", "4F0"), "3 of 1f1b has 4F0: there are 4 stages"),
    ("1f1b", 0, with_more("0F8"), "0 of 1f1b has 0F8: there are 4 stages"),
    ("1f1b", 0, first("0F0", "0B0"), "1f1b waits for itself: rank 0 in 0B0 for 1B0, rank 1 in 1F1 for 0F1"),
    ("zbv", 3, swapped("3F0", "4F0"), "zbv waits for itself: rank 0 in 7F0 for 6F0"),
    ("1f1b lowered", 0, without("0SEND_F1"), "rank 0 of 1f1b lacks 0SEND_F1"),
    ("1f1b lowered", 1, without("1RECV_F1"), "rank 1 of 1f1b lacks 1RECV_F1"),
    ("1f1b lowered", 3, with_more("3SEND_F0"), "rank 3 of 1f1b has 3SEND_F0, which has no use"),
    ("1f1b lowered", 0, swapped("0F2", "0SEND_F2"), "rank 0 of 1f1b has 0SEND_F2 before 0F2"),
    ("zbv lowered", 1, swapped("6I1", "6SEND_B1"), "rank 1 of zbv has 6SEND_B1 before 6I1 or 6B1"),
    ("1f1b lowered", 1, swapped("1F1", "1RECV_F1"), "rank 1 of 1f1b has 1F1 before 1RECV_F1"),
    (
        "1f1b lowered",
        1,
        later("1RECV_F3", after="1SEND_B0"),
        "received: rank 0 in 0SEND_F3, rank 1 in 1SEND_B0",
    ),
]


@pytest.mark.parametrize(("table", "rank", "change", "message"), FAULTS, ids=[told for *_, told in FAULTS])
def test_a_planted_fault_is_refused(table, rank, change, message):
    name, *lowered = table.split()
    right = lower(make(name, 4, 8)) if lowered else make(name, 4, 8)
    check(right)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(edit(right, rank, change))


def test_an_unknown_kind_is_refused():
    table = make("1f1b", 1, 1)
    with pytest.raises(ConfigError, match="has 0X0 of unknown kind: choose from F, B, I, W, SEND_F"):
        check(replace(table, rows=((Action(0, "X", 0), *table.rows[0]),)))


def test_it_says_how_many_micro_batches_each_rank_holds_at_most():
    assert check(make("gpipe", 2, 6)) == (6, 6)
    assert check(make("1f1b", 2, 6)) == (2, 1)


def naively_lowered(schedule):
    """Each receive right before its use, each send right after its making: what one would write first."""
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for row, actions in zip(rows, schedule.rows, strict=True):
        for action in actions:
            source = schedule.source(action)
            if source and schedule.stage_ranks[source[0]] != schedule.stage_ranks[action.stage]:
                row.append(action._replace(kind=RECV_F if action.kind == F else RECV_B))
            row.append(action)
            row += messages(schedule, action)[:1]
    return replace(schedule, rows=tuple(map(tuple, rows)))


@pytest.mark.parametrize("name", KINDS)
def test_naive_sends_and_receives_hang_where_sends_block_and_lowered_ones_do_not(name):
    table = make(name, 4, 8)
    check(lower(table))
    naive = naively_lowered(table)
    if name == "gpipe":
        check(naive)
    else:
        with pytest.raises(ConfigError, match=r"hangs where sends block .*rank \d in \d(SEND|RECV)_[FB]\d"):
            check(naive)


def test_a_table_that_waits_for_itself_is_not_lowered():
    rows = (tuple(Action(0, kind, 0) for kind in (F, B)), tuple(Action(1, kind, 0) for kind in (F, B)))
    with pytest.raises(ConfigError, match="waits for itself: rank 0 in 0B0 for 1B0"):
        lower(Schedule("mine", (0, 1), 1, (rows[0], (Action(1, F, 1), *rows[1][::-1]))))
