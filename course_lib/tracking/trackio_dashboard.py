"""trackio's own dashboard over the databases of many runs, served to this machine alone."""

import contextlib
import socket
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from course_lib.tracking.trackio_tracker import trackio_in

TABLES = ("metrics", "system_metrics", "alerts", "configs")
"""What the dashboard draws; a run's config may be written again, so it is copied each time."""


class Gathered:
    """One folder with the runs of several trackio databases, a project a database, as trackio reads them.

    It is a copy, so that what is done to runs in the dashboard is done to no run.

    Args:
        find: gives the databases; asked anew by each :meth:`update`.
        folder: for the copy.
    """

    def __init__(self, find: Callable[[], list[Path]], folder: Path):
        self.find, self.folder = find, folder
        self.copied: dict[tuple[Path, str], int] = {}

    def update(self) -> None:
        """Copy what has been written since the last time."""
        from trackio.sqlite_storage import SQLiteStorage

        for source in self.find():
            target = SQLiteStorage.init_db(source.stem)
            with closing(sqlite3.connect(target.absolute().as_uri(), uri=True, timeout=30)) as database:
                database.execute("ATTACH ? AS source", (f"{source.absolute().as_uri()}?mode=ro",))
                for table in TABLES:
                    self._copy(database, source, table)
                database.commit()

    def _copy(self, database: sqlite3.Connection, source: Path, table: str) -> None:
        def columns(where: str) -> list[str]:
            return [row[1] for row in database.execute(f"PRAGMA {where}.table_info({table})")]

        known = set(columns("source"))
        shared = ", ".join(name for name in columns("main") if name in known and name != "id")
        after = 0 if table == "configs" else self.copied.get((source, table), 0)
        last = database.execute(f"SELECT max(id) FROM source.{table}").fetchone()[0] or 0
        database.execute(
            f"INSERT OR REPLACE INTO main.{table} ({shared}) SELECT {shared} FROM source.{table} "
            "WHERE id > ? AND id <= ? ORDER BY id",
            (after, last),
        )
        self.copied[source, table] = last


async def _loads_nothing_from_elsewhere(request: Any, answer: Callable[[Any], Awaitable[Any]]) -> Any:
    response = await answer(request)
    response.headers["Content-Security-Policy"] = "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'"
    return response


@contextlib.contextmanager
def dashboard(find: Callable[[], list[Path]], folder: Path, listener: socket.socket, refresh: float) -> Iterator[None]:
    """Serve trackio's dashboard of the databases that ``find`` gives, while the context lasts.

    Args:
        find: gives the databases.
        folder: for a copy of them.
        listener: where to answer; another host name than its own or localhost is refused.
        refresh: seconds between two looks for new rows; 0: none after the first.
    """
    trackio = trackio_in(folder)
    import uvicorn
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    gathered, ended = Gathered(find, folder), threading.Event()
    gathered.update()
    app, _ = trackio.build_starlette_app_only(mcp_server=False)
    # A page of another site may point its own name at this address; it is to see nothing.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[listener.getsockname()[0], "localhost"])
    app.add_middleware(BaseHTTPMiddleware, dispatch=_loads_nothing_from_elsewhere)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)

    def follow() -> None:
        while refresh and not ended.wait(refresh):
            gathered.update()

    following = threading.Thread(target=follow, daemon=True)
    serving.start()
    following.start()
    try:
        yield
    finally:
        ended.set()
        server.should_exit = True
        serving.join()
        following.join()
