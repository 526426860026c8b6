"""What is replaced for a while is there again afterwards, in the form that it had."""

import os

import pytest

from course_lib.replacing import environment, replaced


class Base:
    @staticmethod
    def fixed():
        return "base"


class Below(Base):
    pass


def test_a_class_has_its_own_again_and_an_inherited_one_is_not_copied():
    own, inherited = dict(vars(Base)), dict(vars(Below))
    for owner in (Base, Below):
        with pytest.raises(KeyError), replaced(owner, "fixed", staticmethod(lambda: "new")) as before:
            assert owner.fixed() == "new" and before() == "base"
            raise KeyError
        assert owner.fixed() == "base"
    assert dict(vars(Base)) == own and dict(vars(Below)) == inherited


def test_what_is_not_there_cannot_be_replaced():
    with pytest.raises(AttributeError, match="moved"), replaced(Base, "moved", None):
        pass


def test_the_environment_is_as_it_was(monkeypatch):
    monkeypatch.setenv("COURSE_KEPT", "before")
    before = dict(os.environ)
    with environment({"COURSE_KEPT": "now", "COURSE_NEW": "1"}):
        assert (os.environ["COURSE_KEPT"], os.environ.pop("COURSE_NEW")) == ("now", "1")
        del os.environ["COURSE_KEPT"]
    assert dict(os.environ) == before
