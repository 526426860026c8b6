"""Stretches of time as lists: joined, and what two lists have in common."""

from collections.abc import Sequence

Interval = tuple[float, float]
"""Begin and end, in seconds."""


def united(intervals: Sequence[Interval]) -> list[Interval]:
    """The same stretches, disjoint and in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def common(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Intersection of two disjoint ordered lists, in one pass over both."""
    shared, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            shared.append((start, end))
        i, j = (i + 1, j) if left[i][1] < right[j][1] else (i, j + 1)
    return shared
