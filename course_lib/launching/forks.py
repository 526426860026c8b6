"""From what a process is forked: from the caller, or from a clean process where there are GPUs.

On a machine with GPUs a process that has run one backward pass cannot be forked any more, whatever device it ran on:
at its first one the autograd engine starts a thread for each device (torch/csrc/autograd/engine.cpp,
start_device_threads), and a backward in a forked process then raises. AdamW's step asks for the device's stream
(torch/optim/optimizer.py, _accelerator_graph_capture_health_check), which a forked process may not do either once the
driver was used. So there ranks are forked from the standard library's fork server, which imports what they need and
does nothing else. So are they where threads of OpenMP cannot be ended before a fork (`course_lib.launching.openmp`).
"""

import contextlib
import functools
import importlib
import io
import json
import multiprocessing
import operator
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from course_lib.errors import LaunchError
from course_lib.launching import openmp
from course_lib.replacing import replaced
from course_lib.torch_names import current_accelerator

PLAN = "COURSE_PRELOAD"
"""Environment variable of the fork server: what it imports first, and its own environment."""
PRELOADED = ("torch.distributed", "torch._dynamo", "accelerate", "transformers")
PROBE_SECONDS = 60.0

_server: Any = forkserver._forkserver
_clean = False  # whether this process came from the fork server
_proven: set[int] = set()  # process ids of fork servers whose processes can train
_one_at_a_time = threading.Lock()


def accelerators() -> int:
    """Devices for which autograd starts threads: GPUs, and what else torch calls an accelerator."""
    return torch.accelerator.device_count()


def unused_accelerator() -> str | None:
    """The type of accelerator that torch sees and the course does not use, such as Intel's ``xpu``; None for none.

    It uses ``mps`` and ``cuda``, which AMD's GPUs are called, too (ROCm).
    """
    accelerator = current_accelerator()
    if accelerator is None or accelerator.type in ("cuda", "mps"):
        return None
    return accelerator.type


def default_start_method() -> str:
    """`spawn` on macOS, `fork` where it can train, else `forkserver`, or `spawn` where that cannot serve."""
    if sys.platform == "darwin":
        return "spawn"
    if not from_server() or (_clean and not why_not_fork("cpu")):
        return "fork"
    try:
        serve()
    except LaunchError as error:
        print(f"{error.what}: the ranks are spawned, which takes some seconds each")
        return "spawn"
    return "forkserver"


def from_server() -> bool:
    """Whether clean processes come from the fork server here, rather than from the caller."""
    return sys.platform != "darwin" and bool(accelerators() or openmp.unending())


def why_not_fork(device: str) -> str:
    """Reason why a process forked here could not train on a device; empty where it can. With GPUs here, one tries."""
    if libraries := openmp.unending():
        return f"threads of {', '.join(libraries)} cannot be ended before a fork"
    if not accelerators():
        return ""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch warns of what is told here
            os.write(writer, _try_to_train(device).encode()[:4096])
        finally:
            os._exit(0)
    os.close(writer)
    with Connection(reader) as end:
        in_time = end.poll(PROBE_SECONDS)
        said = os.read(reader, 4096).decode(errors="replace") if in_time else f"not done after {PROBE_SECONDS:g} s"
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "" if said == "ok" else said or "a forked process died of it"


def _try_to_train(device: str) -> str:
    """`ok` where autograd, an optimizer and the device can be used in this process, else what they raise."""
    try:
        if device == "cuda":
            torch.cuda.init()
        weight = torch.ones(1, device=device, requires_grad=True)
        weight.sum().backward()
        torch.optim.AdamW([weight]).step()
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return "ok"


class _Pickler(cloudpickle.Pickler):
    """Sends a module by its name, also one of a class of its own, and torch's operators by theirs.

    Where a function's globals hold ``torch``, and ``classes`` or ``ops`` is an attribute in its code, whosever it is,
    cloudpickle sends the submodule of that name along, and ``torch.classes`` and ``torch.ops`` are no plain modules.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OpOverload | OpOverloadPacket):
            return operator.attrgetter(str(value)), (torch.ops,)
        if isinstance(value, _OpNamespace):
            return operator.attrgetter(value.name), (torch.ops,)
        if isinstance(value, ModuleType) and type(value) is not ModuleType and value.__name__ in sys.modules:
            return importlib.import_module, (value.__name__,)
        return super().reducer_override(value)


@dataclass(frozen=True)
class Parcel:
    """A call for a process that does not inherit the caller's memory, and what else it would have inherited.

    Attributes:
        call: a ``functools.partial`` by cloudpickle: functions and classes of a script or notebook go by value.
        environment: the caller's, now; the fork server keeps that of its start.
        threads: that torch uses.
        random_state: of torch's generator on the CPU.
        start_method: of processes that `multiprocessing` starts, such as a loader's workers; None for the usual one.
    """

    call: bytes
    environment: dict[str, str]
    threads: int
    random_state: bytes
    start_method: str | None

    @classmethod
    def of(cls, call: functools.partial) -> "Parcel":
        """
        Raises:
            LaunchError: the call cannot be pickled.
        """
        try:
            _Pickler(pickled := io.BytesIO()).dump(call)
        except Exception as error:  # an object's own reduction may raise anything
            raise LaunchError(
                f"the function cannot be sent to a new process ({error})",
                "make in the function itself what cannot be pickled",
            ) from error
        random_state = torch.get_rng_state().numpy().tobytes()
        return cls(
            pickled.getvalue(),
            dict(os.environ),
            torch.get_num_threads(),
            random_state,
            multiprocessing.get_start_method(allow_none=True),
        )

    def settle(self) -> None:
        """Take over the caller's environment, threads, random state and start method."""
        os.environ.clear()
        os.environ.update(self.environment)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch.set_rng_state(torch.frombuffer(bytearray(self.random_state), dtype=torch.uint8))
        multiprocessing.set_start_method(self.start_method, force=True)  # Python left this process its own

    def open(self) -> functools.partial:
        """The call. What came by value from the caller's `__main__` is in this one's too, where pickle looks for it."""
        call = cloudpickle.loads(self.call)
        for part in (call.func, *call.args, *call.keywords.values()):
            if getattr(part, "__module__", None) == "__main__" and hasattr(part, "__globals__"):
                defined = {name: value for name, value in part.__globals__.items() if not name.startswith("__")}
                vars(sys.modules["__main__"]).update(defined)
        return call


def arrive() -> None:
    """In a process of the fork server: end when the caller ends."""
    global _clean
    _clean = True
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # Linux: with the fork server, which ends with the last who holds this:
    if _server._forkserver_alive_fd is not None:
        os.close(_server._forkserver_alive_fd)
        _server._forkserver_alive_fd = None


def start_clean(target: Callable[..., None], call: functools.partial, *args: Any) -> BaseProcess:
    """Start a process that calls ``target(call, *args)`` and can itself fork processes that train.

    Args:
        target: a module's function.
        call: any call, also one that a notebook cell defines.
        args: what `multiprocessing` can send.
    """
    if from_server():
        serve()
        context = multiprocessing.get_context("forkserver")
        process: BaseProcess = context.Process(target=_started_clean, args=(target, Parcel.of(call), args))
        with without_main():
            process.start()
        return process
    openmp.end_threads()
    process = multiprocessing.get_context("fork").Process(target=target, args=(call, *args))
    process.start()
    return process


def _started_clean(target: Callable[..., None], parcel: Parcel, args: tuple) -> None:
    arrive()
    parcel.settle()
    target(lambda: parcel.open()(), *args)


def serve() -> None:
    """See that a fork server runs, has imported what ranks need, and that its processes can train.

    Raises:
        LaunchError: they cannot.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["course_lib.launching.preload"])
    with _planned():
        forkserver.ensure_running()
    if _server._forkserver_pid in _proven:
        return
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_prove, args=(sender,))
    with without_main():
        process.start()
    sender.close()
    with receiver:
        try:
            said = receiver.recv()
        except EOFError:
            said = "it died"
    process.join()
    if said != "ok":
        raise LaunchError(f"a process of the fork server cannot train ({said})", 'use start_method="spawn"')
    _proven.add(_server._forkserver_pid)


def _prove(sender: Connection) -> None:
    arrive()
    sender.send(_try_to_train("cpu"))


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Start processes that do not run the caller's script again, so that it needs no ``if __name__ == "__main__"``."""
    prepare = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main")}

    with _one_at_a_time, replaced(spawn, "get_preparation_data", prepared):  # it takes what it finds in `__main__`
        yield


@contextlib.contextmanager
def _planned() -> Iterator[None]:
    """Within it a fork server finds what to import: the engines, and what this process has of the course by now."""
    course = [
        name
        for name in sys.modules
        if name.startswith(("course_lib.", "transformers.models.")) and not name.endswith("__main__")
    ]
    planned = {"PYTHONPATH": os.pathsep.join(map(str, sys.path)), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in planned}
    os.environ.update(planned, **{PLAN: json.dumps({"modules": [*PRELOADED, *course], "environment": before})})
    try:
        yield
    finally:
        del os.environ[PLAN]
        restore(before)


def restore(before: dict[str, str | None]) -> None:
    """Give variables of the environment the values that they had; None for none."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
