"""The command line as a test calls it: in this process where that is enough, as real processes elsewhere."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from course_lib import cli
from course_lib.launching.launch_environment import reserved_port
from tests.narrow_presets import narrow_presets  # noqa: F401

CLI = Path(cli.__file__)
QUICK = shlex.split(
    "--model tiny-bert --max_train_samples 120 --max_eval_samples 61 --max_length 32 --batch_size 4 --max_steps 6 "
    "--logging_steps 1 --progress_bar false --save_steps 3 --learning_rate 1e-3"
)


@pytest.fixture
def endpoint():
    """An address at which machines can meet."""
    with reserved_port() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def course(capsys):
    """Run a command in this process; gives exit code, stdout and stderr. An exception is a traceback: it fails."""

    def call(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def command(*arguments, launcher=()):
    """The command line of a real process, started plainly or by a launcher."""
    return [sys.executable, *map(str, launcher), str(CLI), *map(str, arguments)]


def run(*arguments, launcher=(), timeout=960, **env):
    """Run a real process to its end; a time-out ends all that it started."""
    process = subprocess.Popen(
        command(*arguments, launcher=launcher),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for below in [*psutil.Process(process.pid).children(recursive=True), process]:
            below.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
