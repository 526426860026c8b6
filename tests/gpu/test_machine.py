"""The fixture itself, on the simulated device and, with GPU_TESTS=hardware, on real GPUs."""

import pytest
import torch
import torch.distributed as dist

from course_lib.runtime.launch import launch
from tests.gpu.machine import OnGPUsError


def test_nothing():
    assert torch
