"""A trusted rank beside the learner's: it sees what their all-reduces give, where no code of an answer runs.

In one more case of two ranks, rank 1 is a trusted process, which no process of the answer can read, write or trace. It
joins each all-reduce that rank 0 announces, and brings one number in every place, which is drawn outside and handed to
it alone. Who reached the result in another way than by what was sent, and who sent something else of that size, has
neither that number in the result nor its own values in what arrived here; who noted what was never sent is not met.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib.grading.rules import array, items, made_by, short
from course_lib.grading.task import Case, Finding, Malformed, Miss, Observation, Task

RANK = 1
TOLERANCE = 1e-4  # as in `rules.near`, of the largest value
FOLLOWED = ("float64", "float32", "float16", "bfloat16", "int64", "int32")
MAX_BYTES = 16 << 20  # of one all-reduce


@dataclass(frozen=True)
class PeerMeeting:
    """The case in which the learner's rank meets ours.

    Attributes:
        case: for the learner's rank like any other of two ranks.
        number: that ours brings.
    """

    case: Case
    number: float


def meeting(task: Task) -> PeerMeeting:
    """A new one, from the system's own randomness."""
    rng = random.SystemRandom()
    while (case := rng.choice(task.cases(rng))).world_size != 2:
        continue
    return PeerMeeting(case, rng.randrange(64, 640) / 64)


def follow(announced: int, number: float) -> dict[str, Any]:
    """Join what is announced, until the end of that pipe.

    Args:
        announced: descriptor of lines ``all_reduce 4096 torch.float32``.
        number: value of each element that this rank contributes.
    Returns:
        ``joined``, what came about, as `rules.made_by` has it; ``arrived``, the all-reduces' results one behind the
        other, fp64; ``left``, what was announced and is neither an all-reduce nor a barrier, else None: then this rank
        leaves, and what rank 0 waits for fails.
    """
    import torch
    import torch.distributed as dist

    joined: list[str] = []
    arrived: list[np.ndarray] = [np.zeros(0)]
    left = None
    with os.fdopen(announced, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, size, dtype = line.split()
            kind = dtype.removeprefix("torch.")
            if name == "barrier":
                dist.barrier()
                joined.append(f"{name} {size}")
                continue
            if name != "all_reduce" or kind not in FOLLOWED or int(size) > MAX_BYTES:
                left = f"{name} of {size} bytes of {kind}"
                break
            torch_dtype = getattr(torch, kind)
            tensor = torch.full((int(size) // torch_dtype.itemsize,), number, dtype=torch_dtype)
            dist.all_reduce(tensor)
            joined.append(f"{name} {size}")
            arrived.append(tensor.double().numpy())
    return {"joined": joined, "arrived": np.concatenate(arrived), "left": left}


def judge(task: Task, meeting: PeerMeeting, seen: Sequence[Observation]) -> list[Finding]:
    """Findings that the meeting shows: the result's by `_right`, the other properties' by `_told`."""
    assert task.met is not None
    findings = []
    for name in task.properties:
        try:
            miss = _right(task, meeting, seen) if name == task.met.property else _told(seen)
        except Malformed as malformed:
            miss = malformed.miss
        findings.append(
            Finding(name, True, None, "", "")
            if miss is None
            else Finding(name, False, miss.rank, miss.expected, miss.found)
        )
    return findings


def parted(task: Task, left: str) -> list[Finding]:
    """Findings where the trusted rank could not join, because the answer bypassed it."""
    assert task.met is not None
    return [Finding(task.met.property, False, 0, "all-reduces with its peer", short(left))]


def _told(seen: Sequence[Observation]) -> Miss | None:
    """Whether rank 0's notes are what took place here."""
    told, joined = made_by(seen, 0), items(seen, RANK, "joined", str)
    return (
        None
        if told == joined
        else Miss(f"what its peer saw: {short(', '.join(joined) or 'nothing')}", short(", ".join(told) or "nothing"), 0)
    )


def _right(task: Task, meeting: PeerMeeting, seen: Sequence[Observation]) -> Miss | None:
    """Whether the result is the mean of what both brought, and what rank 0 had to bring has arrived."""
    assert task.met is not None
    brought = np.asarray(task.met.brings(meeting.case), dtype=np.float64)
    result, arrived = array(seen, 0, task.met.key, brought.shape), np.sort(array(seen, RANK, "arrived"))
    near = TOLERANCE * float(np.abs(brought).max() + meeting.number)
    for mean, sent in (
        ((brought + meeting.number) / 2, brought + meeting.number),  # divided after it was sent
        (brought / 2 + meeting.number, brought / 2 + meeting.number),
    ):  # or before
        if np.allclose(result, mean, rtol=0, atol=near) and _all_among(sent, arrived, near):
            return None
    return Miss("the mean with what its peer brought, by what arrived there", "another", 0)


def _all_among(values: np.ndarray, ordered: np.ndarray, near: float) -> bool:
    if not ordered.size:
        return False
    after = np.searchsorted(ordered, values).clip(0, ordered.size - 1)
    gap = np.minimum(np.abs(ordered[after] - values), np.abs(ordered[(after - 1).clip(0)] - values))
    return bool((gap <= near).all())
