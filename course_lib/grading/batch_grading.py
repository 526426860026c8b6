"""Grades all submissions of a class: every task of every learner, several at a time, each verdict kept as it comes.

Each verdict is a file of its own, written beside its place and renamed. A run that was stopped finds the verdicts that
it has and grades the rest.
"""

import contextlib
import hashlib
import json
import random
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from course_lib.errors import CourseError
from course_lib.grading.hidden import hidden_cases
from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits, Sandbox
from course_lib.grading.submissions import Submission
from course_lib.grading.task import Case, Task
from course_lib.grading.verdict import Verdict
from course_lib.writing import write_text


@dataclass(frozen=True)
class Grading:
    """Settings under which a class's submissions are graded, the same for everybody.

    Attributes:
        tasks: by name.
        solutions: the instructor's folder, for its hidden cases.
        out: folder of verdicts and reports.
        sandbox: where the answers run.
        limits: what each task of each learner may take.
        jobs: how many at a time.
        seed: draws the hidden cases; None takes that of ``out``, or a new one.
    """

    tasks: Mapping[str, Task]
    solutions: Path
    out: Path
    sandbox: Sandbox
    limits: Limits
    jobs: int
    seed: int | None = None

    def grade(self, submissions: Sequence[Submission], progress: bool = True) -> dict[str, dict[str, Verdict]]:
        """Every verdict by learner and task, in order.

        Raises:
            CourseError: `Sandbox.require`, or ``out`` cannot be written.
        """
        self.sandbox.require()
        seed = self._seed()
        hidden = {
            name: hidden_cases(task, random.Random(f"{seed} {name}"), self.solutions)
            for name, task in self.tasks.items()
        }
        by_learner: dict[str, dict[str, Verdict]] = {s.learner: {} for s in submissions}
        waiting = []
        for submission in submissions:
            for name in self.tasks:
                kept = self._kept(submission, name, seed)
                if kept:
                    by_learner[submission.learner][name] = kept
                else:
                    waiting.append((submission, name))
        total = len(submissions) * len(self.tasks)
        with tqdm(total=total, initial=total - len(waiting), unit="task", disable=not progress) as bar:
            for learner, name, verdict in self._at_a_time(waiting, seed, hidden):
                by_learner[learner][name] = verdict
                bar.update()
        return {learner: {name: verdicts[name] for name in self.tasks} for learner, verdicts in by_learner.items()}

    def _at_a_time(
        self, waiting: Sequence[tuple[Submission, str]], seed: int, hidden: Mapping[str, Sequence[Case]]
    ) -> Iterator[tuple[str, str, Verdict]]:
        stop = threading.Event()

        def one(submission: Submission, name: str) -> tuple[str, str, Verdict] | None:
            if stop.is_set():
                return None
            return submission.learner, name, self._grade_one(submission, name, seed, hidden[name], stop)

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for future in as_completed([pool.submit(one, submission, name) for submission, name in waiting]):
                    if result := future.result():
                        yield result
            finally:
                stop.set()  # those under way end at once, without a verdict

    def _grade_one(
        self, submission: Submission, name: str, seed: int, hidden: Sequence[Case], stop: threading.Event
    ) -> Verdict:
        verdict = grade_source(
            self.tasks[name],
            submission.answers.get(name),
            hidden=hidden,
            limits=self.limits,
            sandbox=self.sandbox,
            stop=stop,
        )
        kept = {"of": self._fingerprint(submission, name, seed), "verdict": verdict.to_json()}
        path = self._path(submission.learner, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(kept, indent=1) + "\n")
        return verdict

    def _kept(self, submission: Submission, name: str, seed: int) -> Verdict | None:
        """The verdict of an earlier run on the same answer with the same cases and limits."""
        with contextlib.suppress(FileNotFoundError):
            kept = json.loads(self._path(submission.learner, name).read_text(encoding="utf-8"))
            if kept["of"] == self._fingerprint(submission, name, seed):
                return Verdict.from_json(kept["verdict"])
        return None

    def _path(self, learner: str, name: str) -> Path:
        return self.out / "verdicts" / learner / f"{name}.json"

    def _fingerprint(self, submission: Submission, name: str, seed: int) -> str:
        """SHA-256 of all that a verdict follows from, in hex."""
        parts = (
            submission.answers.get(name),
            seed,
            self.sandbox.isolated,
            self.limits,
            self.tasks[name].points,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _seed(self) -> int:
        """The seed of this run, kept in ``out``, so that a stopped run goes on with the same cases."""
        path = self.out / "seed.txt"
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if self.seed is None and path.exists():
                return int(path.read_text(encoding="utf-8"))
            seed = secrets.randbits(63) if self.seed is None else self.seed
            write_text(path, f"{seed}\n")
            return seed
        except OSError as error:
            raise CourseError(f"cannot write to {self.out}: {error.strerror}", "give another folder by --out") from None
