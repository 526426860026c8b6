"""A command's imports: nothing is collected while they run, and what they made is set aside for good."""

import gc
import sys

import pytest

from course_lib.commands.options import importing

MADE = "class Loop:\n    def __init__(self):\n        self.own = self\nheld = [Loop() for _ in range(20_000)]\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of many objects, not yet imported."""
    (tmp_path / "of_many_objects.py").write_text(MADE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "of_many_objects"
    sys.modules.pop("of_many_objects", None)
    gc.unfreeze()


@pytest.fixture
def collections():
    """How often garbage was looked for so far, as a list that grows."""
    seen = []

    def note(phase, _):
        seen.append(phase)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_nothing_is_collected_and_all_is_set_aside(module, collections):
    before = gc.get_freeze_count()
    with importing():
        __import__(module)
    assert not collections and gc.isenabled()
    assert gc.get_freeze_count() > before + 20_000


def test_without_it_the_import_is_interrupted(module, collections):
    __import__(module)
    assert len(collections) > 10


def test_nothing_new_sets_nothing_aside_and_off_stays_off(module):
    __import__(module)
    before = gc.get_freeze_count()
    with importing():
        __import__(module)
    assert gc.get_freeze_count() == before
    gc.disable()
    try:
        with pytest.raises(ImportError), importing():
            __import__("no_such_module_of_ours")
        assert not gc.isenabled()
    finally:
        gc.enable()
