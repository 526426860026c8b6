"""The course's commands around somebody else's script, as a shell starts them."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

BIN, ROOT = Path(sys.executable).parent, str(Path(__file__).parents[2])
TORCHRUN = f"{BIN}/torchrun --standalone --nproc-per-node 2"


def course(folder, words, **environment):
    """``course`` and a command line's words, in a folder."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    return subprocess.run(
        [sys.executable, "-m", "course_lib", *shlex.split(words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | own | environment,
    )
