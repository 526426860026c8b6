"""Expected collectives of an engine, for tests: kinds, counts, bytes, axes and order.

For pytest, whose fixture ``ranks`` (:mod:`course_lib.pytest_plugin`) gives what each of several ranks did; a
:class:`~course_lib.metering.meter.Meter` of one's own will do, too.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from course_lib.launching.launch import launch
from course_lib.metering.collective import Collective
from course_lib.metering.meter import Meter


@dataclass(frozen=True)
class OnRank:
    """Observations of a function on one rank.

    Attributes:
        value: that it returned.
        collectives: that this rank issued in it, in that order.
    """

    rank: int
    value: Any
    collectives: list[Collective]


Seen = Meter | Sequence[OnRank]
"""One rank's meter, or all ranks."""


def on_ranks(
    count: int, function: Callable[..., Any], setup: Callable[[], Any] | None = None, *, timeout: float = 60.0
) -> list[OnRank]:
    """Run a function on CPU ranks over gloo, whose default process group stands, and note its collectives.

    Args:
        count: of ranks.
        function: may be one within a test; called with what ``setup`` returned, where there is one.
        setup: called before it on each rank; its collectives are not noted.
        timeout: seconds.
    Raises:
        RankError: a rank raised.
        RanksHung: the ranks did not end in time.
    """
    return launch(functools.partial(_observe, function, setup), num_processes=count, device="cpu", timeout=timeout)


def _observe(function: Callable[..., Any], setup: Callable[[], Any] | None) -> OnRank:
    dist.init_process_group("gloo")
    arguments = () if setup is None else (setup(),)
    with Meter() as meter:
        value = function(*arguments)
    return OnRank(dist.get_rank(), value, meter.collectives)


def assert_moved(
    seen: Seen,
    collective: str,
    *,
    calls: int | None = None,
    bytes: int | None = None,
    sent: int | None = None,
    axis: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Every rank issued a collective, as often and with as many bytes as said.

    Args:
        seen: what the ranks did, or one rank's meter.
        collective: as :class:`~course_lib.metering.collective_log.Collective` names it.
        calls: how many; 0: none. At least one where nothing is said.
        bytes: of payload, all calls together.
        sent: bytes that a rank sends under the ring model, all calls together.
        axis: count those over this axis alone, as :func:`~course_lib.metering.collective_log.axis_of` names it.
        dtype: count those of this type alone.
    Raises:
        AssertionError: with what the first rank that differs did.
    """
    for who, collectives in _by_rank(seen):
        counted = [
            call
            for call in collectives
            if call.name == collective and axis in (None, call.axis) and dtype in (None, call.dtype)
        ]
        facts = (
            ("calls", len(counted), calls),
            ("bytes", sum(call.bytes for call in counted), bytes),
            ("sent", sum(call.sent for call in counted), sent),
        )
        differing = [f"{key} {has:,}, not {wanted:,}" for key, has, wanted in facts if wanted not in (None, has)]
        if not counted and (calls, bytes, sent) == (None, None, None):
            differing = ["none"]
        if differing:
            over = f" over {axis}" if axis else ""
            kind = f" of {str(dtype).removeprefix('torch.')}" if dtype else ""
            raise AssertionError(
                f"{who}{collective}{over}{kind}: {'; '.join(differing)}. It issued: {_told(collectives)}"
            )


def assert_order(seen: Seen, *names: str, axis: str | None = None, exactly: bool = False) -> None:
    """Every rank issued these collectives in this order; others may be between them.

    Args:
        seen: what the ranks did, or one rank's meter.
        *names: of the collectives, in order.
        axis: of those over this axis alone.
        exactly: these and no others.
    Raises:
        AssertionError: with the order on the first rank that differs.
    """
    for who, collectives in _by_rank(seen):
        issued = [call.name for call in collectives if axis in (None, call.axis)]
        left = iter(issued)
        missing = next((name for name in names if name not in left), None)  # `in` reads on to where it is
        if missing is not None or (exactly and len(issued) != len(names)):
            why = f"no {missing} at its place" if missing is not None else f"{len(issued)} calls, not {len(names)}"
            raise AssertionError(
                f"{who}{why} in the order {', '.join(names)}. It issued, in this order: "
                f"{', '.join(issued) or 'nothing'}"
            )


def _by_rank(seen: Seen) -> list[tuple[str, list[Collective]]]:
    if isinstance(seen, Meter):
        return [("", seen.collectives)]
    return [(f"rank {rank.rank}: ", rank.collectives) for rank in seen]


def _told(collectives: Sequence[Collective]) -> str:
    """Each kind once, in the order of their first calls."""
    sizes: dict[tuple[str, str, str], list[int]] = {}
    for call in collectives:
        sizes.setdefault((call.name, call.axis, call.dtype_name), []).append(call.bytes)
    kinds = (
        f"{len(calls)} x {name} over {axis or 'a group'} of {dtype}, {sum(calls):,} bytes"
        for (name, axis, dtype), calls in sizes.items()
    )
    return "; ".join(kinds) or "nothing"
