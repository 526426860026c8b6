"""The tiny presets a quarter as wide, with a quarter of the words: a third of the trainings' time was their width.

A conftest.py that imports the fixture has its whole folder train them; a module that needs the usual ones defines a
fixture of the same name. Commands that start a new interpreter have the usual ones in any case.
"""

import contextlib
import dataclasses
from unittest import mock

import pytest

from course_lib.lessons import parity
from course_lib.modeling import presets

WIDTH, WORDS = 48, 1000


@contextlib.contextmanager
def narrowed(words=WORDS, width=WIDTH, **sizes):
    """Within it every tiny preset is narrow, has so many words, and these sizes too."""

    def narrow(preset):
        shares = {name: size * width // preset.sizes["hidden_size"] for name, size in preset.sizes.items()}
        inner = {name: max(32, size) for name, size in shares.items() if name == "intermediate_size"}
        return dataclasses.replace(preset, sizes={**preset.sizes, "hidden_size": width, **inner, **sizes})

    narrow_ones = {name: narrow(preset) for name, preset in presets.TINY.items()}
    parity.prepared.cache_clear()  # it knows a model by its name
    with mock.patch.dict(presets.TINY, narrow_ones), mock.patch.object(presets, "VOCABULARY_SIZE", words):
        yield
    parity.prepared.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def narrow_presets():
    with narrowed():
        yield
