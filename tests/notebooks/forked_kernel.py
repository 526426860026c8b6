"""A lesson's kernel that is forked from this process, which has imported torch, transformers and the course.

A new interpreter takes 4 to 9 CPU-seconds for that before a lesson's first line. What is forked is ipykernel's own
application, with the connection file, environment and working directory that a kernel is started with, and with none
of pytest's output, handlers and filters; its timers and threads end with the fork.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import traceback
import warnings

from jupyter_client.provisioning import local_provisioner

from course_lib.launching import forks
from course_lib.launching.rank_process import leave_caller
from course_lib.replacing import replaced

HEARD_BY_PYTEST = (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1)


class Forked:
    """A forked process that ``jupyter_client`` waits for and signals, as it would a ``subprocess.Popen``."""

    stdin = stdout = stderr = None

    def __init__(self, main):
        self.returncode = None
        forks.end_openmp_threads()
        left, leaves = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(main, leaves)
        os.close(leaves)
        os.read(left, 1)  # until it leads a group of its own: jupyter_client kills the group that it finds it in
        os.close(left)

    @staticmethod
    def _child(main, leaves):
        code = 1
        try:
            leave_caller()
            os.close(leaves)
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:  # it must not get back into pytest
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code if isinstance(code, int) else 1)

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


def start(command, env=None, cwd=None, **options):
    """In the place of jupyter_client's launch_kernel: ``python -m ipykernel_launcher -f FILE`` in a fork."""
    assert "ipykernel_launcher" in command and "-f" in command, command

    def kernel():
        for number in HEARD_BY_PYTEST:
            signal.signal(number, signal.SIG_DFL)
        quiet = os.open(os.devnull, os.O_RDWR)
        os.dup2(quiet, 0)
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        sys.displayhook, sys.excepthook = sys.__displayhook__, sys.__excepthook__
        logging.getLogger().handlers.clear()
        logging.getLogger().setLevel(logging.WARNING)
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        os.environ.clear()
        os.environ.update(env or {}, JPY_PARENT_PID=str(os.getppid()))
        os.chdir(cwd or ".")
        sys.argv = ["ipykernel_launcher", *command[command.index("-f"):]]
        sys.path.insert(0, "")
        gc.freeze()  # a collection would look through, and so copy, all that pytest has
        asyncio._set_running_loop(None)  # it was forked by one
        asyncio.set_event_loop(asyncio.new_event_loop())
        from ipykernel import kernelapp

        kernelapp.launch_new_instance()

    return Forked(kernel)


def forked_kernels():
    """Within it a kernel that jupyter_client starts is forked from here."""
    return replaced(local_provisioner, "launch_kernel", start)
