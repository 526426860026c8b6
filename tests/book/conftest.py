"""The built book, for the tests that look at its pages."""

import contextlib
import functools
import http.server
import os
import subprocess
import sys
import threading

import pytest

from book.build import OUT, ROOT

SITE = OUT


@pytest.fixture(scope="session")
def site():
    """The folder of the built site. `make book` is quick where little has changed; a warning fails it."""
    done = subprocess.run([sys.executable, "-m", "book"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(site):
    """Where a server of the site answers, until the block ends."""
    handler = functools.partial(Quiet, directory=os.fspath(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def address(site):
    """Where a server of the site answers."""
    with served(site) as where:
        yield where
