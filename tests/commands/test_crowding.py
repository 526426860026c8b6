"""More ranks than a machine has room for are said, with the figures, before they start."""

import pytest

from course_lib.commands.crowding import RANK_BYTES, crowding

GIB = 2**30


@pytest.mark.parametrize(
    ("ranks", "cores", "free", "says"),
    [
        (2, 2, 4 * GIB, []),
        (1, 1, RANK_BYTES, []),
        (4, 2, 4 * GIB, ["4 ranks share 2 cores", "--num_processes 2"]),
        (99, 1, 64 * GIB, ["99 ranks share 1 core,"]),
        (64, 64, 2 * GIB, ["64 ranks take at least 12.5 GiB before they hold a model, and 2.0 GiB are free"]),
        (99, 2, 2 * GIB, ["99 ranks share 2 cores", "19.3 GiB", "2.0 GiB are free"]),
    ],
)
def test_what_is_said(ranks, cores, free, says):
    said = crowding(ranks, cores, free)
    assert bool(said) == bool(says) and all(part in said for part in says)
    assert said is None or "\n" not in said
