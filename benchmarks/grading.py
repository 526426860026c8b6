"""Throughput of batch grading, its resources, and the cost of a kill in the middle.

    python benchmarks/grading.py [--submissions 300] [--jobs 2] [--out benchmarks/grading.md]

Every submission holds the solutions of five exercises on ranks, graded on public and hidden cases. The run is killed
when half is done, and started again. Then come bombs, which have to be over within their limit and two seconds.
"""

import csv
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil

from benchmarks.harness import HERE, options, publish, table
from course_lib.grading import masters
from course_lib.grading.hidden import solutions_folder
from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Sandbox
from course_lib.grading.tasks import TASKS
from course_lib.grading.watch import Ended, Limits

CLI = HERE.parent / "course_lib" / "cli.py"
CHOSEN = ("ddp.average", "ddp.bucketing", "ddp.overlap", "zero.stage1", "evaluation.gather")
BOMBS = {
    # Bounded in number and time: root may have any number of processes, and this is to be safe where grading is not.
    "forks": "import os, time\nend = time.monotonic() + 20\nfor i in range(8): os.fork()\n"
    "while time.monotonic() < end: pass\n",
    "memory": "held = []\nwhile True: held.append(b'x' * (64 << 20))\n",
    "disk": "i = 0\nwhile True:\n    i += 1\n    try: open(str(i), 'wb').write(bytes(1 << 20))\n"
    "    except OSError: pass\n",
    "output": "import os\nwhile True:\n    for fd in range(1, 20):\n        try: os.write(fd, b'x' * 65536)\n"
    "        except OSError: pass\n",
    "a loop": "while True: pass\n",
}
BOMB_SECONDS = 5.0
LATER_SECONDS = 2.0  # that a bomb may outlive its limit
SAMPLE_SECONDS = 1.0


class Peak(threading.Thread):
    """Samples the memory of a process and all below it, in bytes."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.process, self.grader, self.all = psutil.Process(pid), 0, 0
        self.start()

    def run(self) -> None:
        while self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE:
            try:
                own = self.process.memory_info().rss
                below = sum(each.memory_full_info().pss for each in self.process.children(recursive=True))
                self.grader, self.all = max(self.grader, own), max(self.all, own + below)
            except (psutil.Error, OSError):
                pass
            time.sleep(SAMPLE_SECONDS)


class Noting(Sandbox):
    """A sandbox that notes how each run in it ended."""

    ends: ClassVar[list[Ended]] = []

    def run(self, *args: Any) -> Ended:
        self.ends.append(super().run(*args))
        return self.ends[-1]


def make_hall(folder: Path, count: int) -> None:
    """Scripts with the solutions, one folder per learner; each learner's own comment makes each text another."""
    texts = {
        lesson: masters.answers(solutions_folder() / f"{lesson}.ipynb")
        for lesson in {TASKS[name].lesson for name in CHOSEN}
    }
    for i in range(count):
        own = folder / f"learner{i:03}"
        own.mkdir(parents=True)
        for name in CHOSEN:
            text = f"# learner {i}\n{texts[TASKS[name].lesson][name]}"
            (own / f"{name}.py").write_text(text, encoding="utf-8")


def grade(hall: Path, out: Path, jobs: int, kill_at: int | None) -> tuple[float, Peak, int]:
    """Seconds, memory and how many verdicts there are at the end; killed once there are ``kill_at``."""
    command = f"--out {out} --tasks {','.join(CHOSEN)} --jobs {jobs} --seed 1"
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, CLI, "grade", hall, *command.split()], stdout=subprocess.DEVNULL)
    peak = Peak(process.pid)
    while process.poll() is None:
        if kill_at is not None and len(list(out.glob("verdicts/*/*.json"))) >= kill_at:
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert not psutil.wait_procs(below, timeout=20)[1], "a killed run left processes"
        time.sleep(0.5)
    if kill_at is None and process.returncode:
        raise SystemExit(f"course grade ended with {process.returncode}")
    return time.perf_counter() - begin, peak, len(list(out.glob("verdicts/*/*.json")))


def bombs() -> list[tuple]:
    """One row per bomb: how it was ended, and seconds from when the answer began until nothing was left of it."""
    rows = []
    limits = Limits(seconds=BOMB_SECONDS, memory=2 << 30)
    for name, source in BOMBS.items():
        verdict = grade_source(TASKS[CHOSEN[0]], source, hidden=None, limits=limits, sandbox=Noting())
        seconds = Noting.ends[-1].seconds
        if verdict.points or not 0 < seconds <= BOMB_SECONDS + LATER_SECONDS:
            raise SystemExit(f"the bomb `{name}` was over after {seconds:.1f} s, with {verdict.points} points")
        rows.append((name, verdict.error, f"{seconds:.1f}"))
    return rows


def main() -> None:
    """Measure and write the table."""
    args = options(__doc__, submissions=300, jobs=len(os.sched_getaffinity(0)), out=HERE / "grading.md")
    total = args.submissions * len(CHOSEN)
    with tempfile.TemporaryDirectory() as folder:
        hall, out = Path(folder, "hall"), Path(folder, "out")
        make_hall(hall, args.submissions)
        first, peak_1, kept = grade(hall, out, args.jobs, total // 2)
        before = {path: path.stat().st_mtime_ns for path in out.glob("verdicts/*/*.json")}
        second, peak_2, done = grade(hall, out, args.jobs, None)
        assert done == total and {path: path.stat().st_mtime_ns for path in before} == before, "a verdict was lost"
        with (out / "grades.csv").open(encoding="utf-8", newline="") as stream:
            grades = list(csv.DictReader(stream))
        full, rows = sum(row["score"] == row["max_score"] for row in grades), len(grades)
    memory = {kind: max(getattr(peak, kind) for peak in (peak_1, peak_2)) / 2**20 for kind in ("grader", "all")}
    publish(
        args.out,
        "Grading a hall",
        ("torch",),
        f"{args.submissions} submissions of {len(CHOSEN)} exercises on real ranks ({', '.join(CHOSEN)}), public and "
        f"hidden cases, {args.jobs} at a time, each in a sandbox of its own; killed (SIGKILL) after {kept} verdicts "
        "and started again.",
        table(
            "what | ",
            [
                ("gradings per hour", f"{3600 * total / (first + second):,.0f}"),
                ("seconds, both runs", f"{first + second:,.0f}"),
                ("verdicts kept over the kill", f"{kept} of {kept}"),
                ("verdicts at the end", f"{done} of {total}"),
                ("learners' lessons with full points", f"{full} of {rows}"),
                ("the grader's own memory at most, MiB", f"{memory['grader']:,.0f}"),
                ("with all sandboxes, MiB", f"{memory['all']:,.0f}"),
            ],
        ),
        f"Bombs, under a limit of {BOMB_SECONDS:g} s and 2 GiB: seconds from when the answer began until nothing was "
        "left of it.",
        table("bomb | ended by | seconds", bombs()),
    )


if __name__ == "__main__":
    main()
