"""One collective as one rank saw it, and what the ring model says that a rank sends. Nothing here imports torch."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank saw it.

    Attributes:
        name: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all``, ``broadcast``, ``reduce``,
            ``gather``, ``scatter``, ``send``, ``recv`` or ``barrier``.
        bytes: the whole payload: for all_gather and gather what has been gathered, for reduce_scatter and
            scatter what is to be scattered, for all_to_all what this rank hands in.
        dtype: of the payload; for a barrier uint8 of no elements. Its name, where a log was read.
        ranks: global ranks that take part, this rank and its peer for send and recv.
        start: seconds on ``time.perf_counter``'s clock, when it was issued.
        end: when the transfer had ended; where the backend doesn't tell (gloo's send, recv and reduce-scatter),
            when this rank had waited for it; NaN where neither was before the end of the measured stretch.
        sent: bytes that this rank sends under the ring model, see `ring_bytes`.
        axis: of the ranks, see :func:`course_lib.metering.collective_log.axis_of`.
        group: torch's name of the process group.
    """

    name: str
    bytes: int
    dtype: "torch.dtype | str"
    ranks: tuple[int, ...]
    start: float
    end: float
    sent: int
    axis: str = "world"
    group: str = ""

    @property
    def ended(self) -> bool:
        """Whether the transfer had ended when its rank did."""
        return not math.isnan(self.end)

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, such as ``float32``."""
        return str(self.dtype).removeprefix("torch.")


def ring_bytes(name: str, size: int, ranks: int, position: int = 0, root: int = 0) -> int:
    """Bytes that one rank sends when a collective is done over a ring, or straight to the peer.

    all_reduce 2(N-1)/N x size; reduce_scatter, all_gather and all_to_all (N-1)/N x size; broadcast: everyone
    passes it on but the last in the ring; reduce: everyone but the root; gather: everyone but the root sends
    1/N of it; scatter: the root sends (N-1)/N of it; send its size; recv and barrier nothing.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009, section 3.

    Args:
        name: of the collective, one of those above.
        size: payload in bytes, as in `Collective.bytes`.
        ranks: N.
        position: of this rank in the group, for those with a root.
        root: the root's position in the group.
    """
    others = ranks - 1
    shares = {
        "all_reduce": 2 * others / ranks,
        "reduce_scatter": others / ranks,
        "all_gather": others / ranks,
        "all_to_all": others / ranks,
        "broadcast": (position - root) % ranks != others,
        "reduce": position != root,
        "gather": (position != root) / ranks,
        "scatter": (position == root) * others / ranks,
        "send": 1,
        "recv": 0,
        "barrier": 0,
    }
    return round(shares[name] * size)
