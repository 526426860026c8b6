"""Version 2's HuggingFace estimator, run for real in its own environment, asks AWS for the same job as version 3."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from course_lib.cloud import sagemaker
from course_lib.cloud.job import Job
from course_lib.cloud.sagemaker import Account
from course_lib.cloud.stand_in import CREDENTIALS, ROLE
from course_lib.config import build
from tools import bootstrap

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "requirements" / "sagemaker-v2.txt"


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=960, **options)


@pytest.fixture(scope="module")
def version_2(tmp_path_factory):
    """A Python that has version 2."""
    venv = tmp_path_factory.mktemp("v2") / "venv"
    python = bootstrap.python_of(venv)
    assert run(sys.executable, "-m", "uv", "venv", "-q", "--python", sys.executable, venv).returncode == 0
    command, settings = bootstrap.uv_command(Path(sys.prefix), "install", str(PINS))
    command[command.index("--python") + 1] = python
    done = run(*command, "--no-deps", "-r", PINS, env=os.environ | settings)
    if "error sending request" in done.stderr:
        pytest.skip(f"version 2 was not run: it cannot be downloaded here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.long  # version 2's packages are downloaded
def test_the_estimator_asks_for_the_same_job(version_2, tmp_path):
    config = build({"model": "tiny-bert", "max_steps": 4, "resume_from_checkpoint": "s3://mine/kept"})
    job = Job(config, "ml.p4d.24xlarge", 2, 8, max_hours=3, spot=True, max_wait_hours=5, name="tweets")
    account = Account(ROLE, bucket="mine", tags={"team": "nlp"}, environment={"NCCL_DEBUG": "INFO"})
    with tarfile.open(sagemaker.stage(tmp_path)) as packed:
        packed.extractall(tmp_path / "code", filter="data")
    asked = json.dumps(sagemaker.estimator_v2(job, account, tmp_path / "code"))
    script = ROOT / "tests/cloud/sagemaker_v2.py"
    done = run(version_2, script, env=os.environ | CREDENTIALS, cwd=tmp_path, input=asked)
    assert done.returncode == 0, done.stdout + done.stderr  # the SDK's tracebacks are on stdout
    theirs, ours = json.loads(done.stdout.splitlines()[-1]), sagemaker.request(job, account)
    same = ("RoleArn", "EnableManagedSpotTraining", "StoppingCondition", "CheckpointConfig", "Tags")
    assert {key: theirs[key] for key in same} == {key: ours[key] for key in same}
    for key in ("TrainingImage", "MetricDefinitions"):
        assert theirs["AlgorithmSpecification"][key] == ours["AlgorithmSpecification"][key]
    for key in ("InstanceType", "InstanceCount", "VolumeSizeInGB"):
        assert theirs["ResourceConfig"][key] == ours["ResourceConfig"][key]
    assert theirs["OutputDataConfig"]["S3OutputPath"] == ours["OutputDataConfig"]["S3OutputPath"]
    assert theirs["Environment"].items() >= ours["Environment"].items()
    # Version 2 writes every value as JSON and adds its own, by which its container finds and starts the code.
    given = {key: json.loads(value) for key, value in theirs["HyperParameters"].items()}
    assert {key: given[key] for key in ours["HyperParameters"]} == ours["HyperParameters"]
    assert given["sagemaker_torch_distributed_enabled"] is True and given["sagemaker_program"] == sagemaker.ENTRY
