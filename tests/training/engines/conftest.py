"""A model of half the depth, where no stage or split asks for four blocks."""

import dataclasses
from unittest import mock

import pytest

from course_lib.lessons import parity
from course_lib.modeling import presets


@pytest.fixture(scope="module")
def two_blocks():
    """The preset tiny-gpt2 with two blocks; the cache forgets it before others ask for the usual one."""
    usual = presets.TINY["tiny-gpt2"]
    parity.prepared.cache_clear()
    with mock.patch.dict(presets.TINY, {"tiny-gpt2": dataclasses.replace(usual, sizes={**usual.sizes,
                                                                                       "num_hidden_layers": 2})}):
        yield
    parity.prepared.cache_clear()
