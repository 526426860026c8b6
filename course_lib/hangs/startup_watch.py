"""Before the process group stands: which rank has not come to ``init_process_group``, and where it is instead.

Each rank leaves a note in a folder beside that of the reports, once a second: its process, where its main thread is,
for how long nothing has happened there, whether it has come. One that has come, and waits, reads the others' notes.
Nothing here imports torch.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.errors import EXIT_HUNG
from course_lib.hangs.diagnosis import Culprit, What, ranks_in_words
from course_lib.hangs.liveness import Activity, machine, process_state, start_ticks
from course_lib.hangs.report import HangReport, has_report
from course_lib.hangs.user_frames import frame_of, main_place
from course_lib.writing import write_text

NOTE_SECONDS = 1.0
OWNER = "COURSE_ATTACH_OWNER"
"""Number of the process that a RANK in the environment is of: its children inherit the variable."""
UNSEEN_FACTOR = 10
"""How many times the seconds a rank may take of which there is no note: it may be on a machine with its own folder."""


@dataclass(frozen=True)
class Note:
    """A rank's note about itself.

    Attributes:
        pid: of its process.
        started: that process's `start_ticks`.
        host: where it runs.
        machine: where the kernel can be asked for it.
        at: seconds of ``time.time``, when this was written.
        arrived: whether it is in ``init_process_group``.
        idle: seconds for which neither it nor its children have worked.
        file: of the user's, where its main thread is.
        line: in that file.
        stack: of its main thread.
    """

    pid: int
    started: int
    host: str
    machine: str
    at: float
    arrived: bool
    idle: float
    file: str | None
    line: int | None
    stack: str

    def state(self) -> str:
        """``dead``, ``stopped`` or ``running``; of another machine's process the last."""
        return process_state(self.pid, self.started) if self.machine == machine() else "running"


class StartupWatch:
    """Of this rank, from now until `end`; a thread of its own.

    Args:
        seconds: that a rank may do nothing before it comes, while another waits for it.
        folder: of the reports.
        rank: this one; None where it is not known yet.
        world_size: ranks.
    """

    def __init__(self, seconds: float, folder: Path, rank: int | None = None, world_size: int = 1):
        self.seconds, self.folder, self.rank, self.world_size = seconds, folder, rank, world_size
        launch = "-".join(
            os.environ.get(name, "")
            for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        )
        self.notes = folder.with_name(f"{folder.name}-start-" + "".join(c if c.isalnum() else "_" for c in launch))
        self._began, self._arrived_at = time.time(), 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Leave notes from now on."""
        if self._thread is None and self.rank is not None and not self._over.is_set():
            self._thread = threading.Thread(target=self._watch, name="startup-watch", daemon=True)
            self._thread.start()

    def arrive(self, rank: int | None, world_size: int | None) -> None:
        """This rank is going to wait for the others."""
        self.rank = self.rank if rank is None else rank
        self.world_size = self.world_size if world_size is None else world_size
        self._arrived_at = time.time()
        self.begin()

    def end(self) -> None:
        """The process group stands."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(5 * NOTE_SECONDS)
            self._leave()

    def _leave(self) -> None:
        """Take the own note away, and with the last one their folder."""
        with contextlib.suppress(OSError):
            self._own_note().unlink(missing_ok=True)
            self.notes.rmdir()

    def _own_note(self) -> Path:
        return self.notes / f"rank{self.rank}.json"

    def _watch(self) -> None:
        activity, worked_at = Activity([threading.current_thread()]), time.monotonic()
        while not self._over.wait(NOTE_SECONDS):
            if activity.is_busy(spins=False):
                worked_at = time.monotonic()
            try:
                self.notes.mkdir(parents=True, exist_ok=True)
                write_text(self._own_note(), json.dumps(dataclasses.asdict(self._note(time.monotonic() - worked_at))))
                missing = self._missing() if self._arrived_at else {}
            except OSError:
                continue  # a full disk is told by what the job writes
            if has_report(self.folder, self._began):
                self._leave()
                os._exit(EXIT_HUNG)
            if missing:
                self._report(missing)

    def _note(self, idle: float) -> Note:
        frame = frame_of(threading.main_thread())
        return Note(
            os.getpid(),
            start_ticks(os.getpid()),
            socket.gethostname(),
            machine(),
            time.time(),
            bool(self._arrived_at),
            idle,
            *main_place(os.getcwd()),
            "".join(traceback.format_stack(frame)) if frame else "",
        )

    def _missing(self) -> dict[int, Note | None]:
        """Those to blame, where this rank is the one to say so: of those that wait the first."""
        waited = time.time() - self._arrived_at
        if waited < self.seconds:
            return {}
        seen = {rank: self._read(rank) for rank in range(self.world_size)}
        if self.rank != min(rank for rank, note in seen.items() if rank == self.rank or (note and note.arrived)):
            return {}
        late = {rank: note for rank, note in seen.items() if rank != self.rank and not (note and note.arrived)}
        if (
            any(note is not None and note.state() == "running" and note.idle < self.seconds for note in late.values())
            and waited < UNSEEN_FACTOR * self.seconds
        ):
            return {}
        known = {rank: note for rank, note in late.items() if note is not None}
        return dict(known) if known else late if waited >= UNSEEN_FACTOR * self.seconds else {}

    def _read(self, rank: int) -> Note | None:
        try:
            note = Note(**json.loads((self.notes / f"rank{rank}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None
        return None if note.state() == "dead" and note.at < self._began else note  # of an earlier job

    def _report(self, late: dict[int, Note | None]) -> None:
        """Write who is missing, and end."""
        file, line = main_place(os.getcwd())
        come = [rank for rank in range(self.world_size) if rank not in late]
        others = f"{ranks_in_words(come)} wait{'s' if len(come) == 1 else ''} for it at {file}:{line}"
        verdicts = tuple(
            Culprit(
                rank,
                _what(note),
                f"rank {rank} {_how(note)}; {others}",
                "init_process_group",
                None,
                note.file if note else None,
                note.line if note else None,
            )
            for rank, note in late.items()
        )
        stacks = "\n".join(
            f"--- rank {rank} ---\n{note.stack if note else 'none: it has left no note'}"
            for rank, note in sorted(late.items())
        )
        report = HangReport(self.rank or 0, time.time() - self._arrived_at, verdicts, (), stacks)
        report.write(self.folder, [])
        os.write(2, f"watchdog: {report.summary}. The report: {self.folder}/hang-rank{self.rank}.txt\n".encode())
        shutil.rmtree(self.notes, ignore_errors=True)
        time.sleep(2 * NOTE_SECONDS)  # the others see it
        for note in late.values():
            if note is not None and note.state() == "stopped":
                os.kill(note.pid, signal.SIGKILL)
        os._exit(EXIT_HUNG)


def _what(note: Note | None) -> What:
    state = note.state() if note else "dead"
    return "stopped" if state == "stopped" else "dead" if state == "dead" else "elsewhere"


def _how(note: Note | None) -> str:
    """What is the matter with a rank that has not come, to follow its number."""
    absent = "has not come to init_process_group"
    if note is None:
        return f"{absent}, and no process has said that it is this rank"
    where = f"process {note.pid} on {note.host}"
    if note.state() == "dead":
        return f"{absent}: {where} has ended; it was last seen at {note.file}:{note.line}"
    if note.state() == "stopped":
        return f"{absent}: {where} is stopped, by SIGSTOP or a debugger, at {note.file}:{note.line}"
    return f"{absent}; it is at {note.file}:{note.line}"


def begin(settings: dict[str, Any]) -> StartupWatch:
    """Watch this process, at once where a launcher has said which rank it is.

    Args:
        settings: ``seconds`` and ``folder``.
    """
    rank = None
    if "RANK" in os.environ and os.environ.setdefault(OWNER, str(os.getpid())) == str(os.getpid()):
        rank = int(os.environ["RANK"])
    watch = StartupWatch(settings["seconds"], Path(settings["folder"]), rank, int(os.environ.get("WORLD_SIZE", 1)))
    watch.begin()
    return watch
