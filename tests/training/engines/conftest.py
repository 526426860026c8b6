"""A model of half the depth, where no stage or split asks for four blocks."""

import pytest

from tests.narrow_presets import narrowed


@pytest.fixture(scope="module")
def two_blocks():
    with narrowed(num_hidden_layers=2):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")
