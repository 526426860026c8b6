"""A process forked from this one, which has imported what it needs, in the place of a new interpreter.

A new one takes 3 to 9 CPU-seconds to import torch, transformers and the course. A fork leads a session of its own, and
has none of pytest's output, handlers and filters; pytest's timers and threads do not come along. What reads the
environment while it is imported still needs a new interpreter, and each launcher is tried as users start it.
"""

import asyncio
import atexit
import contextlib
import gc
import importlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from types import SimpleNamespace

from course_lib import replacing
from course_lib.launching import openmp
from course_lib.launching.rank_process import leave_caller
from course_lib.tracking import collect, sweeps


def import_deepspeed():
    """Here, with what its engines import when they start, or each forked rank would take five seconds for it."""
    with replacing.environment({"DS_ACCELERATOR": "cpu"}):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


@contextlib.contextmanager
def wandb_imported():
    """Within it W&B is imported, with what a run imports when it starts, and what reads its runs is a fork, too."""
    importlib.import_module("wandb.sdk.launch.inputs.internal")
    importlib.import_module("wandb.cli.cli")
    with replacing.replaced(collect, "subprocess", SimpleNamespace(run=run_module)):
        yield


HEARD_BY_PYTEST = (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1)


class Forked:
    """Calls ``main()`` in a fork; waited for and signalled like a ``subprocess.Popen``.

    Args:
        main: gives the exit code, or None for 0.
        environment: all of the fork's variables.
        cwd: its working directory.
        output: descriptors of its standard output and error; as here by default.
    """

    stdin = stdout = stderr = None

    def __init__(self, main, environment, cwd=".", output=(1, 2)):
        self.returncode = None
        openmp.end_threads()
        left, leaves = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(main, environment, cwd, output, leaves)
        os.close(leaves)
        os.read(left, 1)  # until it leads a group of its own, which whoever ends it may kill at once
        os.close(left)

    @staticmethod
    def _child(main, environment, cwd, output, leaves):
        code = 1
        try:
            leave_caller()
            os.close(leaves)
            _as_new(environment, cwd, output)
            code = main() or 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:  # it must not get back into pytest
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def poll(self):
        return self._wait(os.WNOHANG)

    def wait(self, timeout=None):
        return self._wait(0)

    def _wait(self, options):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def _as_new(environment, cwd, output):
    """What a new interpreter would have: its own streams, handlers, filters, environment and event loop."""
    for number in HEARD_BY_PYTEST:
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, given in zip((1, 2), output, strict=True):
        os.dup2(given, descriptor)
    sys.stdin = sys.__stdin__
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    sys.displayhook, sys.excepthook = sys.__displayhook__, sys.__excepthook__
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    asyncio._set_running_loop(None)  # it may have been forked by one
    asyncio.set_event_loop(asyncio.new_event_loop())
    gc.freeze()  # a collection would look through, and so copy, all that pytest has


def run_course(*arguments, timeout=960, **env):
    """``course ARGUMENTS`` in a fork, to its end; a time-out ends all that it started."""
    from course_lib import cli

    arguments = [str(argument) for argument in arguments]

    def main():
        sys.argv = [cli.__file__, *arguments]
        return cli.main(arguments)

    return _run(main, arguments, os.environ | env, timeout)


def run_module(command, *, env, timeout=960, **_):
    """``subprocess.run`` of ``python -m MODULE ARGUMENTS``, in a fork."""
    python, option, module, *arguments = command
    assert (python, option) == (sys.executable, "-m")

    def main():
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return _run(main, command, env, timeout)


def _run(main, command, environment, timeout):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Forked(main, environment, output=(out.fileno(), err.fileno()))
        deadline = time.monotonic() + timeout
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise subprocess.TimeoutExpired(command, timeout)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(command, process.returncode, *said)


def train_forked(_trainings, command):
    """In the place of `sweeps.Trainings.run`, which starts an interpreter for each training."""
    assert command[:2] == [sys.executable, str(sweeps.CLI)]
    return run_course(*command[2:])
