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
import os
import time
from collections.abc import Sequence
from typing import NoReturn

from course_lib import __version__
from course_lib.commands import dashboard, doctor, evaluate, plan, push, runs, schedule, sweep, train
from course_lib.errors import EXIT_INTERRUPTED, ConfigError, CourseError, nearest

COMMANDS = (train, evaluate, schedule, plan, runs, dashboard, sweep, push, doctor)


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as a ConfigError, with the nearest name."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, f"see `course {self.prog.partition(' ')[2]}".rstrip() + " --help`")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line; `-` and `_` are alike in option names.

    Raises:
        ConfigError: no such command or option, or a value that its type refuses.
    """
    parser = Parser(prog="course", description="Train transformers on one process or many, and learn how it works.",
                    allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        own = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP, allow_abbrev=False)
        command.register(own)
        own.set_defaults(run=command.run, options=[o for a in own._actions for o in a.option_strings])
    if argv and not argv[0].startswith("-") and argv[0] not in commands.choices:
        raise ConfigError(f"unknown command `{argv[0]}`", nearest(argv[0], commands.choices))
    args, unknown = parser.parse_known_args([underscored(token) for token in argv])
    if not hasattr(args, "run"):
        parser.print_help()
        raise SystemExit(2)
    if unknown:
        name = unknown[0].partition("=")[0]
        hint = nearest(name, args.options) if name.startswith("--") else "options begin with `--`"
        raise ConfigError(f"unknown option `{name}`", hint)
    return args


def underscored(token: str) -> str:
    """``--learning-rate=1e-4`` as ``--learning_rate=1e-4``; values are left alone."""
    name, equals, value = token.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else token


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a mistake of the user's is one line on stderr."""
    try:
        argv = sys.argv[1:] if argv is None else list(argv)
        args = parse(argv)
        args.argv = argv
        return args.run(args)
    except CourseError as error:
        return report(str(error), error.exit_code)
    except KeyboardInterrupt:
        return report("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def report(line: str, code: int) -> int:
    """Say what was wrong, once: rank 0 at once, another rank only if it is still alive five seconds later.

    Where every rank meets the same mistake, the launcher ends the others as soon as rank 0 has
    ended; where one rank alone does, those seconds are all it costs.
    """
    rank = int(os.environ.get("RANK", 0))
    if rank:
        time.sleep(5.0)
        line = f"rank {rank}: {line}"
    print(f"course: {line}", file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        sys.stdout.flush()
        os._exit(code)  # Python would take its time to end, and the other ranks would speak up
    return code


if __name__ == "__main__":
    sys.exit(main())
