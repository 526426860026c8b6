"""Starts somebody else's command line with our tools in its processes."""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from course_lib.attach.inside import VARIABLE
from course_lib.errors import ConfigError

SITE = Path(__file__).with_name("site")


def environment_of(tools: Mapping[str, Any], before: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that bring tools into every Python process which inherits them.

    Args:
        tools: settings by name, as :data:`course_lib.attach.inside.TOOLS` has them; JSON.
        before: of the job; by default this process's.
    """
    variables = dict(os.environ if before is None else before)
    attached = json.loads(variables.get(VARIABLE, "{}")) | dict(tools)  # `course watch -- course meter -- …`
    paths = [
        str(SITE),
        *(path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SITE)),
    ]
    return variables | {VARIABLE: json.dumps(attached), "PYTHONPATH": os.pathsep.join(paths)}


def exports(tools: Mapping[str, Any]) -> str:
    """The lines of shell that bring tools into all that is started after them, by whatever launcher.

    Args:
        tools: as for :func:`environment_of`.
    """
    variables = environment_of(tools)
    return "\n".join(f"export {name}={shlex.quote(variables[name])}" for name in (VARIABLE, "PYTHONPATH"))


def run(words: Sequence[str], tools: Mapping[str, Any]) -> int:
    """Run a command line to its end, in the foreground; signals are for it.

    Returns:
        its exit code; 128 + the signal's number where a signal ended it.
    Raises:
        ConfigError: there is no such program.
    """
    if not words:
        raise ConfigError("nothing to run", "give the command line after `--`, as in `-- torchrun train.py`")
    ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the job, too, which decides
    try:
        job = subprocess.Popen(
            words, env=environment_of(tools), preexec_fn=lambda: signal.signal(signal.SIGINT, ctrl_c)
        )
    except OSError as error:
        signal.signal(signal.SIGINT, ctrl_c)
        raise ConfigError(
            f"cannot start `{words[0]}`: {error.strerror}", "give the command line as you type it"
        ) from None
    terminate = signal.signal(signal.SIGTERM, lambda number, _: job.send_signal(number))
    try:
        code = job.wait()
    finally:
        signal.signal(signal.SIGINT, ctrl_c)
        signal.signal(signal.SIGTERM, terminate)
    return code if code >= 0 else 128 - code
