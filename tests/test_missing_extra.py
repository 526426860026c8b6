"""The base is light: torch and a few small packages. What needs more says which extra brings it."""

import ast
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from course_lib.errors import EXIT_HUNG, EXIT_USAGE
from course_lib.missing_extra import BROUGHT_BY, COURSE, TORCH, torch_version
from tests import lowest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BASE = {canonicalize_name(Requirement(each).name) for each in PROJECT["dependencies"]}
EXTRAS = {
    extra: {canonicalize_name(Requirement(each).name) for each in listed}
    for extra, listed in PROJECT["optional-dependencies"].items()
}
NOT_HERE = sorted({package for packages in BROUGHT_BY.values() for package in packages} | {"pytest"})
PACKED_WITH_OTHERS = set(
    shlex.split("IPython boto3 botocore jinja2 traitlets starlette uvicorn pygments threadpoolctl scipy")
)
"""Packages that come with those that the course asks for."""

# An import of what is None in sys.modules fails as if it were missing.
WITHOUT = f"import sys\nsys.modules.update(dict.fromkeys({NOT_HERE}))\n"
SUBJECT = """
import torch
from course_lib.audit import Subject

def make(layout):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double()
    return Subject(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1),
                   loss=lambda model, batch: model(batch).square().mean(), batch=torch.ones(4, 4).double())
"""


def run(code, folder, *arguments, python=sys.executable, **environment):
    return subprocess.run(
        [python, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


# --- what is declared


def test_the_base_is_torch_and_what_is_small():
    assert {"torch", "numpy", "pyyaml", "rich", "annotated-types", "cloudpickle", "shtab"} == BASE


def test_each_package_that_is_named_is_in_the_extra_that_is_named():
    of_package = importlib.metadata.packages_distributions()
    wrong = {
        (extra, package)
        for extra, packages in BROUGHT_BY.items()
        for package in packages
        if package not in PACKED_WITH_OTHERS
        and not {canonicalize_name(each) for each in of_package[package]} & EXTRAS[extra]
    }
    assert BROUGHT_BY.keys() == EXTRAS.keys() - {"all", "dev", "book"} and not wrong


def test_each_package_that_is_imported_is_in_the_base_or_in_an_extra():
    imported = set()
    for path in (ROOT / "course_lib").rglob("*.py"):
        if path.name != "pytest_plugin.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {name.name.partition(".")[0] for name in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add(node.module.partition(".")[0])
    base = {"torch", "numpy", "yaml", "rich", "annotated_types", "cloudpickle", "shtab", "course_lib"}
    known = {*NOT_HERE, *PACKED_WITH_OTHERS, *base}
    assert imported - known - set(sys.stdlib_module_names) == set()


# --- what runs on the base


COMMANDS = (
    "--help",
    "--version",
    "audit subject.py:make --ranks 2",
    "schedule --schedule 1f1b --ranks 2 --microbatches 4",
    "schedule --compare --ranks 2 --microbatches 4",
    "plan --model facebook/opt-6.7b --gpu H100 --gpus 8",
    "select --model_name facebook/opt-6.7b",
    "bench --list_models",
    "check",
    "watch --export",
    "meter --help",
)
NEEDS = {
    "train --model tiny-gpt2": "train",
    "evaluate --model tiny-gpt2": "train",
    "audit --model gpt2": "train",
    "doctor": "train",
    "simulate --model facebook/opt-6.7b --world_size 2": "train",
    "runs": "train",
    "sweep sweep.yaml": "train",
    "plan --model facebook/opt-6.7b --gpu H100 --emit files": "train",
    "grade . --out out": "grading",
}
RUN_ALL = """
import contextlib, io, json, shlex
from course_lib.cli import main
results = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(shlex.split(command))
        except SystemExit as ended:
            code = ended.code
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def run_all(commands, folder, before=WITHOUT, **options):
    """Exit code, output and errors of each command, of which none may end in a traceback."""
    (folder / "subject.py").write_text(SUBJECT)
    (folder / "sweep.yaml").write_text("grid: {seed: [1, 2]}\n")
    done = run(before + ("" if before else "import sys\n") + RUN_ALL, folder, json.dumps(list(commands)), **options)
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, json.loads(done.stdout.splitlines()[-1]), strict=True))


def check(results):
    older = {"check": "train", "grade . --out out": "train"} if torch_version() < TORCH["train"] else {}
    for command in set(COMMANDS) - set(older):
        assert not results[command][0] and results[command][1], (command, results[command])
    for command, extra in (NEEDS | older).items():
        code, _, said = results[command]
        assert code == EXIT_USAGE and said.count("\n") == 1, (command, code, said)
        lacks = rf"`course {command.split()[0]}` needs \w+, which is not installed"
        if older and extra == "train":
            lacks += r"|torch 2\.\d+ is installed, and the extra `train` needs 2\.11 or newer, below 2\.14"
        assert re.search(rf"^course: ({lacks}): pip install '{COURSE}\[{extra}\]'", said), (command, said)


def test_what_needs_the_base_alone_runs_and_what_needs_more_says_what(tmp_path):
    check(run_all([*COMMANDS, *NEEDS], tmp_path))


@pytest.mark.parametrize(
    ("torch", "command", "said"),
    [
        (
            "2.5.1+cu121",
            ["audit", "a.py:make"],
            "torch 2.5 is installed, and the course needs 2.6 or newer, below 2.14",
        ),
        ("2.10.0", ["train"], "torch 2.10 is installed, and the extra `train` needs 2.11 or newer, below 2.14"),
        ("2.10.0", ["watch", "--", sys.executable, "-c", ""], ""),
    ],
    ids=["base", "train", "base alone"],
)
def test_a_torch_below_the_range_is_named_with_the_range(tmp_path, torch, command, said):
    done = run(
        f"""
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: {torch!r} if name == "torch" else version(name)
from course_lib import cli
raise SystemExit(cli.main({command}))
""",
        tmp_path,
    )
    assert done.stderr.startswith(f"course: {said}" if said else "") and done.stderr.count("\n") == bool(said)
    assert done.returncode == (EXIT_USAGE if said else 0)


def test_the_ranges_of_torch_are_those_that_are_declared():
    declared = {
        extra: next(Requirement(each).specifier for each in listed if Requirement(each).name == "torch")
        for extra, listed in {"": PROJECT["dependencies"], "train": PROJECT["optional-dependencies"]["train"]}.items()
    }
    assert {extra: f"<2.14,>={major}.{minor}" for extra, (major, minor) in TORCH.items()} == {
        extra: str(specifier) for extra, specifier in declared.items()
    }


# --- what is built


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and a source archive of what is committed or about to be."""
    return lowest.build(tmp_path_factory.mktemp("built"))


TRAIN = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""


def requirements(names):
    """The distributions that a list of them needs, themselves among them, as they are installed here."""
    waiting, found = list(names), set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found.add(name)
            needs = map(Requirement, importlib.metadata.requires(name) or ())
            waiting += [each.name for each in needs if not each.marker or each.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture
def base(tmp_path):
    """A new environment that has what the base needs, as links to the packages here, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=400)
    (packages,) = (tmp_path / "venv").glob("lib/*/site-packages")
    for name in requirements(BASE):
        files = importlib.metadata.files(name) or ()
        for top in {Path(str(file)).parts[0] for file in files} - {"..", "__pycache__"}:
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if not (packages / top).exists():
                (packages / top).symlink_to(source)
    return tmp_path / "venv/bin/python"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_what_is_built_installs_and_works_in_an_empty_environment(built, base, tmp_path, kind):
    (archive,) = built.glob(kind)
    command = f"{sys.executable} -m uv pip install --no-deps --offline --no-build-isolation --python {base} {archive}"
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    (tmp_path / "elsewhere").mkdir()
    check(run_all([*COMMANDS, *NEEDS], tmp_path / "elsewhere", before="", python=base, PYTHONPATH=""))
    alone = {"PYTHONPATH": "", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for tool, fault, code, said in (
        ("meter", 0, 3, "all_reduce  float32      1"),
        ("watch --seconds 1", 60, EXIT_HUNG, "its last call was all_reduce #1"),
    ):
        command = [base.parent / "course", *tool.split(), "--", base, "-c", TRAIN, str(fault)]
        done = subprocess.run(
            command, env=os.environ | alone, cwd=tmp_path, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
