"""The simulated GPUs, one machine with them a worker."""

import shutil

import pytest

from tests.gpu.machine import machine


@pytest.fixture(scope="session")
def gpus():
    """A :class:`~tests.gpu.machine.Machine`: ``gpus.run(function, ...)`` calls it where there are simulated GPUs."""
    if not shutil.which("g++"):
        pytest.skip("the simulated device is compiled with g++, which is not here")
    with machine() as made:
        yield made
