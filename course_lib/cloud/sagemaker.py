"""A training job on SageMaker, through version 3 of AWS's own SDK: built, looked at, sent, followed, fetched."""

import contextlib
import importlib.metadata
import logging
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.cloud.container import CHANNELS
from course_lib.cloud.job import Job
from course_lib.errors import CourseError
from course_lib.tracking.redact import is_secret

if TYPE_CHECKING:
    from sagemaker.train import ModelTrainer

ROOT = Path(__file__).resolve().parents[2]
ENTRY = "course_lib/cli.py"
CHECKPOINTS = "/opt/ml/checkpoints"
METRICS = {
    "train:loss": "loss", "train:learning_rate": "learning_rate", "train:gradient_norm": "gradient_norm",
    "train:samples_per_second": "samples_per_second", "eval:loss": "eval.loss", "eval:accuracy": "eval.accuracy",
    "eval:macro_f1": "eval.macro_f1", "eval:perplexity": "eval.perplexity"}
"""Name of a metric in SageMaker, and of the number in the trainer's printed lines that it is read from."""
NOT_ON_THE_JOB = ("jupyter", "jupyterlab", "ipywidgets", "nbconvert", "papermill", "matplotlib")
"""Requirements of the course that training does without."""


class CloudError(CourseError):
    """A job that could not be sent, or that did not end well."""


def metric_definitions() -> dict[str, str]:
    """Regular expression by metric name; each reads one number of a line that ``container.metric_line`` made."""
    return {name: rf"metrics:.* {re.escape(field)}=([0-9.eE+-]+|nan|inf)" for name, field in METRICS.items()}


@dataclass(frozen=True)
class Account:
    """Where a job is sent to, and as whom.

    Attributes:
        role: ARN of the role that the job takes.
        region: AWS's name of it.
        bucket: for code, data, checkpoints and output; default: the SDK's own for the account.
        image: the container's image; default: AWS's PyTorch image for the instance.
        tags: put on the job, for whoever reads the bill.
        environment: variables of the container. Whoever may describe the job can read them.
    """

    role: str
    region: str = "us-east-1"
    bucket: str | None = None
    image: str | None = None
    tags: Mapping[str, str] | None = None
    environment: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", self.role):
            raise CloudError(f"role `{self.role}` is no ARN of a role",
                             "give --role arn:aws:iam::ACCOUNT:role/NAME, one that SageMaker may take")
        for name in self.environment or {}:
            if is_secret(name):
                raise CloudError(f"environment variable {name} would be readable to whoever may describe the job",
                                 "keep keys in AWS Secrets Manager, and let the role read them")


def hyperparameters(job: Job) -> dict[str, str]:
    """What the drivers hand to the entry script as options: the config's fields that differ from their defaults."""
    fields = {name: value for name, value in job.fields.items() if name != "output_dir"} | {"progress_bar": "false"}
    for name in inputs(job):
        fields.pop(name)
    if job.instance_count > 1:
        fields["keep_best"] = "false"  # instances share no disk, so only one would have the file to read back
    return fields


def inputs(job: Job) -> dict[str, str]:
    """Source by channel: data and model where they lie in a folder here or in S3, not on the Hub."""
    sources = {name: str(job.config[name]) for name in CHANNELS}
    return {name: source for name, source in sources.items() if source.startswith("s3://") or Path(source).exists()}
