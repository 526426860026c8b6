"""What the ``accelerate launch`` above this process was asked for: never train alone in silence.

``accelerate launch --cpu --num_processes 2`` starts one process on a machine without GPUs and
says nothing, so what the launcher was asked for is read from the launcher itself.
"""

import os
from dataclasses import replace

import psutil

from course_lib.launching import launch_environment
from course_lib.launching.launch_environment import LaunchEnvironment


def discover() -> LaunchEnvironment:
    """Read the rank environment, and the command line of an Accelerate launcher above this process."""
    ranks = launch_environment.discover()
    return ranks if ranks.launched else replace(ranks, asked=asked_of_accelerate())


def asked_of_accelerate() -> int | None:
    """Processes that the ``accelerate launch`` which started this process was asked for, else None.

    The launcher's own parser reads its command line, with its configuration file, so that the
    answer is the one that Accelerate itself came to.
    """
    try:
        command = psutil.Process().parent().cmdline()  # type: ignore[union-attr]
    except (psutil.Error, AttributeError):
        return None
    arguments = _after_launch(command)
    if arguments is None:
        return None
    from accelerate.commands.config import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    launch = launch_command_parser().parse_args(arguments)
    if launch.num_processes is not None:
        return launch.num_processes
    if launch.config_file or os.path.isfile(default_config_file):
        return load_config_from_file(launch.config_file).num_processes
    return None


def _after_launch(command: list[str]) -> list[str] | None:
    """What follows ``accelerate launch`` or ``-m accelerate.commands.launch`` in a command line, else None."""
    for i, part in enumerate(command[:5]):
        if part.endswith(("accelerate.commands.launch", "accelerate/commands/launch.py", "accelerate-launch")):
            return command[i + 1 :]
        if os.path.basename(part) == "accelerate" and command[i + 1 : i + 2] == ["launch"]:
            return command[i + 2 :]
    return None
