"""A process that has the simulated GPUs and has imported everything, from which each test's process is forked."""

import contextlib
import importlib.util
import inspect
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import cloudpickle

HERE = Path(__file__).resolve().parent
SITE = HERE.parent / "gpu_sim" / "site"

if "gpu_sim" not in sys.modules:  # by this name findings are pickled; nothing is installed here
    _spec = importlib.util.spec_from_file_location("gpu_sim", HERE.parent / "gpu_sim" / "__init__.py",
                                                   submodule_search_locations=[str(HERE.parent / "gpu_sim")])
    assert _spec and _spec.loader
    sys.modules["gpu_sim"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["gpu_sim"])


class OnGPUsError(AssertionError):
    """What the function raised, with its traceback and what it printed."""


class Machine:
    """Runs functions in processes that see N simulated GPUs.

    Args:
        root: where each function gets a working directory of its own.
    """

    def __init__(self, root: Path):
        self.root, self.runs = root, 0
        own, theirs = Pipe()
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environment |= {"GPU_SIM": "8", "PYTHONPATH": os.pathsep.join([str(SITE), str(HERE.parents[1])])}
        self.process = subprocess.Popen([sys.executable, "-m", "tests.gpu.machine", str(theirs.fileno())],
                                        pass_fds=[theirs.fileno()], env=environment, cwd=HERE.parents[1])
        theirs.close()
        self.connection = own

    def run(self, function: Callable[..., Any], *args: Any, gpus: int = 2, timeout: float = 120.0,
            environment: dict[str, str] | None = None, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` in a new process that sees ``gpus`` GPUs; its return value.

        The process has used neither the device nor autograd: it may fork ranks (``start_method="fork"``).

        Raises:
            OnGPUsError: it raised, died, or took longer than ``timeout`` seconds.
        """
        module = inspect.getmodule(function)
        if module is not None and not module.__name__.startswith("course_lib"):
            cloudpickle.register_pickle_by_value(module)
        self.runs += 1
        folder = self.root / f"run-{self.runs}"
        folder.mkdir(parents=True)
        options = {"GPU_SIM": str(gpus)} | (environment or {})
        self.connection.send_bytes(cloudpickle.dumps((options, str(folder), timeout, (function, args, kwargs))))
        failed, value, printed = pickle.loads(self.connection.recv_bytes())
        if failed:
            raise OnGPUsError(f"{value}\n--- printed ---\n{printed}")
        sys.stdout.write(printed)
        return cloudpickle.loads(value)

    def end(self) -> None:
        self.connection.close()
        self.process.wait(60)


def _serve(connection: Connection) -> None:
    import torch  # noqa: F401

    import course_lib.training.run  # noqa: F401

    with contextlib.suppress(EOFError):
        while True:
            options, folder, timeout, call = cloudpickle.loads(connection.recv_bytes())
            log = Path(folder) / "printed.txt"
            receiver, sender = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                connection.close()
                _child(sender, options, folder, log, call)
            sender.close()
            failed, value = True, b""
            if receiver.poll(timeout):
                try:
                    failed, value = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                    value = "the process died"
            else:
                value = f"not done after {timeout:g} s"
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)  # its stacks
                    time.sleep(1)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            if value == "the process died":
                value += f" (status {status})"
            connection.send_bytes(pickle.dumps((failed, value, log.read_text(errors="replace"))))


def _child(sender: Connection, options: dict[str, str], folder: str, log: Path, call: Any) -> None:
    import faulthandler
    import traceback

    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(options)
    os.chdir(folder)
    try:
        function, args, kwargs = call
        answer = False, cloudpickle.dumps(function(*args, **kwargs))
    except BaseException:
        answer = True, traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(pickle.dumps(answer))
    os._exit(0)


@contextlib.contextmanager
def machine():
    """A Machine, ended at the end."""
    root = Path(tempfile.mkdtemp(prefix="course-gpus-"))
    made = Machine(root)
    try:
        yield made
    finally:
        made.end()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
