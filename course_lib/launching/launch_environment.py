"""Which ranks a launcher started, by the environment that it left, and whether they are those that were asked for."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from course_lib.errors import LaunchError

NO_NETWORK = (errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
"""What the system says of an address on an interface that is down."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process among those that a launcher started.

    Attributes:
        rank: number of this process, from 0.
        world_size: processes there are.
        launched: True where torchrun or accelerate launch set the rank environment.
        elastic: True where that launcher starts the ranks again, perhaps another number, after one has failed
            (torchrun's --max-restarts).
        asked: processes that the launcher above us was asked for, where it started this one alone; None where nobody
            has found that out (`course_lib.commands.accelerate_launcher`).
    """

    rank: int = 0
    world_size: int = 1
    launched: bool = False
    elastic: bool = False
    asked: int | None = None


def discover(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Read the rank environment that torchrun, ``accelerate launch`` and our own launch leave."""
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" in environ and "RANK" in environ:
        return LaunchEnvironment(int(environ["RANK"]), int(environ["WORLD_SIZE"]), launched=True,
                                 elastic=int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0)
    return LaunchEnvironment()


def check_loopback() -> None:
    """See that processes of this machine reach each other, as ranks have to.

    Raises:
        LaunchError: the loopback interface is down, as in a network namespace that is new.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5.0):
            pass
    except OSError as error:
        if error.errno not in NO_NETWORK:
            raise
        raise LaunchError(f"ranks cannot reach each other at 127.0.0.1 ({error.strerror})",
                          "switch the loopback interface on: ip link set lo up") from error


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


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port on the loopback interface that the system chose, and gives to nobody else within the block.

    A server that sets SO_REUSEADDR, as torch's stores do, can listen there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
