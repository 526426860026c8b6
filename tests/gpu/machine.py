"""A process that has the simulated GPUs and has imported everything, from which each test's process is forked.

With GPU_TESTS=hardware in the environment it has the machine's own GPUs instead.
"""

import contextlib
import functools
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
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib.launching.launch import launch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SITE = HERE.parent / "gpu_sim" / "site"
ON_HARDWARE = os.environ.get("GPU_TESTS") == "hardware"
RETURNED, RAISED, SIMULATED = "returned", "raised", "simulated"
"""What a function did: the last where it asked for the simulation, and the GPUs are real."""

if not ON_HARDWARE and "gpu_sim" not in sys.modules:  # by this name findings are pickled; nothing is installed here
    _spec = importlib.util.spec_from_file_location(
        "gpu_sim", HERE.parent / "gpu_sim" / "__init__.py", submodule_search_locations=[str(HERE.parent / "gpu_sim")]
    )
    assert _spec and _spec.loader
    sys.modules["gpu_sim"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["gpu_sim"])


class OnGPUsError(AssertionError):
    """What the function raised, with its traceback and what it printed."""


class Machine:
    """Runs functions in processes that see N GPUs, simulated ones or, with GPU_TESTS=hardware, real ones.

    Args:
        root: where each function gets a working directory of its own.
    """

    def __init__(self, root: Path):
        self.root, self.runs, self.used = root, 0, 0.0
        own, theirs = Pipe()
        kept = {
            name: value
            for name, value in os.environ.items()  # what earlier tests of this process chose is theirs
            if name not in ("DS_ACCELERATOR", "OMP_NUM_THREADS") and not name.startswith("ACCELERATE_")
        }
        if ON_HARDWARE:
            # Asked whether there are GPUs, torch would else start the driver, which no forked process could use.
            given = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = kept | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONPATH": os.pathsep.join(given)}
        else:
            environment = {name: value for name, value in kept.items() if name != "CUDA_VISIBLE_DEVICES"}
            environment |= {"GPU_SIM": "8", "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)])}
        # Not as a child: tests look whether anything that they started is left of this process's children.
        subprocess.run(
            [sys.executable, "-m", "tests.gpu.machine", str(theirs.fileno())],
            check=True,
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=ROOT,
        )
        theirs.close()
        self.connection = own
        self.process = psutil.Process(own.recv())

    def run(self, function, *args, gpus=2, timeout=1800.0, environment=None, **kwargs):
        """Call ``function(*args, **kwargs)`` in a new process that sees ``gpus`` GPUs; its return value.

        The process has used neither the device nor autograd: it may fork ranks (``start_method="fork"``). On real GPUs
        the test is skipped where there are fewer, or where the function imports ``gpu_sim``.

        Raises:
            OnGPUsError: it raised, died, or took longer than ``timeout`` seconds.
        """
        return self.run_each([(function, args, kwargs)], gpus, timeout, environment)[0]

    def ranks(self, number, function, *args, gpus=None, environment=None, **kwargs):
        """What a function returns on each of so many ranks, which are forked where there are as many GPUs, or more."""
        return self.run(on_ranks, number, function, *args, gpus=gpus or number, environment=environment, **kwargs)

    def run_each(self, calls, gpus=2, timeout=1800.0, environment=None):
        """Several calls at the same time, each as `run` does it; what waits does not hold up the others."""
        options = (_real(gpus) if ON_HARDWARE else {"GPU_SIM": str(gpus)}) | (environment or {})
        sent = []
        for function, args, kwargs in calls:
            for module in map(inspect.getmodule, filter(callable, (function, *args))):
                if module is not None and module.__name__.startswith("tests.") and module.__name__ != __name__:
                    cloudpickle.register_pickle_by_value(module)
            self.runs += 1
            folder = self.root / f"run-{self.runs}"
            folder.mkdir(parents=True)
            sent.append((str(folder), (function, args, kwargs)))
        self.connection.send_bytes(cloudpickle.dumps((options, timeout, sent)))
        outcomes = pickle.loads(self.connection.recv_bytes())
        for state, value, printed in outcomes:
            if state == SIMULATED:
                pytest.skip("needs the simulated device: it asks for gpu_sim")
            if state == RAISED:
                raise OnGPUsError(f"{value}\n--- printed ---\n{printed}")
            sys.stdout.write(printed)
        return [cloudpickle.loads(value) for _, value, _ in outcomes]

    def cpu(self) -> float:
        """CPU-seconds of it and of all that it has forked and waited for; once it has ended, as last read."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.used = sum(self.process.cpu_times()[:4])
        return self.used

    def end(self) -> None:
        self.connection.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.wait(240)


def on_ranks(number, function, *args, device="cuda", **kwargs):
    """What a function returns on each of so many ranks, forked from here."""
    return launch(
        functools.partial(function, *args, **kwargs),
        num_processes=number,
        device=device,
        start_method="fork",
        timeout=600,
        stream=False,
    )


def _joined(test, fixtures, backend, bound):
    dist.init_process_group(backend, device_id=torch.device("cuda", int(os.environ["RANK"])) if bound else None)
    test(**fixtures)


def on_gpu_ranks(number, gpus=None, environment=None, backend="nccl", bound=False):
    """Makes a test run on each of so many ranks in a group, bound to its device or not: there it asserts.

    It may ask for fixtures that can be sent to another process, such as ``tmp_path``.
    """

    def decorate(test):
        @functools.wraps(test)
        def on_each_rank(**fixtures):
            machine = fixtures.pop("gpus")
            machine.ranks(number, _joined, test, fixtures, backend, bound, gpus=gpus, environment=environment)

        own = list(inspect.signature(test).parameters.values())
        added = inspect.Parameter("gpus", inspect.Parameter.KEYWORD_ONLY)
        on_each_rank.__signature__ = inspect.Signature([*own, added])
        return on_each_rank

    return decorate


def _real(gpus: int) -> dict[str, str]:
    """Variables for a process that is to see so many of the machine's GPUs; skips the test where there are fewer."""
    here = torch.cuda.device_count()
    if gpus > here:
        pytest.skip(f"needs {gpus} GPUs, and there {'is 1' if here == 1 else f'are {here}'}")
    if "GPU_SIM" in os.environ:  # a rehearsal
        return {"GPU_SIM": str(gpus)}
    known = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(here)))
    return {"CUDA_VISIBLE_DEVICES": ",".join(known.split(",")[:gpus])}


def wants_simulation(error: BaseException | None) -> bool:
    """Whether an exception, or that of a rank, says that there is no ``gpu_sim``."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name == "gpu_sim":
            return True
        error = getattr(error, "cause", None) or error.__cause__
    return False


def _serve(connection: Connection) -> None:
    import course_lib.training.run  # noqa: F401
    import tests.gpu.machine
    import tests.gpu.training  # noqa: F401
    from tests.narrow_presets import narrowed

    with contextlib.suppress(EOFError), contextlib.nullcontext() if ON_HARDWARE else narrowed():
        while True:
            options, timeout, calls = cloudpickle.loads(connection.recv_bytes())
            begun = [_begin(connection, options, Path(folder), call) for folder, call in calls]
            connection.send_bytes(pickle.dumps([_end(*each, timeout) for each in begun]))


def _begin(connection: Connection, options: dict[str, str], folder: Path, call: Any) -> tuple[int, Connection, Path]:
    """Start a call in a fork: its process, what will tell the outcome, and the file of what it prints."""
    log = folder / "printed.txt"
    receiver, sender = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _child(sender, options, folder, log, call)
    sender.close()
    return pid, receiver, log


def _end(pid: int, receiver: Connection, log: Path, timeout: float) -> tuple[str, Any, str]:
    """Wait for a call, and end all that it started: what it did, the value or what was raised, and what it printed."""
    state, value = RAISED, b""
    if receiver.poll(timeout):
        try:
            state, value = pickle.loads(receiver.recv_bytes())
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
    return state, value, log.read_text(errors="replace")


def _child(sender: Connection, options: dict[str, str], folder: Path, log: Path, call: Any) -> None:
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
        answer = RETURNED, cloudpickle.dumps(function(*args, **kwargs))
    except BaseException as error:
        answer = SIMULATED if ON_HARDWARE and wants_simulation(error) else RAISED, traceback.format_exc()
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
    if os.fork() == 0:
        os.setsid()
        end = Connection(int(sys.argv[1]))
        end.send(os.getpid())
        _serve(end)
    os._exit(0)
