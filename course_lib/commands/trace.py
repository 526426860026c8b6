"""``course trace``: a recording of ranks side by side, as the book plays it, for Perfetto."""

import argparse
import json
from pathlib import Path

from course_lib.errors import ConfigError

NAME = "trace"
HELP = "turn a recording of ranks (book/recordings/) into a trace for ui.perfetto.dev, with arrows between them"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("recording", type=Path, metavar="RECORDING", help="a file of book/recordings/")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where the trace goes [RECORDING's name with .trace.json, here]",
    )


def run(args: argparse.Namespace) -> int:
    """Write the trace and say what it holds.

    Raises:
        ConfigError: no such file, or it is no recording.
    """
    path: Path = args.recording
    try:
        recording = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror})", "give a file of book/recordings/") from None
    except ValueError:
        raise ConfigError(f"{path} is no JSON", "give a file of book/recordings/") from None
    if not isinstance(recording, dict) or not {"ranks", "links", "code"} <= recording.keys():
        raise ConfigError(f"{path} is no recording of ranks", "give a file of book/recordings/")
    from course_lib.metering.recording_trace import trace  # by way of its package it imports torch
    from course_lib.writing import write_text

    made = trace(recording)
    output: Path = args.output or Path(f"{path.stem}.trace.json")
    write_text(output, json.dumps(made, separators=(",", ":")))
    phases = [event["ph"] for event in made["traceEvents"]]
    print(
        f"{len(recording['ranks'])} ranks, {phases.count('X')} slices, {phases.count('s')} arrows: {output} "
        "(open it at https://ui.perfetto.dev)"
    )
    return 0
