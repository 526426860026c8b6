"""Errors that are the user's to mend: one clear line, an exit code, never a traceback.

Everything else that is raised is a defect of ours and keeps its traceback.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_RESUME = 75
"""A checkpoint was written, and the same command with ``--resume_from_checkpoint auto`` goes on: sysexits' TEMPFAIL."""
EXIT_HUNG = 76
"""The watchdog ended the ranks; its report names the one they waited for."""


LONGEST_NAME, LONGEST_WORD = 200, 400
"""Characters of a name in backticks, and of a word, that a message shows."""


def one_line(text: str) -> str:
    """A message in one line, whatever names from files are in it: those that are long are cut, and characters that a
    terminal does not show, or takes for orders, are escaped."""
    text = " ".join(text.split())
    text = re.sub(rf"`([^`]{{{LONGEST_NAME}}})[^`]+`", r"`\1…`", text)
    text = re.sub(rf"(\S{{{LONGEST_WORD}}})\S+", r"\1…", text)
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


class CourseError(Exception):
    """Something that the user can mend.

    Args:
        what: what is wrong and where, without a full stop.
        instead: what to do about it, without a full stop.
        cure: options, with their values, under which the same command would work, where that is known; a value of None
            takes the option away. The command line then ends the message with that command.
        spelt: words of the command line by what they were meant to be, where they can only be one other.
    """

    exit_code = EXIT_FAILED

    def __init__(
        self,
        what: str,
        instead: str = "",
        *,
        cure: Mapping[str, str | None] | None = None,
        spelt: Mapping[str, str] | None = None,
    ):
        self.what, self.instead = one_line(what), one_line(instead)
        self.cure, self.spelt = dict(cure or {}), dict(spelt or {})
        super().__init__(f"{self.what}: {self.instead}" if self.instead else self.what)

    def __reduce__(self):
        return type(self), (self.what, self.instead), {"cure": self.cure, "spelt": self.spelt}


class ConfigError(CourseError):
    """A setting that is unknown, of the wrong type, or out of range."""

    exit_code = EXIT_USAGE


class DataError(CourseError):
    """A data set, column, split or file that cannot be used."""

    exit_code = EXIT_USAGE


class ModelError(CourseError):
    """A model or tokenizer that cannot be found or does not fit the task."""

    exit_code = EXIT_USAGE


class CheckpointError(CourseError):
    """A checkpoint that is damaged, incomplete, or from another run."""


class LaunchError(CourseError):
    """Ranks that could not be started, or fewer than were asked for."""


class TrainingDiverged(CourseError):
    """The loss or the gradient is no longer a finite number."""


class DesyncError(CourseError):
    """Ranks that should agree and do not."""


class TrainingInterrupted(CourseError):
    """Ctrl-C (EXIT_INTERRUPTED), SIGTERM or SIGUSR1 (EXIT_RESUME); a checkpoint has been written."""

    def __init__(self, what: str, instead: str = "", exit_code: int = EXIT_INTERRUPTED):
        super().__init__(what, instead)
        self.exit_code = exit_code

    def __reduce__(self):
        return type(self), (self.what, self.instead, self.exit_code), {"cure": self.cure, "spelt": self.spelt}


AS_NEAR = 0.12
"""How much less alike than the nearest name another may be and still be named; of 1 for equal ones."""


def near(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names most like one, the nearest first; none that is much less alike than the nearest."""
    matches = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=count, cutoff=0.6)
    alike = [difflib.SequenceMatcher(None, candidate, name).ratio() for candidate in matches]
    return [candidate for candidate, ratio in zip(matches, alike, strict=True) if ratio > alike[0] - AS_NEAR]


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A hint such as ``did you mean `batch_size`?``, or the choices where none is near."""
    known = list(dict.fromkeys(known))
    close = near(name, known, count)
    if close:
        return "did you mean " + " or ".join(f"`{candidate}`" for candidate in close) + "?"
    if 0 < len(known) <= 12:
        return "choose from " + ", ".join(f"`{choice}`" for choice in known)
    return ""
