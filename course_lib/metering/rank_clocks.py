"""The ranks' clocks brought to one, with a bound on the error, by collectives alone.

No rank leaves an all_reduce before every rank has come to it. So of two ranks whose clocks differ by ``o`` (what the
other's shows when ours shows zero) each all_reduce says: the other came before we left, and we came before it left,
``came' - left <= o <= left' - came``. Many small ones leave a narrow interval, in which ``o`` surely lies: Cristian's
probabilistic clock synchronisation (1989), with a collective for the ping.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

ROUNDS = 50


class Offset(NamedTuple):
    """Seconds to take off a rank's clock to have rank 0's."""

    seconds: float
    error: float
    """Seconds that it may be wrong at most."""


def exchange(all_reduce: Callable[[], object], rounds: int = ROUNDS) -> list[tuple[float, float]]:
    """Seconds at which this rank came to each of some all_reduces and left it, by its ``time.perf_counter``.

    Args:
        all_reduce: calls a small one of all ranks, and waits until it is done.
        rounds: after one that is thrown away.
    """
    stamps = []
    for _ in range(rounds + 1):
        came = time.perf_counter()
        all_reduce()
        stamps.append((came, time.perf_counter()))
    return stamps[1:]


def offsets(stamps: Sequence[Sequence[tuple[float, float]]]) -> list[Offset]:
    """Each rank's offset from rank 0.

    Where zero may be right it is taken: ranks of one machine have one clock.

    Args:
        stamps: of each rank, what :func:`exchange` gave there.
    """
    placed = []
    for theirs in stamps:
        pairs = list(zip(stamps[0], theirs, strict=True))
        least = max((came - left for (_, left), (came, _) in pairs), default=0.0)
        most = min((left - came for (came, _), (_, left) in pairs), default=0.0)
        middle = 0.0 if theirs is stamps[0] or least <= 0 <= most else (least + most) / 2
        placed.append(Offset(middle, 0.0 if theirs is stamps[0] else max(most - middle, middle - least)))
    return placed
