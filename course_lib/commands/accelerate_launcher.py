"""Settings of the ``accelerate launch`` above this process: applied or refused, never ignored.

``accelerate launch --cpu --num_processes 2`` starts one process on a machine without GPUs and
says nothing, so what the launcher was asked for is read from the launcher itself. What it leaves in the environment
becomes options of the command, as `launcher_words` has it.
"""

import argparse
import os
import sys
import typing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from course_lib.commands import launcher_words
from course_lib.commands.launcher_words import LAUNCHER, Said
from course_lib.commands.options import given_fields
from course_lib.config import files as config_files
from course_lib.config import option
from course_lib.config.axes import ENGINES
from course_lib.errors import ConfigError
from course_lib.launching import launch_environment
from course_lib.launching.launch_environment import LaunchEnvironment

DECIDE_ENGINE = {"training_type", "tensor_parallel_size", "context_parallel_size", "expert_parallel_size"}
"""Options under which an engine is chosen that is not the strategy's default."""


def discover() -> LaunchEnvironment:
    """Read the rank environment, and the command line of an Accelerate launcher above this process."""
    ranks = launch_environment.discover()
    return ranks if ranks.launched else replace(ranks, asked=asked_of_accelerate())


def asked_of_accelerate() -> int | None:
    """Processes that the ``accelerate launch`` which started this process was asked for, else None."""
    launch = launcher()
    if launch is None or launch.num_processes is not None:
        return None if launch is None else launch.num_processes
    from accelerate.commands.config import default_config_file, load_config_from_file

    if launch.config_file or os.path.isfile(default_config_file):
        return load_config_from_file(launch.config_file).num_processes
    return None


def launcher() -> argparse.Namespace | None:
    """The options of the ``accelerate launch`` which started this process, where one did.

    The launcher's own parser reads its command line, so that the answer is the one that Accelerate itself came to.
    """
    try:
        command = psutil.Process().parent().cmdline()  # type: ignore[union-attr]
    except (psutil.Error, AttributeError):
        return None
    arguments = _after_launch(command)
    if arguments is None:
        return None
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser().parse_args(arguments)


def take(args: argparse.Namespace) -> None:
    """Make what the launcher said options of this command, for the ranks that it starts too, and say so in a line.

    The words leave the environment: Accelerate and transformers would act on them a second time.

    Args:
        args: the parsed command line; it gets the options that it lacks.
    Raises:
        ConfigError: the launcher said what is not here, or what the command line or a file contradicts.
    """
    launch, words = launcher(), dict(os.environ)
    for name in ("gradient_accumulation_steps", "gradient_clipping", "mixed_precision"):
        if value := getattr(launch, name, None):
            words[f"--{name}"] = str(value)
    beside = Path(getattr(launch, "config_file", None) or ".").parent
    said = launcher_words.said(words, beside)
    leaves, where = config_files.given(args.config, given_fields(args))
    check_device(words, leaves, where)
    taken: dict[str, tuple[str, Said]] = {}
    for setting in said:
        for name, value in agreed(setting, leaves | {n: v for n, (v, _) in taken.items()}, where).items():
            taken[name] = value, setting
    # `auto` of the command line goes with them: the last of two equal options counts.
    read = {name: value for name, (value, _) in taken.items() if f"--{name}" in args.options}
    for name in [name for name in os.environ if launcher_words.row(name)]:
        del os.environ[name]
    vars(args).update(read)
    args.argv = [*args.argv, *(text for name, value in read.items() for text in (f"--{name}", value))]
    if taken and os.environ.get("RANK", "0") == "0":
        _say(args, taken, read)


def agreed(said: Said, leaves: Mapping[str, Any], where: Mapping[str, str]) -> dict[str, str]:
    """Options to take of a word where a run says nothing; none where it says the same.

    Raises:
        ConfigError: the run says something else.
    """
    taken: dict[str, str] = {}
    for name, fit in said.leaves.items():
        own = leaves.get(name)
        if not _says_nothing(name, own):
            if not any(_equal(own, value) for value in fit):
                raise ConfigError(
                    f"{LAUNCHER} says {said} (--{name} {fit[0]}), and {where.get(name, LAUNCHER)} says {name} {own}",
                    "keep one of them",
                )
        elif not _by_default(name, fit, {**leaves, **taken}):
            taken[name] = fit[0]
    return taken


def _says_nothing(name: str, own: Any) -> bool:
    """Whether a value leaves an option to the trainer."""
    open_ = ("auto", "none", "null") if type(None) in typing.get_args(option(name).type) else ("auto",)
    return own is None or str(own).lower() in open_


def _by_default(name: str, fit: tuple[str, ...], leaves: Mapping[str, Any]) -> bool:
    """Whether a run that says nothing of an option does what a launcher said."""
    if name == "engine":
        return ENGINES[str(leaves["strategy"])][0] in fit and not DECIDE_ENGINE & leaves.keys()
    return option(name).default is not None and _equal(option(name).default, fit[0])


def _equal(own: Any, value: str) -> bool:
    """Whether two texts are the same number or word."""
    try:
        return float(own) == float(value)
    except (TypeError, ValueError):
        return str(own).lower() == value


def check_device(words: Mapping[str, str], leaves: Mapping[str, Any], where: Mapping[str, str]) -> None:
    """Refuse a GPU where the launcher keeps the ranks off it, and what only a GPU has."""
    own = str(leaves.get("device") or "auto")
    if words.get("ACCELERATE_USE_CPU", "false").lower() not in ("true", "1", "yes"):
        return
    if words.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp16":
        raise ConfigError(
            f"{LAUNCHER} says cpu and mixed_precision fp16, which has no use on a CPU",
            "use --mixed_precision bf16 or no for both",
        )
    if own not in ("auto", "cpu"):
        raise ConfigError(
            f"{LAUNCHER} says cpu (--device cpu), and {where['device']} says device {own}", "keep one of them"
        )


def _say(args: argparse.Namespace, taken: Mapping[str, tuple[str, Said]], read: Mapping[str, str]) -> None:
    stream = sys.stderr if getattr(args, "json", False) else sys.stdout
    for is_read, end in ((True, ""), (False, f"; `course {args.argv[0]}` has no use for that")):
        some = {name: value for name, value in taken.items() if (name in read) == is_read}
        if some:
            told = ", ".join(dict.fromkeys(str(word) for _, word in some.values()))
            ours = " ".join(f"--{name} {value}" for name, (value, _) in some.items())
            print(f"{LAUNCHER} says {told}: {ours}{end}", file=stream, flush=True)


def _after_launch(command: list[str]) -> list[str] | None:
    """What follows ``accelerate launch`` or ``-m accelerate.commands.launch`` in a command line, else None."""
    for i, part in enumerate(command[:5]):
        if part.endswith(("accelerate.commands.launch", "accelerate/commands/launch.py", "accelerate-launch")):
            return command[i + 1 :]
        if os.path.basename(part) == "accelerate" and command[i + 1 : i + 2] == ["launch"]:
            return command[i + 2 :]
    return None
