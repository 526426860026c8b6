"""Best-fit packing: which texts share a row, so that few places stay empty and no text is cut that fits a row.

Sources: Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830), section 3; Johnson et al.,
"Worst-Case Performance Bounds for Simple One-Dimensional Packing Algorithms" (SIAM J. Comput. 3, 1974), by which best
fit decreasing makes at most 11/9 of the fewest rows that there could be, and 4.
"""

from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The texts of each row: longest first, each goes into the row with the least room that still holds it.

    The whole number ``rooms`` has bit r set where some row has room for r tokens: the lowest bit from ``length`` on is
    the best fit. That is a few machine words per text, whatever the number of rows.

    Args:
        lengths: tokens of each text, 1 to ``capacity``.
        capacity: tokens of a row.
    Returns:
        For each row the numbers of its texts, in the order in which they were put there; the same for the same lengths.
    Raises:
        ValueError: a text that is empty, or longer than a row.
    """
    if any(not 0 < length <= capacity for length in lengths):
        raise ValueError(f"lengths have to be 1 to {capacity}, and are {min(lengths)} to {max(lengths)}")
    packed: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # the rows that have so much room left
    rooms = 0
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        length, row, room = lengths[text], len(packed), capacity
        if large_enough := rooms >> length:
            room = length + (large_enough & -large_enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            packed.append([])
        packed[row].append(text)
        if room > length:
            by_room[room - length].append(row)
            rooms |= 1 << room - length
    return packed
