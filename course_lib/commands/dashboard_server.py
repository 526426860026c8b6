"""The servers behind ``course dashboard``, for this machine alone: trackio's, and a page made for every request."""

import contextlib
import errno
import html
import socket
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import matplotlib

from course_lib.commands.runs import figures_of
from course_lib.errors import ConfigError, CourseError
from course_lib.tracking import collect, report
from course_lib.tracking.trackio_dashboard import dashboard

ADDRESS = "127.0.0.1"


@contextlib.contextmanager
def refused_port(port: int) -> Iterator[None]:
    """Say in one line that a port is taken or not allowed.

    Raises:
        ConfigError: it is.
    """
    try:
        yield
    except (OSError, OverflowError) as error:
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        raise ConfigError(
            f"port {port} on {ADDRESS} {'is taken' if taken else f'cannot be used ({error})'}",
            "give another --port, or 0 for any that is free",
        ) from None


@contextlib.contextmanager
def serve_trackio(folders: list[str], port: int, refresh: int) -> Iterator[int]:
    """trackio's own dashboard of the runs in some folders, while the context lasts; gives its port.

    Raises:
        ConfigError: the port is taken or not allowed.
    """
    with refused_port(port):
        listener = socket.create_server((ADDRESS, port))
    with (
        listener,
        tempfile.TemporaryDirectory(prefix="course-dashboard-") as copy,
        dashboard(lambda: databases(folders), Path(copy), listener, refresh),
    ):
        yield listener.getsockname()[1]


def databases(folders: list[str]) -> list[Path]:
    """trackio's databases in some folders, each once."""
    return list(dict.fromkeys(path for folder in folders for path in collect.trackio_databases(Path(folder))))


def serve(folders: list[str], port: int, refresh: int) -> ThreadingHTTPServer:
    """A server of the runs' page, read anew for every request, that other machines cannot reach.

    Raises:
        ConfigError: the port is taken or not allowed.
    """
    matplotlib.use("Agg")  # no window is opened, least of all from a thread
    drawing = threading.Lock()  # pyplot is not for several threads at once

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site may point its own name at this address; it is to see nothing.
            if self.headers.get("Host", "").rpartition(":")[0] not in (ADDRESS, "localhost"):
                self.send_error(403, "ask for 127.0.0.1 or localhost")
            elif self.path != "/":
                self.send_error(404)
            else:
                with drawing:
                    status, text = _page(folders, refresh)
                self._answer(status, text.encode())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", "default-src 'none'; img-src data:; style-src 'unsafe-inline'")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with refused_port(port):
        return ThreadingHTTPServer((ADDRESS, port), Page)


def _page(folders: list[str], refresh: int) -> tuple[int, str]:
    """HTTP status and page; an unreadable record is said on the page, since a run may just be writing it."""
    try:
        runs = collect.distinct(collect.read_runs(*folders))
        return 200, report.html_page("Runs", runs, figures_of(runs, []), refresh)
    except CourseError as error:
        return 500, f"<p>{html.escape(str(error))}</p>"
