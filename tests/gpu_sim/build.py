"""Compiles the simulated device against the installed torch, once for each version of either."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

SOURCES = sorted((Path(__file__).parent / "csrc").glob("*.cpp"))
CODE = """
import sys
from torch.utils.cpp_extension import load
load(name="gpu_sim_device", sources=sys.argv[2:], build_directory=sys.argv[1], extra_cflags=["-O1", "-g0", "-w"])
"""


def missing() -> str | None:
    """What this machine lacks to compile it, or None."""
    if sys.platform != "linux":
        return f"the simulated device is for Linux, and this is {sys.platform}"
    if not shutil.which(os.environ.get("CXX", "c++")):
        return "the simulated device needs a C++ compiler, and there is none"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated device needs Python's headers (python3-dev), and they are not here"
    return None


def library() -> Path:
    """The compiled library, made first where there is none of these sources, this torch and this Python.

    It lies in ``.cache/gpu_sim`` of the folder that has the tests, or where GPU_SIM_CACHE says.

    Raises:
        RuntimeError: it could not be compiled; with what the compiler said.
    """
    key = hashlib.sha256(version("torch").encode() + sys.version.encode())
    for source in (*SOURCES, *(Path(__file__).parent / "csrc").glob("*.h")):
        key.update(source.read_bytes())
    cache = Path(os.environ.get("GPU_SIM_CACHE", Path(__file__).parents[2] / ".cache" / "gpu_sim"))
    folder = cache / key.hexdigest()[:16]
    made = folder / "gpu_sim_device.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may want it at once
        if made.exists():
            return made
        scripts = os.path.dirname(sys.executable)  # of a virtual environment, where ninja is
        environment = os.environ | {"GPU_SIM": "0", "PATH": scripts + os.pathsep + os.environ.get("PATH", "")}
        scratch = folder / "scratch"
        scratch.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(scratch), *map(str, SOURCES)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"the simulated device could not be compiled:\n{done.stdout[-6000:]}")
        os.replace(scratch / made.name, made)
    return made


if __name__ == "__main__":
    print(missing() or f"the simulated GPUs are ready: {library().name}")
