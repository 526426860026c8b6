"""Environments with the lowest versions that pyproject.toml allows, in which the course is a wheel.

What a test imports of the course there is the wheel's: the folder that it runs in has everything of this checkout but
course_lib.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEST_TOOLS = (
    "pytest>=9.0",
    "pytest-timeout>=2.4",
    "pytest-xdist>=3.8",
    "hypothesis>=6.150",
    "setuptools>=77",
    "wheel>=0.45",
    "packaging>=25.0",
)
"""What the tests themselves need."""


def tracked(*paths):
    """Files of this checkout that are committed, or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def copy(names, folder):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def build(folder):
    """A wheel and a source archive of the checkout; gives the folder that they are in."""
    copy(tracked("course_lib", "pyproject.toml", "README.md", "LICENSE", "NOTICE"), folder)
    for make in ("build_wheel", "build_sdist"):
        code = f"from setuptools import build_meta; build_meta.{make}('dist')"
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder / "dist"


def uv(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "uv", *arguments],
        capture_output=True,
        text=True,
        timeout=3000,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A Python, and a folder with the checkout's tests."""

    python: Path
    folder: Path

    def run(self, *arguments, seconds=3000, **environment):
        """Run its Python in its folder."""
        given = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        given |= {
            "PYTHONPATH": "",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
        } | environment
        return subprocess.run(
            [self.python, *map(str, arguments)],
            cwd=self.folder,
            env=given,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def tests(self, *arguments):
        """Run pytest; gives what it said, where nothing failed."""
        done = self.run(
            "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", "not long", "-p", "no:cacheprovider", *arguments
        )
        assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def versions(self):
        """Of what is installed, by name."""
        return dict(
            line.split("==") for line in uv("pip", "freeze", "--python", self.python).splitlines() if "==" in line
        )


def declared(*extras):
    """What the base and these extras ask for."""
    return [*PROJECT["dependencies"], *(each for extra in extras for each in PROJECT["optional-dependencies"][extra])]


def environment(folder, *requirements, extras=()):
    """An environment with the wheel, and the lowest versions of all that it and its extras ask for.

    Args:
        folder: to make it in.
        requirements: further ones.
        extras: of the wheel. To uv their packages are direct requirements where they are named beside it.
    """
    (wheel,) = build(folder / "build").glob("*.whl")
    uv("venv", "--python", sys.executable, folder / "venv")
    made = Environment(folder / "venv/bin/python", folder / "tree")
    uv(
        "pip",
        "install",
        "--python",
        made.python,
        "--resolution",
        "lowest-direct",
        wheel,
        *declared(*extras),
        *requirements,
        *TEST_TOOLS,
        DS_BUILD_OPS="0",
    )
    copy([name for name in tracked() if not name.startswith("course_lib/")], made.folder)
    where = made.run("-c", "import course_lib; print(course_lib.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(folder / "venv"), where
    return made
