"""Main function of a rank's process: set-up, the function, and a report of how it went.

A rank takes its output, its signals and its exit handlers away from the caller, says that it has started, waits for
a byte, runs the function, reports the outcome, waits for a second byte and ends. Waiting at the end keeps its
connections open until every rank has returned or the first cause of a failure is known.
"""

import atexit
import ctypes
import faulthandler
import gc
import io
import logging
import os
import pickle
import re
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from course_lib import torch_names
from course_lib.errors import LaunchError
from course_lib.launching.cores import usable_cores
from course_lib.launching.ended_groups import keep_destroyed_groups
from course_lib.launching.forks import Parcel, arrive

STACK_SIGNAL = signal.SIGUSR2  # SIGUSR1 asks a trainer for a checkpoint

# What a rank says when it is not the culprit but the one that was talking to it (gloo, NCCL, TCPStore).
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|remote process exited|failed to recv|"
    r"connectFullMesh failed",
    re.IGNORECASE,
)

_OF_GROUPS = tuple(os.path.join("torch", *path) for path in (("distributed",), ("_ops.py",), ("autograd",)))
"""Where Python goes over into what talks to other ranks."""


class RankEnds(NamedTuple):
    """A rank's ends of its pipes to the caller."""

    control: Connection
    """Reports to the caller; a byte back to start, a byte to end."""
    output: Connection
    """What the rank prints."""
    stacks: Connection
    """The Python stack of each thread, whenever STACK_SIGNAL arrives."""


@dataclass(frozen=True)
class Started:
    """A rank waits for its first byte."""

    pid: int


@dataclass(frozen=True)
class Returned:
    """The function returned."""

    value: bytes
    """Its return value, pickled."""


@dataclass(frozen=True)
class Failure:
    """The function raised, or the rank died."""

    summary: str
    """What the rank did, to follow `rank 1`: `raised ValueError: ...`, `was killed by SIGKILL`."""
    at: float
    """When, by time.monotonic(), which ranks and caller share."""
    consequence: bool
    """True where it looks like another rank's failure seen from here."""
    traceback: str = ""
    cause: bytes | None = None
    """The exception, pickled; None where it cannot be."""


@dataclass(frozen=True)
class RankJob:
    """Job of each rank; called with the rank, in the rank's own process."""

    call: Callable[[], Any] | Parcel
    """The call to make; a parcel where the process does not inherit the caller's memory."""
    ends: tuple[RankEnds, ...]
    port: int
    """Where the ranks' store listens on 127.0.0.1."""
    device: str
    """`cpu` or `cuda`."""

    def __call__(self, rank: int) -> None:
        run_rank(self, rank)


# In a stack as faulthandler writes it, these two are known by their names: below the first are no frames of the
# function that was launched, below the second none of the rank.


def call_launched(call: Callable[[], Any]) -> Any:
    """Call the function that was launched."""
    return call()


def run_rank(job: RankJob, rank: int) -> None:
    """All that a rank does, from its start to its end."""
    ends = job.ends[rank]
    for other in job.ends:
        if other is not ends:
            for end in other:
                end.close()
    if isinstance(job.call, Parcel):
        arrive()
        job.call.settle()
    be_rank(rank, len(job.ends), job.port)
    leave_caller()
    gc.freeze()  # a collection would look through, and so copy, all that the caller had: most of a small step
    redirect_output(ends.output.fileno())
    faulthandler.register(STACK_SIGNAL, file=ends.stacks.fileno(), all_threads=True, chain=False)

    _send(ends.control, Started(os.getpid()))
    os.read(ends.control.fileno(), 1)
    outcome = _outcome(job, rank)
    _flush()
    _send(ends.control, outcome)
    os.read(ends.control.fileno(), 1)
    atexit._run_exitfuncs()
    _flush()
    if isinstance(job.call, Parcel):
        os._exit(0)  # a spawned interpreter would run its exit functions a second time


def _outcome(job: RankJob, rank: int) -> Returned | Failure:
    # Everything that a rank can raise is for the caller to see, SystemExit and KeyboardInterrupt too.
    try:
        _set_up(rank, len(job.ends), job.device)
        call = job.call.open() if isinstance(job.call, Parcel) else job.call
        return Returned(_pickle_value(call_launched(call), rank))
    except BaseException as error:
        return _failure(error)


def forget_accelerators() -> None:
    """Let a forked process make an Accelerator of its own, whatever its caller made for itself."""
    state = sys.modules.get("accelerate.state")
    if state:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def forget_meshes() -> None:
    """Clear DTensor's caches, whose results hold the mesh that they were first computed for.

    DTensor takes two meshes of the same ranks for equal, whichever of these ranks the process is and whether or not the
    groups still exist. Two ranks forked from a process that had been rank 0 of two would both have coordinate 0.
    """
    room = "torch.distributed.tensor."
    dtensor, redistributing = sys.modules.get(room + "_api"), sys.modules.get(room + "_redistribute")
    if dtensor and redistributing:
        torch_names.clear_caches(dtensor.DTensor._op_dispatcher.sharding_propagator, redistributing)


def be_rank(rank: int, num_processes: int, port: int) -> None:
    """Set the environment of a process group over this machine, whose store the caller hosts at a port."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_processes),
        LOCAL_WORLD_SIZE=str(num_processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def leave_caller() -> None:
    """Cut what a forked process shares with the caller: signals, exit handlers, threads, the notebook's sockets."""
    os.setsid()
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # Linux: a killed caller takes its ranks along
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    atexit._clear()
    # In a fork torch makes its pool of threads and its autograd engine anew at the first call. Of two threads that call
    # at once, one gets no pool ("Invalid thread pool!") or a half-made engine (a segmentation fault), so both are made
    # while there is one thread: the second by the engine's cheapest question.
    torch.set_num_threads(torch.get_num_threads())
    torch.autograd.Variable._execution_engine.is_checkpoint_valid()
    forget_accelerators()
    forget_meshes()
    shell = sys.modules.get("IPython.core.interactiveshell")
    if shell and shell.InteractiveShell.initialized():
        # display() prints from here on, and what is imported later sees a plain Python.
        type(shell.InteractiveShell.instance()).clear_instance()
    if "tqdm.notebook" in sys.modules:
        # Bars that are widgets in the notebook become text: without its own methods the class is its text parent.
        widget_bar = sys.modules["tqdm.notebook"].tqdm_notebook
        for name in [name for name, member in vars(widget_bar).items() if callable(member) or name == "colour"]:
            delattr(widget_bar, name)


def redirect_output(descriptor: int) -> None:
    """Send this process's output, C code's and its loggers' included, to a descriptor, at each end of a line."""
    before = (sys.stdout, sys.stderr)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (
        open(standard, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for standard in (1, 2)
    )
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and any(handler.stream is stream for stream in before):
                handler.stream = sys.stderr
    faulthandler.enable(file=sys.stderr)


def _set_up(rank: int, num_processes: int, device: str) -> None:
    """The share of the cores, the device, and how process groups end."""
    keep_destroyed_groups()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Left to itself gloo takes the address of the host's name, which offline machines cannot always resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, usable_cores() // num_processes)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    if device == "cuda":
        if torch.cuda._is_in_bad_fork():
            raise LaunchError(
                "CUDA was used in this process before launch()",
                "leave start_method out, or restart the kernel and leave the GPU alone before launch()",
            )
        # Batches of many lengths leave holes in the allocator's fixed segments. torch reads it at its first allocation.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, where Accelerate imports it, warns of a guess


class _ValuePickler(pickle.Pickler):
    """Tensors go by value, on the CPU, detached, and no more of their storage than they show."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        copy = value.detach().to("cpu", copy=True)
        if isinstance(value, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, value.requires_grad)
        return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _pickle_value(value: Any, rank: int) -> bytes:
    out = io.BytesIO()
    try:
        _ValuePickler(out, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        raise unreturnable(rank, type(value).__name__, error) from None
    return out.getvalue()


def unreturnable(rank: int, kind: str, error: Exception) -> LaunchError:
    """The error for a return value that pickle cannot carry from a rank to the caller."""
    return LaunchError(
        f"rank {rank} returned a {kind}, which cannot be sent to the caller ({error})",
        "return numbers, strings, tensors, or lists and dicts of them",
    )


def _failure(error: BaseException) -> Failure:
    at = time.monotonic()
    frames = error.__traceback__
    while frames and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        cause: bytes | None = pickled
    except Exception:  # an exception's own reduction may raise anything; its text has been taken
        cause = None
    return Failure(
        summary="raised " + traceback.format_exception_only(error)[-1].strip(),
        at=at,
        consequence=is_consequence(error),
        traceback="".join(traceback.format_exception(type(error), error, frames or error.__traceback__)),
        cause=cause,
    )


def is_consequence(error: BaseException) -> bool:
    """Whether an exception looks like another rank's failure seen from here.

    A connection may be anybody's, such as a tracking server's: it has to be gloo, NCCL or the store that lost it.
    """
    if not isinstance(error, (RuntimeError, OSError)) or not _CONSEQUENCE.search(str(error)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return (
        type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
        or "gloo/" in str(error)
        or (bool(frames) and any(place in frames[-1].filename for place in _OF_GROUPS))
    )


def _send(control: Connection, message: Started | Returned | Failure) -> None:
    """A length of 8 bytes, then the message: what the caller can read piecemeal, without ever blocking on a rank."""
    payload = pickle.dumps(message)
    unsent = memoryview(struct.pack("!Q", len(payload)) + payload)
    while unsent:
        unsent = unsent[os.write(control.fileno(), unsent) :]


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
