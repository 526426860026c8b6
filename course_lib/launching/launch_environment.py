"""Which ranks are there, and were they asked for: never train alone in silence.

``accelerate launch --cpu --num_processes 2`` starts one process on a machine without GPUs and
says nothing, so what the launcher was asked for is read from the launcher itself.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from course_lib.errors import LaunchError


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process among those that a launcher started.

    Attributes:
        rank: number of this process, from 0.
        world_size: processes there are.
        launched: True where torchrun or accelerate launch set the rank environment.
        elastic: True where that launcher starts the ranks again, perhaps another number, after one has failed
            (torchrun's --max-restarts).
        asked: processes that an ``accelerate launch`` above us was asked for; None without one.
    """

    rank: int = 0
    world_size: int = 1
    launched: bool = False
    elastic: bool = False
    asked: int | None = None


def discover(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Read the rank environment, and the command line of an Accelerate launcher above this process."""
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" in environ and "RANK" in environ:
        return LaunchEnvironment(int(environ["RANK"]), int(environ["WORLD_SIZE"]), launched=True,
                                 elastic=int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0)
    return LaunchEnvironment(asked=asked_of_accelerate())


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


def to_start(ranks: LaunchEnvironment, num_processes: int | None) -> int:
    """How many ranks this process has to start itself: 0 to join those that are there.

    Args:
        ranks: what was discovered.
        num_processes: what the config asks for; None for whatever is there.
    Raises:
        LaunchError: the launcher started another number than the config asks for, or the two disagree. An elastic
            launcher may start any number.
    """
    if ranks.launched:
        if num_processes not in (None, ranks.world_size) and not ranks.elastic:
            raise LaunchError(f"num_processes is {num_processes}, and the launcher started {ranks.world_size}",
                              "give both the same number, or leave num_processes out of the config")
        return 0
    if None not in (num_processes, ranks.asked) and num_processes != ranks.asked:
        raise LaunchError(f"num_processes is {num_processes}, and accelerate launch was asked for {ranks.asked}",
                          "give both the same number, or leave num_processes out of the config")
    wanted = num_processes or ranks.asked or 1
    return wanted if wanted > 1 else 0


def free_port() -> int:
    """A TCP port on the loopback interface that the system chose."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
