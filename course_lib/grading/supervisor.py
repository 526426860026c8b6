"""Trusted process inside the sandbox, which starts the ranks; the ranks run the learner's code.

The trusted process is the namespace's process 1, never runs a line of the answer, and cannot be traced, read or killed
by one that does. It hands a case's inputs over only when every rank is ready, to each without what is another's own,
and reads the kernel's count of what went through the loopback from then until the last observation. What a rank writes
it passes on as bytes.

Standard input, each part behind its length: the job, then a case's inputs for each case. Standard output: STARTED, then
records of case, rank, length and so many packed bytes; rank WIRE is the trusted process itself. In the job's case `met`
rank 1 is a trusted process too (`course_lib.grading.trusted_peer`), and has an input of its own behind the others'.
"""

import contextlib
import ctypes
import functools
import importlib
import os
import resource
import selectors
import signal
import struct
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from course_lib.grading import own_code, trusted_peer
from course_lib.grading.serialize import NotPlain, pack, unpack
from course_lib.grading.task import Case, Task

STARTED = b"started\n"
RECORD = struct.Struct("<IiQ")  # case, rank, length
LENGTH = struct.Struct("<Q")
WIRE = -1
READY = b"ready"
GRACE_SECONDS = 2.0  # for the other ranks, when one has failed: some may still have something to say
ERROR_CHARACTERS = 400
ANSWER = "<answer>"  # what its text is compiled under
THREADS = 8  # a process; the kernel counts threads where it limits processes
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36


def main() -> None:
    """Grade the job on standard input; never returns."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process of the answer may read our memory or our open files
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    out = os.dup(1)
    job = unpack(_read_part(0))
    task = _task(job["module"], job["task"])
    if task.needs_ranks or "torch" in job["source"]:
        import torch.distributed  # once, before the ranks are forked

        torch.set_num_threads(1)
    _limit(job["limits"])
    _write(out, STARTED)
    for number, world_size in enumerate(job["world_sizes"]):
        ranks = _Ranks(task, job, number, world_size, out)
        replies, wire = ranks.run()
        for rank, reply in replies.items():
            _write(out, RECORD.pack(number, rank, len(reply)) + reply)
        counted = pack(wire)
        _write(out, RECORD.pack(number, WIRE, len(counted)) + counted)
        _end_descendants()
        if not all(replies.values()) or ranks.failed():
            break
    os._exit(0)  # to take torch's modules down one by one costs a tenth of the whole grading


def _task(module: str, name: str) -> Task:
    """The task of that name; only its module is imported."""
    members = vars(importlib.import_module(module)).values()
    return next(member for member in members if isinstance(member, Task) and member.name == name)


def _limit(limits: dict[str, float]) -> None:
    """The kernel's limits on each process from here on; the parent watches what they take together."""
    seconds = int(limits["seconds"]) + 1
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits["file_size"]),
        (resource.RLIMIT_NOFILE, 512),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_NPROC, THREADS * limits["processes"]),
    ):
        resource.setrlimit(kind, (int(most), int(most)))


class _Ranks:
    """The ranks of one case, seen from the trusted process."""

    def __init__(self, task: Task, job: dict[str, Any], number: int, world_size: int, out: int):
        self.task, self.job, self.number, self.world_size, self.out = task, job, number, world_size, out
        self.most = job["limits"]["output"]
        self.ends: list[tuple[int, int]] = []  # to read from a rank and to write to it
        self.said = [bytearray() for _ in range(world_size)]
        self.open = set(range(world_size))
        self.done: list[int] = []  # in this order: what fails after another has failed may be a consequence
        self.met = number == job["met"]
        self.announced: tuple[int, ...] = os.pipe() if self.met else ()  # from rank 0 to ours

    def run(self) -> tuple[dict[int, bytes], int]:
        """Each rank's packed observation, the first to be done first, empty where it gave none; bytes on the wire."""
        for rank in range(self.world_size):
            self._start(rank)
        for descriptor in self.announced:
            os.close(descriptor)
        self._read_until(parts=1)
        given, wire = _read_part(0), 0
        inputs = [self._part(given, rank) for rank in range(self.world_size)]
        if self.met:
            inputs[trusted_peer.RANK] = _read_part(0)
        if not self.failed():
            before = _loopback_bytes()
            for (_, writer), its in zip(self.ends, inputs, strict=True):
                with contextlib.suppress(BrokenPipeError):
                    _send(writer, its)
            self._read_until(parts=2)
            wire = _loopback_bytes() - before
        for reader, writer in self.ends:
            os.close(reader)
            os.close(writer)
        ranks = dict.fromkeys([*self.done, *range(self.world_size)])
        return {rank: self._answer(rank) for rank in ranks}, wire

    def _part(self, given: bytes, rank: int) -> bytes:
        """A case's packed inputs as one rank gets them, without what is another's."""
        if self.world_size == 1 or not self.job["own"]:
            return given
        whole = unpack(given)
        return pack(whole | {name: self.task.own[name](whole[name], rank, self.world_size) for name in self.job["own"]})

    def failed(self) -> bool:
        """Whether a rank has failed."""
        return any(map(self._failed, range(self.world_size)))

    def _start(self, rank: int) -> None:
        to_us, theirs = os.pipe()
        ours, to_them = os.pipe()
        if os.fork() == 0:
            for descriptor in (to_us, to_them, self.out, *(end for pair in self.ends for end in pair)):
                os.close(descriptor)
            join = functools.partial(_join, self.job, self.number, rank, self.world_size)
            if not self.met:
                _be_rank(self.task, self.job, join, self.world_size, rank, None, ours, theirs)
            from_rank, to_peer = self.announced
            os.close(to_peer if rank == trusted_peer.RANK else from_rank)
            if rank == trusted_peer.RANK:
                _be_peer(join, from_rank, ours, theirs)
            _be_rank(self.task, self.job, join, self.world_size, rank, to_peer, ours, theirs)
        os.close(theirs)
        os.close(ours)
        self.ends.append((to_us, to_them))

    def _read_until(self, parts: int) -> None:
        """Read ``parts`` messages of each rank; once one has failed, the others have GRACE_SECONDS more."""
        deadline = float("inf")
        with selectors.DefaultSelector() as selector:
            for rank in self.open:
                selector.register(self.ends[rank][0], selectors.EVENT_READ, rank)
            while any(len(self._parts(rank)) < parts and not self._failed(rank) for rank in range(self.world_size)):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                for key, _ in selector.select(min(left, 3600.0)):
                    rank, data = key.data, os.read(key.fd, 1 << 16)
                    self.said[rank] += data
                    if not data or len(self.said[rank]) > self.most:
                        selector.unregister(key.fd)
                        self.open.discard(rank)
                    if rank not in self.done and (len(self._parts(rank)) > 1 or self._failed(rank)):
                        self.done.append(rank)
                    if self._failed(rank):
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)

    def _failed(self, rank: int) -> bool:
        """Whether a rank has ended, or said why it cannot go on."""
        parts = self._parts(rank)
        return (len(parts) < 2 and rank not in self.open) or (len(parts) > 0 and parts[0] != READY)

    def _parts(self, rank: int) -> list[bytes]:
        """The complete messages that a rank has sent."""
        said, parts, at = self.said[rank], [], 0
        while len(said) - at >= LENGTH.size:
            end = at + LENGTH.size + LENGTH.unpack_from(said, at)[0]
            if end > len(said):
                break
            parts.append(bytes(said[at + LENGTH.size : end]))
            at = end
        return parts

    def _answer(self, rank: int) -> bytes:
        if len(self.said[rank]) > self.most:
            return pack({"error": "more output than is allowed"})
        parts = self._parts(rank)
        return b"" if not parts or parts[-1] == READY else parts[-1]


def _be_rank(
    task: Task,
    job: dict[str, Any],
    join: Callable[[], None],
    world_size: int,
    rank: int,
    announces: int | None,
    reader: int,
    writer: int,
) -> None:
    """Observe the learner's function on one rank; never returns."""
    try:
        _quieten()
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        function = _function(job["source"], task.function)
        own_code.give_salt(function, rank)
        if task.needs_ranks:
            join()
        if announces is not None:
            from course_lib.grading.recorder import Recorder

            Recorder.announces = announces
        _send(writer, READY)
        case = Case(world_size, unpack(_read_part(reader)))
        observed = pack(task.observe(function, case, rank))
        if announces is not None:
            os.close(announces)
        _send(writer, observed)
        os.read(reader, 1)  # our connections stay open until the others have done
    except NotPlain as error:
        _send(writer, pack({"error": f"returned what is not plain data: {error}"[:ERROR_CHARACTERS]}))
    except BaseException as error:  # SystemExit too: what an answer raises is its result
        said = own_code.told(error, ANSWER, job["source"])
        _send(writer, pack({"error": f"raised {said}"[:ERROR_CHARACTERS]}))
    finally:
        os._exit(0)


def _be_peer(join: Callable[[], None], announced: int, reader: int, writer: int) -> None:
    """Be the rank that meets the learner's, and stay closed to its processes; never returns."""
    try:
        _quieten()
        join()
        _send(writer, READY)
        given = unpack(_read_part(reader))
        _send(writer, pack(trusted_peer.follow(announced, given["number"])))
    except Exception as error:  # as the learner's rank may do anything to the connection
        _send(writer, pack({"error": f"met {type(error).__name__}: {error}"[:ERROR_CHARACTERS]}))
    finally:
        os._exit(0)


def _join(job: dict[str, Any], number: int, rank: int, world_size: int) -> None:
    """Make the process group of a case."""
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.getcwd()}/ranks-{number}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(hours=1),
    )  # the whole of it is ended long before


def _function(source: str, name: str) -> Callable[..., Any]:
    """Run the answer's text, and take the function of that name."""
    scope = own_code.run(source, ANSWER)
    if not callable(scope.get(name)):
        raise NameError(f"the answer defines no function {name}")
    return scope[name]


def _quieten() -> None:
    """Standard input, output and error lead nowhere: what an answer prints decides nothing."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.stdin = open(os.devnull)  # noqa: SIM115


def _end_descendants() -> None:
    """Kill what a case's ranks left running; orphans are ours, as their sub-reaper."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for pid in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _loopback_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def _read_part(descriptor: int) -> bytes:
    return _read(descriptor, LENGTH.unpack(_read(descriptor, LENGTH.size))[0])


def _read(descriptor: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = os.read(descriptor, count - len(data))
        if not more:
            raise EOFError(f"{count - len(data)} bytes are missing")
        data += more
    return bytes(data)


def _send(descriptor: int, data: bytes) -> None:
    _write(descriptor, LENGTH.pack(len(data)) + data)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
