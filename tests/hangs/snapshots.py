"""Snapshots of ranks, made by hand."""

from course_lib.hangs.rank_state import RankSnapshot, digest

USUAL = {"stream": "0", "shape": (4,), "dtype": "float32", "tensors": 1, "ranks": (0, 1), "peer": None, "root": None}
"""Of a call."""


def rank(number, *calls, life="running", **more):
    orders = {}
    for each in calls:
        orders[digest(each.stream)] = max(each.sequence, orders.get(digest(each.stream), 0))
    return RankSnapshot(
        number,
        life,
        pid=100 + number,
        host="here",
        calls=calls,
        orders=orders,
        **{"stalled": 9.0, "placed_at": 99.0, "words": {"file": "train.py", "line": 70 + number}, **more},
    )
