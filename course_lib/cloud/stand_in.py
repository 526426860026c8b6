"""AWS simulated by moto within this process: no account, no credentials, no network."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from course_lib.errors import LaunchError
from course_lib.replacing import environment

REGION, ACCOUNT = "us-east-1", "123456789012"  # moto's
ROLE = f"arn:aws:iam::{ACCOUNT}:role/stand-in"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "stand-in",
    "AWS_SECRET_ACCESS_KEY": "stand-in",
    "AWS_SESSION_TOKEN": "stand-in",
    "AWS_DEFAULT_REGION": REGION,
    "SAGEMAKER_VALIDATE_ROLE": "false",
}


@contextlib.contextmanager
def stand_in(region: str = REGION) -> Iterator[Any]:
    """AWS as moto plays it within this process, while the block runs; gives a boto3 session of the region.

    No credentials of this machine are read, and nothing is sent over the network.

    Raises:
        LaunchError: the packages of the extra are not there.
    """
    try:
        import boto3
        from moto import mock_aws
    except ModuleNotFoundError as error:
        raise LaunchError(
            f"the packages for SageMaker are not installed ({error.name} is missing)",
            f"{Path(sys.executable).name} -m pip install -c constraints.txt -e .[sagemaker]",
        ) from None
    with environment(CREDENTIALS), mock_aws():
        for name in [name for name in os.environ if name.startswith("AWS_") and name not in CREDENTIALS]:
            del os.environ[name]
        yield boto3.Session(region_name=region)
