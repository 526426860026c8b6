"""SkyPilot itself, from a folder of its own beside the course's packages, loads our tasks and checks them.

SkyPilot downloads its catalogue of accelerators when a task with some is checked. Here stands a catalogue with the
names of the real one (its version 7), so nothing but the packages is downloaded. Prices, regions and which cloud has
the machine stay unchecked, and so does a wrong name, which SkyPilot takes for one of a Kubernetes cluster.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from course_lib.cloud.job import Job
from course_lib.cloud.launchers import skypilot
from course_lib.planning import hardware
from tools import bootstrap

from .test_launchers import ALONE, CONFIG, JOB

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "requirements" / "skypilot.txt"
CATALOGUE = ("T4", "V100", "V100-32GB", "A10G", "L4", "L40S", "A100", "A100-80GB", "H100", "H200", "B200")
"""AcceleratorName of common/accelerators.csv, those of AWS's GPUs that the course knows."""


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function that gives tasks to SkyPilot: for each what it loaded, or what it said."""
    folder, home = tmp_path_factory.mktemp("sky"), tmp_path_factory.mktemp("home")
    command, settings = bootstrap.uv_command(Path(sys.prefix), "install", str(PINS))
    done = subprocess.run(
        [*command, "--no-deps", "--target", str(folder), "-r", str(PINS)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=480,
    )
    if "error sending request" in done.stderr:
        pytest.skip(f"SkyPilot was not run: it cannot be downloaded here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    names = home / ".sky" / "catalogs" / "v8" / "common" / "accelerators.csv"
    names.parent.mkdir(parents=True)
    names.write_text("AcceleratorName,Clouds\n" + "".join(f"{name},['AWS']\n" for name in CATALOGUE))
    env = os.environ | {"HOME": str(home), "PYTHONPATH": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

    def loaded(*texts):
        done = subprocess.run(
            [sys.executable, ROOT / "tests/cloud/skypilot_task.py"],
            input=json.dumps(texts),
            env=env,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=480,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return loaded


@pytest.mark.long  # SkyPilot's packages are downloaded
def test_skypilot_loads_both_tasks_and_refuses_wrong_ones(load):
    texts = [skypilot(JOB), skypilot(ALONE)]
    wrong = {
        "num_nodes: 2": ("num_node: 2", "Instead of 'num_node', did you mean 'num_nodes'?"),
        "use_spot: true": ("use_spots: true", "did you mean 'use_spot'?"),
        "disk_size: 256": ("disk_size: big", "'big' does not match"),
        "A100:8": ("A100:eight", "should be <name> or <name>:<cnt>"),
        "FAILOVER": ("SOMETIMES", "SOMETIMES"),
        "workdir: .": ("workdir: ./nowhere", "nowhere"),
    }
    assert all(text in texts[0] for text in wrong)
    ours, alone, *refused = load(*texts, *(texts[0].replace(right, new) for right, (new, _) in wrong.items()))
    same = {
        "name": "tweets",
        "num_nodes": 2,
        "accelerators": {"A100": 8},
        "cpus": None,
        "disk_size": 256,
        "spot": True,
        "recovery": "FailoverStrategyExecutor",
    }
    assert {key: ours[key] for key in same} == same
    assert {key: alone[key] for key in same} == same | {
        "name": "course",
        "num_nodes": 1,
        "accelerators": None,
        "cpus": "4+",
        "spot": False,
        "recovery": None,
    }
    for task, text in zip((ours, alone), texts, strict=True):
        given = yaml.safe_load(text)
        assert Path(task["workdir"]).is_absolute() and task["setup"] == given["setup"] and task["run"] == given["run"]
    for said, (_, expected) in zip(refused, wrong.values(), strict=True):
        assert isinstance(said, str) and expected in said


def test_every_gpu_has_the_name_of_the_catalogue():
    gpus = [name for name in hardware.names() if name.startswith("ml.") and hardware.accelerator(name).name != "CPU"]
    names = {yaml.safe_load(skypilot(Job(CONFIG, name)))["resources"]["accelerators"] for name in gpus}
    assert len(gpus) > 10 and names == {f"{name}:1" for name in CATALOGUE}
