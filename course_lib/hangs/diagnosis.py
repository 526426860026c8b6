"""Finds the ranks that caused a hang; a pure function of their snapshots.

A rank waits for another where it has issued a call that the other has not come to. Who is waited for and waits for
nobody is the one. Where all of them wait in a circle, each is named; and where ranks came to different calls at the
same place in a group's order, those that differ from the others, or from what followed there before. On a GPU a rank
has come to a call when its GPU has (:mod:`~course_lib.hangs.gpu_queues`).
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from course_lib.hangs.gpu_queues import POINT_TO_POINT, Queue
from course_lib.hangs.rank_state import WAITED_FOR, Call, RankSnapshot

What = Literal["dead", "stopped", "behind", "mismatched", "elsewhere"]

BUSY_FACTOR = 10
"""How many times the watchdog's seconds a rank may work without a collective or a beat: a loop without end is work."""
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")  # end when all have come
TO_ONE = ("send", "reduce", "gather")  # which one rank receives
MOST_LISTED = 8
UNEVEN = ("all_to_all", "gather", "scatter", "barrier")  # whose ranks may hand in different shapes


@dataclass(frozen=True)
class Culprit:
    """One rank that the others wait for.

    Attributes:
        what: ``dead``: its process has ended, or it has left the training by an error, or its machine is silent;
            ``stopped``: by SIGSTOP or a debugger; ``mismatched``: it issued another collective than the others, or
            another shape or dtype; ``elsewhere``: it is busy with something else in Python; ``behind``: it has left
            the training before the others, or it waits itself, in a circle.
        sentence: all of it in words.
        collective: which one the others wait in; for ``mismatched`` the one that this rank issued.
        sequence: the collective's number in its group, from 1.
        file: where the user's code on this rank was last seen, relative to the working directory.
        line: in that file.
    """

    rank: int
    what: What
    sentence: str
    collective: str | None
    sequence: int | None
    file: str | None
    line: int | None


Edges = list[tuple[RankSnapshot, Call, int]]
"""Who waits, in what, for whom."""


def diagnose(snapshots: Sequence[RankSnapshot]) -> tuple[Culprit, ...]:
    """The ranks to blame; none where all have come to the same calls, so that only the backend can be at fault.

    Args:
        snapshots: every rank's, by rank.
    """
    if mismatched := _mismatched(snapshots):
        return mismatched
    edges = _edges(snapshots)
    for lives in (("dead", "silent"), ("failed",), ("stopped",)):
        if gone := [peer for peer in snapshots if peer.life in lives]:
            return tuple(_verdict(peer, "stopped" if peer.life == "stopped" else "dead", edges) for peer in gone)
    if not edges:
        idle = [peer for peer in snapshots if peer.life == "running" and all(call.ended for call in peer.calls)]
        return tuple(_verdict(peer, "elsewhere", edges) for peer in idle)
    waiting = {who.rank for who, _, _ in edges}
    roots, tells = {whom for _, _, whom in edges} - waiting, False
    if not roots:
        circle = _circle(edges)
        free = circle - {who.rank for who, call, _ in edges if _holds_up(who, call)}
        roots, tells = free or circle, bool(free) and free != circle
    return tuple(
        _verdict(snapshots[rank], "elsewhere" if _is_elsewhere(snapshots[rank], tells) else "behind", edges)
        for rank in sorted(roots)
    )


def is_hang(snapshots: Sequence[RankSnapshot], rank: int, seconds: float) -> bool:
    """Whether those to blame have had their time, and not only those who wait for them.

    Where nobody waits in a call, as before the first one, all may be at work that does not show: they get
    BUSY_FACTOR times as long.

    Args:
        snapshots: every rank's, by rank.
        rank: who asks; it has made no progress for ``seconds`` itself.
        seconds: that a rank may go without progress.
    """
    if all(call.ended for peer in snapshots for call in peer.calls) and all(
        peer.life in ("running", "unseen", "late") for peer in snapshots
    ):
        seconds *= BUSY_FACTOR
    blamed = [snapshots[verdict.rank] for verdict in diagnose(snapshots)]
    blamed = blamed or [peer for peer in snapshots if peer.life == "running"]
    if any(peer.life == "late" for peer in blamed):
        return False
    if any(peer.life == "unseen" for peer in blamed):  # nobody can tell whether it works
        return snapshots[rank].stalled >= BUSY_FACTOR * seconds
    return all(peer.life != "running" or peer.stalled >= seconds for peer in blamed)


def _edges(snapshots: Sequence[RankSnapshot]) -> Edges:
    """Every call that waits for ranks, with these ranks."""
    edges: Edges = []
    gone = {peer.rank for peer in snapshots if peer.life in ("dead", "stopped", "silent")}
    queues = [Queue(peer) for peer in snapshots]
    for who, queue in zip(snapshots, queues, strict=True):
        if who.life not in ("running", "late"):
            continue
        for call in queue.waiting():
            edges += [
                (who, call, rank)
                for rank in _partners(call, who.rank)
                if rank in gone or not _has_come(snapshots[rank], queues[rank], call)
            ]
        for call in who.calls:
            if call.ended and call.name in TOGETHER:  # a backend may end it with an error when it loses a peer
                edges += [
                    (who, call, rank)
                    for rank in call.ranks
                    if rank in gone and not snapshots[rank].has_issued(call.stream, call.sequence)
                ]
    return edges


def _partners(call: Call, rank: int) -> list[int]:
    if call.name in POINT_TO_POINT:
        return [] if call.peer is None else [call.peer]
    return [other for other in call.ranks if other != rank]


def _has_come(partner: RankSnapshot, queue: Queue, call: Call) -> bool:
    """Whether a partner has come to its part of a call."""
    stream, sequence = _of_partner(call)
    return partner.has_issued(stream, sequence) and queue.has_come(stream, sequence)


def _of_partner(call: Call) -> tuple[str, int]:
    """Stream and number of the partner's part of a call, which for a send is its receive."""
    if call.name in POINT_TO_POINT:
        return f"{call.stream.rpartition(':')[0]}:{POINT_TO_POINT[call.name]}", call.sequence
    return call.stream, call.sequence


def _circle(edges: Edges) -> set[int]:
    """The ranks that wait for each other."""
    waited_for = {whom for _, _, whom in edges}
    ranks = {who.rank for who, _, _ in edges} & waited_for
    while outside := {
        rank
        for rank in ranks
        if not any(who.rank in ranks and whom == rank for who, _, whom in edges)
        or not any(who.rank == rank and whom in ranks for who, _, whom in edges)
    }:
        ranks -= outside
    return ranks


def _holds_up(who: RankSnapshot, call: Call) -> bool:
    """Whether a rank's main thread waits in a call; for its GPU's it waits where it spins."""
    return who.spins if call.on_gpu else call.state == WAITED_FOR


def _is_elsewhere(snapshot: RankSnapshot, tells: bool) -> bool:
    """Whether a rank to blame is busy with something else.

    With ``tells``, its waits in calls on a GPU do not count: others of its circle spin in theirs, and it does not.
    """
    return snapshot.life in ("running", "late") and not any(
        call.state == WAITED_FOR and not (tells and call.on_gpu) for call in snapshot.calls
    )


def _mismatched(snapshots: Sequence[RankSnapshot]) -> tuple[Culprit, ...]:
    """Those that issued something else at the earliest place at which ranks differ and one still waits, or died."""
    histories = [{(call.stream, call.sequence): call for call in peer.calls} for peer in snapshots]
    suspects: dict[tuple[str, int], float] = {}  # a place, and when the first rank came there
    for peer in snapshots:
        for call in peer.calls:
            if call.name not in POINT_TO_POINT and (
                not call.ended or (peer.life in ("dead", "failed") and call is peer.calls[-1])
            ):
                key = call.stream, call.sequence
                suspects[key] = min(call.at, suspects.get(key, math.inf))
    for key in sorted(suspects, key=lambda candidate: (suspects[candidate], candidate)):
        there = {rank: history[key] for rank, history in enumerate(histories) if key in history}
        kinds = Counter(_kind(call) for call in there.values())
        if len(kinds) > 1:
            right = _majority(kinds) or _precedent(histories, there)
            wrong = {rank: call for rank, call in there.items() if _kind(call) != right}
            return tuple(_mismatch(snapshots[rank], call, there) for rank, call in wrong.items())
    return ()


def _kind(call: Call) -> tuple:
    """What the ranks of a group have to agree on."""
    size = None if call.name in UNEVEN else math.prod(call.shape) * call.tensors
    return call.name, size, None if call.name == "barrier" else call.dtype, call.root


def _majority(kinds: Counter) -> tuple | None:
    (most, count), (_, next_most) = kinds.most_common(2)
    return most if count > next_most else None


def _precedent(histories: list[dict[tuple, Call]], there: dict[int, Call]) -> tuple | None:
    """What alone has come before after the call before it, on a rank that issued it; None where both have, or neither.

    A rank that evaluates once more than the others repeats a pattern, as they do.
    """
    known = {_kind(call) for rank, call in there.items() if _has_come_before(histories[rank], call)}
    return known.pop() if len(known) == 1 else None


def _has_come_before(history: dict[tuple, Call], call: Call) -> bool:
    """Whether a rank has issued such a call there before, after one like that which it has just come from."""
    last = history.get((call.stream, call.sequence - 1))
    return last is not None and any(
        _alike(earlier, last) and _alike(history.get((call.stream, earlier.sequence + 1)), call)
        for earlier in history.values()
        if earlier.stream == call.stream and earlier.sequence < last.sequence
    )


def _alike(one: Call | None, other: Call) -> bool:
    return one is not None and _at(one) == _at(other) and _kind(one) == _kind(other)


def _at(call: Call) -> tuple:
    return call.file, call.line


def _mismatch(snapshot: RankSnapshot, call: Call, there: dict[int, Call]) -> Culprit:
    others: dict[str, list[int]] = {}
    for rank, theirs in there.items():
        if _kind(theirs) != _kind(call):
            others.setdefault(f"{describe(theirs)} at {theirs.file}:{theirs.line}", []).append(rank)
    differ = ", and ".join(f"{ranks_in_words(ranks)} {text}" for text, ranks in others.items())
    sentence = f"rank {snapshot.rank} issued {describe(call)} at {call.file}:{call.line} where {differ}" + (
        f"; rank {snapshot.rank} has died of it" if snapshot.life == "dead" else ""
    )
    return Culprit(snapshot.rank, "mismatched", sentence, call.name, call.sequence, call.file, call.line)


def _verdict(snapshot: RankSnapshot, what: What, edges: Edges) -> Culprit:
    rank = snapshot.rank
    own = [(who, call) for who, call, whom in edges if whom == rank]
    last = snapshot.calls[-1] if snapshot.calls else None
    left = {(call.stream, call.sequence) for call in snapshot.calls if call.ended}
    # A call that it had left keeps nobody: who is still in it has not woken up yet.
    call = min(
        (call for _, call in own), key=lambda waited_in: (_of_partner(waited_in) in left, waited_in.at), default=last
    )
    file, line = place(snapshot)
    held_up_by = [(call, whom) for who, call, whom in edges if who.rank == rank]
    if what == "behind" and held_up_by:
        held, whom = held_up_by[0]
        sentence = f"rank {rank} waits for rank {whom} in {describe(held)} at {held.file}:{held.line}"
        return Culprit(rank, what, sentence, held.name, held.sequence, held.file, held.line)
    sentence = f"rank {rank} {_how(snapshot, what)}"
    if file and not snapshot.words.get("error"):  # which says where
        seen = "is" if what in ("elsewhere", "behind") and snapshot.life == "running" else "was last seen"
        sentence += f"; it {seen} at {file}:{line}" + (f" in step {snapshot.step + 1}" if snapshot.step >= 0 else "")
    if own and call:
        waiting = sorted({who.rank for who, waited_in in own if waited_in.stream == call.stream})
        sentence += (
            f"; {ranks_in_words(waiting)} wait{'s' if len(waiting) == 1 else ''} for it in {describe(call)}"
            f" at {call.file}:{call.line}"
        )
    elif last:
        sentence += f"; its last call was {describe(last)} at {last.file}:{last.line}"
    return Culprit(rank, what, sentence, call.name if call else None, call.sequence if call else None, file, line)


def _how(snapshot: RankSnapshot, what: What) -> str:
    """What is the matter with it, to follow its number."""
    where = f"process {snapshot.pid} on {snapshot.host}"
    if error := snapshot.words.get("error"):
        return f"has left the training with {error}"
    if snapshot.life == "dead":
        return f"is gone: {where} has ended"
    if snapshot.life == "silent":
        return f"gives no sign: {where} has been silent for {snapshot.silent:.0f} s"
    if snapshot.life == "stopped":
        return f"is stopped, by SIGSTOP or a debugger: {where}"
    if snapshot.life == "left":
        return "has ended its training before the others"
    if snapshot.life == "unseen":
        return "has not begun its training"
    return "is not in a collective" if what == "elsewhere" else "is behind"


def place(snapshot: RankSnapshot) -> tuple[str | None, int | None]:
    """File and line of the user's code that a rank was last seen in: its main thread's, or its last call's."""
    last = snapshot.calls[-1] if snapshot.calls else None
    if snapshot.words.get("file") and (last is None or snapshot.placed_at >= last.at):
        return snapshot.words["file"], snapshot.words["line"]
    return (last.file, last.line) if last else (None, None)


def describe(call: Call) -> str:
    """A call in words, such as ``broadcast #8 from rank 2 over tp (ranks 2, 3) of float32 (4, 2)``.

    Of the group of all ranks nothing is said; any other is told by its axis of a mesh or its name, and its ranks.
    """
    kind = f" of {call.tensors} x" if call.tensors > 1 else " of"
    size = f"{kind} {call.dtype} {call.shape}" if call.dtype else ""
    other = call.root if call.peer is None else call.peer
    end = "" if other is None else f" {'to' if call.name in TO_ONE else 'from'} rank {other}"
    members = f" ({ranks_in_words(call.ranks)})" if call.ranks else ""
    group = "" if call.axis == "world" else f" over {call.axis or 'a group'}{members}"
    return f"{call.name} #{call.sequence}{end}{group}{size}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0, 2``; of many those between the first and the last are not listed."""
    numbers = sorted(ranks)
    if len(numbers) > MOST_LISTED:
        return f"{len(numbers)} ranks from {numbers[0]} to {numbers[-1]}"
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
