"""Which cases of a matrix `make test` runs; `make long` runs the others."""

import pytest


def some(cases, *kept):
    """The cases as ``pytest.mark.parametrize`` takes them: those that are kept, and the others marked as long."""
    cases = list(cases)
    assert kept and all(case in cases for case in kept), f"no such case: {kept}"
    return [case if case in kept else pytest.param(case, marks=pytest.mark.long) for case in cases]
