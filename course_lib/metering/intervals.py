"""Stretches of time as lists: joined, what two lists have in common, what one has beyond another."""

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


def without(whole: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Intervals of a disjoint ordered list, less what lies in ``holes``, which is one too."""
    left, first = [], 0
    for start, end in whole:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        place = first
        while place < len(holes) and holes[place][0] < end:
            if start < holes[place][0]:
                left.append((start, holes[place][0]))
            start, place = max(start, holes[place][1]), place + 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Sequence[Interval]) -> float:
    """Seconds of a disjoint list."""
    return sum(end - start for start, end in intervals)
