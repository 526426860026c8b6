"""Tests of what an older torch has not: skipped there, with the version that they need, as docs/setup.md has it."""

import pytest

from course_lib.missing_extra import torch_version

FSDP2_ON_CPUS = (2, 7), "FSDP2 on CPUs"
STAGES_ON_ONE_RANK = (2, 12), "neighbouring stages on one rank in torch's pipeline runtime"
SYNCHRONOUS_IS_TOLD = (2, 8), "a collective's operator says that it is synchronous"
ERRORS_OF_BACKENDS = (2, 7), "what NCCL says has gone wrong"


def has(needed):
    """Whether this torch has it."""
    return torch_version() >= needed[0]


def needs(needed):
    """Mark of a test, or of a fixture's users."""
    (major, minor), why = needed
    return pytest.mark.skipif(not has(needed), reason=f"since torch {major}.{minor}: {why}")
