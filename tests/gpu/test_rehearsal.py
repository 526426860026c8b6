"""`python3 benchmarks/gpu.py` on a machine that somebody else set up: torch 2.11, no network, packages missing.

Its GPU is the simulated one. What a cluster's image has is installed with the versions named here, and not by the
course's own requirements.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from course_lib.launching.netns import in_own_network
from tests.gpu.machine import ROOT, SITE
from tests.gpu_sim.build import missing
from tests.lowest import uv

pytestmark = [pytest.mark.long, pytest.mark.simulated("it rehearses what real ones run")]
IMAGE = shlex.split(
    "torch==2.11.0 transformers==5.17.0 accelerate==1.15.0 triton peft pandas matplotlib pytest pytest-timeout "
    "pytest-xdist ninja 'setuptools<82'"
)
"""What lies there; what it needs itself comes along."""
CARRIED = shlex.split(
    "datasets==5.2.0 evaluate==0.4.6 scikit-learn cloudpickle papermill nbconvert ipykernel ipywidgets shtab "
    "annotated-types charset-normalizer pydantic"
)
"""What is brought along: the rest of what the course imports, DeepSpeed left out."""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment with such an image's packages."""
    if lacks := missing():
        pytest.skip(lacks)
    folder = tmp_path_factory.mktemp("image")
    uv("venv", "--python", sys.executable, folder / "venv")
    install(folder / "venv/bin/python", *IMAGE)
    return folder / "venv/bin/python"


def install(python, *packages):
    uv("pip", "install", "--python", python, *packages)


def run(python, folder, *arguments):
    """The tool in a network namespace with nothing but loopback; its exit code, output, and report."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"GPU_SIM": "1", "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = in_own_network(
        subprocess.run,
        [str(python), str(ROOT / "benchmarks/gpu.py"), *arguments],
        cwd=str(folder),
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    report = folder / "gpu-report.md"
    assert report.exists(), done
    return done, report.read_text()


def states(report):
    return dict(re.findall(r"^## (.*): (.*)$", report, re.M))


def test_what_the_image_lacks_is_named_and_the_report_is_whole(python, tmp_path):
    done, report = run(python, tmp_path, "--tiny", "--minutes", "6")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{report}"
    found = states(report)
    assert list(found) == [section.title for section in gpu.SECTIONS] and found["Machine"] == "passed"
    assert set(list(found.values())[1:]) == {"not run"}
    lacking = re.findall(r"^- .*: (\w+) is not installed$", report, re.M)
    assert len(lacking) == 8 and set(lacking) <= {"cloudpickle", "datasets", "nbformat", "shtab"}
    assert re.search(r"^  left out: all of it: \w+ is not installed$", done.stdout, re.M)


def test_with_what_is_carried_there_strategies_and_parity_pass(python, tmp_path):
    install(python, *CARRIED)
    done, report = run(python, tmp_path, "--tiny", "--only", "machine", "strategies", "parity", "speed")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{report}"
    assert set(states(report).values()) == {"passed"}
    assert "torch | 2.11.0" in report and "transformers 5.17.0" in report
    assert len(re.findall(r"^\| ddp \| (torch|scratch) \|  \| fp32 \| 1 \| \S+ / \S+ \| ok \|$", report, re.M)) == 2


def test_without_loopback_it_says_so_in_a_line(python, tmp_path):
    code = "import ctypes, os, sys; ctypes.CDLL(None).unshare(0x40000000); os.execv(sys.argv[1], sys.argv[1:])"
    done = in_own_network(
        subprocess.run,
        [sys.executable, "-c", code, str(python), str(ROOT / "benchmarks/gpu.py")],
        cwd=str(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("ranks cannot reach each other at 127.0.0.1") and not list(Path(tmp_path).iterdir())
