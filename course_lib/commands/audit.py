"""``course audit``: is a distributed gradient right? One process against every layout, parameter by parameter."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from course_lib.errors import ConfigError, CourseError

NAME = "audit"
HELP = "compare gradients on every layout of ranks with those of one process, and name what is wrong"
EXIT_WRONG = 1


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("subject", metavar="FILE.py:FUNCTION",
                        help="`make(layout)`, called on each rank, gives model, optimizer, loss(model, batch), batch")
    parser.add_argument("--ranks", type=int, default=4, help="layouts of up to so many ranks (default: 4)")
    parser.add_argument("--axes", default="dp", help="comma-separated: pp, dp, shard, cp, ep, tp (default: dp)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each layout (default: 120)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the verdicts; 0 where everything agrees, 1 where something differs."""
    from course_lib.audit import audit, layouts, report

    make = _make(args.subject)
    audited = audit(make, layouts(args.ranks, args.axes.split(",")), timeout=args.timeout)
    if not audited.verdicts:
        raise CourseError(f"{args.subject} has none of these layouts", "give other --axes, or more --ranks")
    if args.json:
        print(report.as_json(audited))
    else:
        print("\n".join(report.lines(audited)))
    return 0 if audited.clean else EXIT_WRONG


def _make(subject: str) -> Any:
    """The function that a file names.

    Raises:
        ConfigError: no such file or function, or the file cannot be imported.
    """
    name, _, function = subject.rpartition(":")
    path = Path(name)
    if not name or not path.is_file():
        raise ConfigError(f"cannot read {name or subject}", "give a file and a function, as my_training.py:make")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}", "mend it first") from None
    if not callable(made := getattr(module, function, None)):
        raise ConfigError(f"{path} has no function `{function}`", "give FILE.py:FUNCTION")
    return made
