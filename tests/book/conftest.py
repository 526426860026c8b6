"""The built book, for the tests that look at its pages."""

import subprocess
import sys

import pytest

from book.build import OUT, ROOT
from tests.browsing import chromium, served

SITE = OUT


@pytest.fixture(scope="session")
def site():
    """The folder of the built site. `make book` is quick where little has changed; a warning fails it."""
    done = subprocess.run([sys.executable, "-m", "book"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


@pytest.fixture(scope="session")
def address(site):
    """Where a server of the site answers."""
    with served(site) as where:
        yield where


@pytest.fixture(scope="module")
def browser():
    """A browser for the tests of one file."""
    with chromium() as driver:
        yield driver
