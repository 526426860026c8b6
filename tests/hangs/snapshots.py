"""Snapshots of ranks and their calls, made by hand."""

from course_lib.hangs.diagnosis import diagnose
from course_lib.hangs.rank_state import ENDED, WAITED_FOR, Call, RankSnapshot, digest

USUAL = {"stream": "0", "shape": (4,), "dtype": "float32", "tensors": 1, "ranks": (0, 1), "peer": None, "root": None}
"""Of a call."""


def call(sequence, name="all_reduce", state=ENDED, **fields):
    place = {"serial": sequence, "step": sequence, "at": float(sequence), "line": 10, "file": "train.py"}
    return Call(**USUAL | place | fields, sequence=sequence, name=name, state=state)


def p2p(kind, source, target, sequence=1, state=WAITED_FOR, **fields):
    peer = target if kind == "send" else source
    return call(sequence, kind, state, stream=f"0:{source}>{target}:{kind}", peer=peer, **fields)


def rank(number, *calls, life="running", **more):
    orders = {}
    for each in calls:
        orders[digest(each.stream)] = max(each.sequence, orders.get(digest(each.stream), 0))
    usual = {"stalled": 9.0, "placed_at": 99.0, "words": {"file": "train.py", "line": 70 + number}}
    return RankSnapshot(number, life, pid=100 + number, host="here", calls=calls, orders=orders, **usual | more)


def blamed(*snapshots):
    """Of each culprit: rank, what, collective, its number in the group, line."""
    return [(v.rank, v.what, v.collective, v.sequence, v.line) for v in diagnose(snapshots)]
