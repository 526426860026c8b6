"""Modules that the fork server imports before it serves, for its processes (`course_lib.launching.forks`)."""

import signal

_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the caller alone

import contextlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402

from course_lib.launching import forks, openmp  # noqa: E402

if forks.PLAN in os.environ:
    _plan = json.loads(os.environ.pop(forks.PLAN))
    forks.restore(_plan["environment"])
    for _name in _plan["modules"]:
        with contextlib.suppress(Exception):  # the rank that needs it imports it again, and tells what is wrong
            importlib.import_module(_name)
    openmp.end_threads()
signal.signal(signal.SIGINT, _interrupt)
