"""What every rank needs, imported before ranks are forked."""

import importlib

import pytest

pytest.register_assert_rewrite("tests.parallel.fsdp_cases")


@pytest.fixture(scope="session", autouse=True)
def imported_once():
    """An optimizer imports it: two seconds here, and not on each rank of each launch."""
    importlib.import_module("torch._dynamo")
