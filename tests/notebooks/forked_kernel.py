"""A lesson's kernel that is forked from this process; those of lessons 00 and 03, about starting, are a user's."""

import os
import sys

from jupyter_client.provisioning import local_provisioner
from traitlets.config import Application

from course_lib.launching.rank_process import forget_accelerators
from course_lib.replacing import replaced
from tests.forked_process import Forked


def start(command, env=None, cwd=None, **options):
    """In the place of jupyter_client's launch_kernel: ``python -m ipykernel_launcher -f FILE`` in a fork."""
    assert "ipykernel_launcher" in command and "-f" in command, command
    from ipykernel import debugger, kernelapp  # noqa: F401  here, or each kernel would import them anew

    def kernel():
        sys.argv = ["ipykernel_launcher", *command[command.index("-f") :]]
        sys.path.insert(0, "")
        Application.clear_instance()  # that of whoever starts the kernel, such as nbgrader
        forget_accelerators()
        kernelapp.launch_new_instance()

    return Forked(kernel, (env or {}) | {"JPY_PARENT_PID": str(os.getpid())}, cwd or ".")


def forked_kernels():
    """Within it a kernel that jupyter_client starts is forked from here."""
    return replaced(local_provisioner, "launch_kernel", start)
