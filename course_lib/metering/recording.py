"""Recording of some ranks, line by line and call by call, on one clock, kept as one JSON file.

A recording is a dictionary that JSON can hold; all times are whole microseconds from its beginning:

    code       of each function that was followed its ``name``, ``file``, ``first`` line number and ``lines`` of source
    variables  their names
    until      when the last rank had ended, or was ended by the launcher
    ranks      of each rank
        lines      [time, place in ``code`` or -1, line number]
        values     [time, place in ``variables``, text]
        calls      [start, end or null, name, bytes, dtype, ranks that take part, bytes that this rank sends]
        waits      [begin, end or null]: it stood still for a call
        held       [time, bytes of living tensors]
        end        ``how`` ("returned", "raised", "died", "never returned"), ``at``, ``said``, ``waits_for``: ranks
    links      ``of``: [rank, place in its ``calls``] of each that takes part in a message, its sender first, or in a
               collective; ``fits`` is false where these are different operations, payloads or dtypes
"""

import inspect
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.launching.launch import RankError, RanksHung, launch
from course_lib.metering import rank_clocks
from course_lib.metering.recorder import HeldBytes, RankRecorder
from course_lib.writing import write_text

Recording = dict[str, Any]
LIMIT_BYTES = 300_000
"""Size of a recording's file, which a page loads, at most."""
SYNC_ROUNDS = 20


def record(
    prepare: Callable[[], Callable[[], Any]],
    functions: Sequence[Callable[..., Any]],
    *,
    variables: Sequence[str] = (),
    num_processes: int = 2,
    timeout: float = 30.0,
) -> Recording:
    """Run something on N ranks of this machine, over gloo, and record what they do.

    A rank that raises, dies or hangs is no error here: the recording has it.

    Args:
        prepare: called on each rank within a process group; returns the function to record, which takes nothing.
        functions: whose lines are followed and shown.
        variables: names of their locals to follow, or of attributes of these, as ``self.missing``.
        num_processes: ranks.
        timeout: seconds until ranks that still run are ended.
    Raises:
        RankError: a rank failed before anything was recorded.
        RanksHung: the same, by hanging.
    """
    error: RankError | RanksHung | None = None
    with tempfile.TemporaryDirectory(prefix="course-recording-") as name:
        folder = Path(name)
        try:
            launch(
                _on_rank,
                folder,
                prepare,
                tuple(functions),
                tuple(variables),
                num_processes=num_processes,
                timeout=timeout,
                device="cpu",
                stream=False,
            )
        except (RankError, RanksHung) as problem:
            error = problem
        until = round(time.perf_counter() * 1e6)
        events = [_read(folder / f"{rank}.jsonl") for rank in range(num_processes)]
    if error is not None and not all(rank and rank[0][0] == "begin" for rank in events):
        raise error
    offsets = rank_clocks.offsets([rank[0][2] for rank in events])
    # from the first line on: before it the hooks are put in place
    begun = min(
        next((event[1] for event in rank if event[0] == "line"), rank[0][1]) - round(offset.seconds * 1e6)
        for rank, offset in zip(events, offsets, strict=True)
    )
    ranks = [
        _rank(rank[1:], begun + round(offset.seconds * 1e6), until - begun)
        for rank, offset in zip(events, offsets, strict=True)
    ]
    for rank, lane in enumerate(ranks):
        if lane["end"]["how"] == "never returned" and isinstance(error, RankError) and rank == error.rank:
            last = max(event[1] for event in events[rank]) - begun - round(offsets[rank].seconds * 1e6)
            lane["end"] |= {"how": "died", "at": last, "said": error.failure.summary}
    groups = [lane.pop("groups") for lane in ranks]
    links = _links(ranks, groups)
    _say_who_waits(ranks, groups)
    return {
        "code": [section(function) for function in functions],
        "variables": list(variables),
        "until": max(lane["end"]["at"] for lane in ranks),
        "ranks": ranks,
        "links": links,
    }


def section(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's source as a recording has it."""
    lines, first = inspect.getsourcelines(function)
    file = inspect.getsourcefile(function) or ""
    root = Path(__file__).parents[2]
    shown = Path(file).relative_to(root).as_posix() if Path(file).is_relative_to(root) else Path(file).name
    return {
        "name": function.__qualname__,
        "file": shown,
        "first": first,
        "lines": [line.rstrip("\n") for line in lines],
    }


def write(recording: Recording, path: Path) -> int:
    """Write a recording, each kind of a rank's events as a line; returns the file's size in bytes.

    Raises:
        ValueError: it is too large for a page.
    """
    ranks = ",\n".join(_lines(rank) for rank in recording["ranks"])
    rest = {key: value for key, value in recording.items() if key != "ranks"}
    text = _lines(rest)[:-1] + f',\n"ranks":[{ranks}]}}\n'
    size = len(text.encode())
    if size > LIMIT_BYTES:
        raise ValueError(f"{path.name} would have {size} bytes, and the limit is {LIMIT_BYTES}: record less")
    write_text(path, text)
    return size


def _lines(values: dict[str, Any]) -> str:
    """An object with a line for each of its values."""
    written = (
        f"{json.dumps(key)}:{json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
        for key, value in values.items()
    )
    return "{" + ",\n".join(written) + "}"


def _on_rank(
    folder: Path,
    prepare: Callable[[], Callable[[], Any]],
    functions: Sequence[Callable[..., Any]],
    variables: Sequence[str],
) -> None:
    dist.init_process_group("gloo")
    one = torch.ones(1)
    with HeldBytes() as held:
        recorder = RankRecorder(folder / f"{os.environ['RANK']}.jsonl", functions, variables, held)
        play = prepare()
        stamps = rank_clocks.exchange(lambda: dist.all_reduce(one), SYNC_ROUNDS)
        dist.barrier()
        recorder.begin(stamps)
        with recorder:
            play()


def _read(path: Path) -> list[list[Any]]:
    """A rank's events; the last one may be cut off."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _rank(events: Sequence[Sequence[Any]], zero: int, until: int) -> dict[str, Any]:
    """One rank's part of the recording, with the group of each call beside it."""
    lane: dict[str, Any] = {
        "lines": [],
        "values": [],
        "calls": [],
        "waits": [],
        "held": [],
        "groups": [],
        "end": {"how": "never returned", "at": until, "said": "", "waits_for": []},
    }
    for kind, at, *rest in events:
        at = max(0, at - zero)
        if kind in ("line", "value", "held"):
            lane[f"{kind}s" if kind != "held" else kind].append([at, *rest])
        elif kind == "call":
            _, name, size, dtype, ranks, group, sent = rest
            lane["calls"].append([at, None, name, size, dtype, ranks, sent])
            lane["groups"].append(group)
        elif kind == "done":
            lane["calls"][rest[0]][1] = at
        elif kind == "wait":
            lane["waits"].append([at, None])
        elif kind == "woke":
            next(wait for wait in reversed(lane["waits"]) if wait[1] is None)[1] = at
        elif kind == "end":
            lane["end"] |= {"how": rest[0], "at": at, "said": rest[1]}
    return lane


Key = tuple[Any, ...]


def _keys(lane: dict[str, Any], groups: Sequence[str]) -> list[Key]:
    """What a call has in common with the others' calls of the same operation: its place in the order of its group's
    collectives, or in that of the messages from one rank to another."""
    counts: dict[Key, int] = defaultdict(int)
    keys = []
    for (_, _, name, _, _, ranks, _), group in zip(lane["calls"], groups, strict=True):
        ends = tuple(ranks) if name == "send" else tuple(reversed(ranks)) if name == "recv" else ()
        keys.append((group, ends, counts[group, ends]))
        counts[group, ends] += 1
    return keys


def _links(ranks: Sequence[dict[str, Any]], groups: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The calls that belong together."""
    members: dict[Key, list[list[int]]] = defaultdict(list)
    for rank, lane in enumerate(ranks):
        for place, key in enumerate(_keys(lane, groups[rank])):
            members[key].append([rank, place])
    links = []
    for (_, ends, _), of in members.items():
        if len(of) > 1:
            calls = [ranks[rank]["calls"][place] for rank, place in of]
            names = {"send" if call[2] == "recv" else call[2] for call in calls}
            sizes = {(call[3], call[4]) for call in calls} if "all_to_all" not in names else set()
            links.append(
                {
                    "of": sorted(of, key=lambda end: end[0] != ends[0]) if ends else of,
                    "fits": len(names) == 1 and len(sizes) < 2,
                }
            )
    return links


def _say_who_waits(ranks: Sequence[dict[str, Any]], groups: Sequence[Sequence[str]]) -> None:
    """For each rank that has not returned, whom its oldest open call waits for."""
    keys = [_keys(lane, groups[rank]) for rank, lane in enumerate(ranks)]
    for rank, lane in enumerate(ranks):
        unfinished = [place for place, call in enumerate(lane["calls"]) if call[1] is None]
        if lane["end"]["how"] != "returned" and unfinished:
            call, key = lane["calls"][unfinished[0]], keys[rank][unfinished[0]]
            others = [other for other in call[5] if other != rank]
            missing = [other for other in others if key not in keys[other]]
            differing = [
                other
                for other in others
                if key in keys[other] and not key[1] and ranks[other]["calls"][keys[other].index(key)][2] != call[2]
            ]
            lane["end"] |= {"waits_for": missing or differing, "in": call[2]}
