"""The command line: ``course COMMAND``, or ``accelerate launch course_lib/cli.py COMMAND``.

Each command is a file in commands/ with NAME, HELP, register(parser) and run(args); nothing heavy
is imported before a command runs, so that --help answers at once.
"""

import sys

if __name__ == "__main__":
    # Run as a script, Python puts course_lib/ itself first on the path, where our modules could shadow packages.
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import io
import os
import shlex
import time
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from course_lib import __version__, missing_extra
from course_lib.cloud import container
from course_lib.commands import (
    audit,
    bench,
    check,
    completion,
    doctor,
    evaluate,
    grade,
    merge,
    meter,
    once,
    plan,
    progress,
    push,
    release,
    runs,
    schedule,
    select,
    simulate,
    submit,
    sweep,
    train,
    watch,
)
from course_lib.config import files as config_files
from course_lib.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESUME, ConfigError, CourseError, near, nearest
from course_lib.tracking.redact import redact

COMMANDS = (
    train,
    evaluate,
    merge,
    audit,
    watch,
    meter,
    schedule,
    plan,
    simulate,
    select,
    bench,
    runs,
    sweep,
    submit,
    push,
    check,
    progress,
    grade,
    release,
    doctor,
)

LESS_MEMORY = {
    "train": "take a smaller --batch_size and as much more of --gradient_accumulation_steps, then "
    "--activation_checkpointing; `course plan` says what fits",
    "evaluate": "take a smaller --eval_batch_size",
}
"""What to do about a GPU that has too little memory, by command."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as a ConfigError, with the nearest name."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, f"see `course {self.prog.partition(' ')[2]}".rstrip() + " --help`")


def command_line() -> "tuple[Parser, argparse._SubParsersAction[Parser]]":
    """The parser of the whole command line, and its commands."""
    parser = Parser(
        prog="course",
        description="Train transformers on one process or many, and learn how it works.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--print_completion",
        choices=completion.SHELLS,
        help="print the script by which a shell completes commands, options and values",
    )
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        own = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP, allow_abbrev=False)
        command.register(own)
        own.set_defaults(run=command.run, options=[o for a in own._actions for o in a.option_strings])
    return parser, commands


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line; `-` and `_` are alike in option names.

    Raises:
        ConfigError: no such command or option, or a value that its type refuses.
    """
    parser, commands = command_line()
    argv, started = split(without_local_rank(argv))
    if word := next((word for word in argv if any("\ud800" <= letter <= "\udfff" for letter in word)), None):
        raise ConfigError(
            f"`{word}` is no text in this system's encoding, {sys.getfilesystemencoding()}",
            "set PYTHONUTF8=1 in the environment, and name files in UTF-8",
        )
    if argv and not argv[0].startswith("-") and argv[0] not in commands.choices:
        raise ConfigError(
            f"unknown command `{argv[0]}`",
            nearest(argv[0], commands.choices),
            spelt=_only(argv[0], near(argv[0], commands.choices)),
        )
    args, unknown = parser.parse_known_args([underscored(token) for token in argv])
    if args.print_completion:
        args.run = lambda _: completion.run(parser, args.print_completion)
        return args
    if not hasattr(args, "run"):
        parser.print_help()
        raise SystemExit(2)
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("--"):
            raise ConfigError(f"unknown option `{name}`", "options begin with `--`")
        plain = [option.lstrip("-") for option in args.options]  # the hyphens make all of them alike
        likely = [f"--{close}" for close in near(name[2:], plain)]
        raise ConfigError(
            f"unknown option `{name}`",
            nearest(likely[0], likely, len(likely)) if likely else "",
            spelt=_only(name, likely),
        )
    args.command_line = started
    return args


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line of ours, and what follows ``--`` where the command starts somebody else's."""
    argv = list(argv)
    starting = [command.NAME for command in COMMANDS if getattr(command, "TAKES_COMMAND", False)]
    if argv and argv[0] in starting and "--" in argv:
        return argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    return argv, []


def without_local_rank(argv: Sequence[str]) -> list[str]:
    """A command line without the ``--local_rank=N`` that DeepSpeed's launcher puts before it.

    Raises:
        ConfigError: no launcher has set LOCAL_RANK, or to another number.
    """
    if not (argv and underscored(argv[0]).startswith("--local_rank=")):
        return list(argv)
    given, rank = argv[0].partition("=")[2], os.environ.get("LOCAL_RANK")
    if given != rank:
        raise ConfigError(
            f"--local_rank is {given}, and the environment's LOCAL_RANK is {rank}",
            "start with torchrun, accelerate launch, deepspeed, or --num_processes N",
        )
    return list(argv[1:])


def _only(word: str, likely: Sequence[str]) -> dict[str, str] | None:
    """A misspelt word of the command line by the only one that it can be."""
    return {word: likely[0]} if len(likely) == 1 else None


def mended(argv: Sequence[str], error: CourseError) -> str:
    """The command line that would work, by what an error knows: misspelt words replaced, options set or left out.

    Returns:
        The command as one types it; empty where it would be the same one, or has characters that are no text.
    """
    words: list[str] = []
    rest = [underscored(token) for token in argv]
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        plain = name.removeprefix("--")
        if name.startswith("--") and config_files.ALIASES.get(plain, plain) in error.cure:
            if not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)
        else:
            words.append(error.spelt.get(name, name) + equals + value)
    words += [word for name, value in error.cure.items() if value is not None for word in (f"--{name}", value) if word]
    if words == [underscored(token) for token in argv] or not all(word.isprintable() for word in words):
        return ""
    return shlex.join(["course", *words])


def underscored(token: str) -> str:
    """``--learning-rate=1e-4`` as ``--learning_rate=1e-4``; values are left alone."""
    name, equals, value = token.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else token


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a mistake of the user's is one line on stderr."""
    sys.excepthook = traceback_without_keys
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the terminal's encoding lacks is shown as \u…, and ends no run
            stream.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if job := container.discover():
            argv = job.arguments(argv)
        args = parse(argv)
        args.argv, args.main = argv, main
        return args.run(args)
    except CourseError as error:
        line, works = str(error), mended(argv, error) if error.cure or error.spelt else ""
        if works:
            line += f"{'' if line.endswith('?') else '.'} Try: {works}"
        return report(line, error.exit_code)
    except ModuleNotFoundError as error:
        if (missing := missing_extra.explain(error, argv[0] if argv else "")) is None:
            raise
        return report(str(missing), missing.exit_code)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        what = ". ".join(str(error).partition("\n")[0].split(". ")[:3]).rstrip(".")  # torch goes on about its allocator
        return report(f"{what}: {LESS_MEMORY.get(argv[0] if argv else '', 'take a smaller model')}", EXIT_FAILED)
    except KeyboardInterrupt:
        return report("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def report(line: str, code: int) -> int:
    """Say what was wrong, once: rank 0 at once, another rank only if it is still alive five seconds later.

    Where every rank meets the same mistake, the launcher ends the others as soon as rank 0 has
    ended; where one rank alone does, those seconds are all it costs. On a machine with more ranks than cores rank 0
    may come later than that: of the ranks that the course has started the first one speaks, and no other.
    """
    rank = int(os.environ.get("RANK", 0))
    # The ranks have agreed to stop, and a launcher that was asked to ends none of them early: one per machine speaks.
    agreed = code in (EXIT_INTERRUPTED, EXIT_RESUME)
    if job := container.discover():
        job.failed(redact(line))
    if rank and not agreed:
        time.sleep(5.0)
    if rank:
        line = f"rank {rank}: {line}"
    if not (agreed and int(os.environ.get("LOCAL_RANK", rank))) and once.is_first():
        print(f"course: {redact(line)}", file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        sys.stdout.flush()
        os._exit(code)  # Python would take its time to end, and the other ranks would speak up
    return code


def traceback_without_keys(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's traceback of a defect, its keys and tokens hidden."""
    text = redact("".join(traceback.format_exception(kind, error, trace)))
    print(text, end="", file=sys.stderr, flush=True)
    if job := container.discover():
        job.failed(text)


if __name__ == "__main__":
    sys.exit(main())
