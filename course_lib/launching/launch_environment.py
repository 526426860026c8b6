"""Ranks that a launcher started, by the environment it left, and whether they are those asked for."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from course_lib.errors import LaunchError

NO_NETWORK = (errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
"""What the system says of an address on an interface that is down."""


COPIES = {"mpirun": ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")}
"""Variables in which launchers that know no torch tell a process how many copies of its command there are."""


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
        return LaunchEnvironment(
            int(environ["RANK"]),
            int(environ["WORLD_SIZE"]),
            launched=True,
            elastic=int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0,
        )
    return LaunchEnvironment()


def check_copies(num_processes: int | None, environ: Mapping[str, str] | None = None) -> None:
    """See that this process is not one of several that each take themselves for the whole run.

    Slurm's variables are there in a batch script too, which is one process however many tasks the job has; there a
    number of processes says that they are started from it.

    Args:
        num_processes: what the config asks for; 1 lets each copy train by itself.
        environ: without the rank that torchrun and ``accelerate launch`` set.
    Raises:
        LaunchError: ``srun`` or ``mpirun`` has started several copies of one command, none with a rank.
    """
    environ = os.environ if environ is None else environ
    instead = (
        "start one per machine, and let it start the ranks: srun --ntasks-per-node=1 torchrun …, as `course "
        "submit --to slurm` writes it; or give --num_processes 1 to each copy, with an output_dir of its own"
    )
    in_step = "SLURM_STEP_NUM_TASKS" in environ or environ.get("SLURM_PROCID", "0") != "0"
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    if "SLURM_PROCID" in environ and tasks > 1 and num_processes != 1 and (in_step or num_processes is None):
        number = environ["SLURM_PROCID"]
        raise LaunchError(
            f"Slurm has {tasks} tasks for this command, and the one numbered {number} has no rank: each "
            "would train by itself, into one folder",
            instead,
        )
    for launcher, names in COPIES.items():
        copies = max(int(environ.get(name) or 1) for name in names)
        if copies > 1 and num_processes != 1:
            raise LaunchError(
                f"{launcher} started {copies} copies of this command, and they have no rank: each would "
                "train by itself, into one folder",
                instead.replace("srun --ntasks-per-node=1 torchrun …", "torchrun …"),
            )


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
        raise LaunchError(
            f"ranks cannot reach each other at 127.0.0.1 ({error.strerror})",
            "switch the loopback interface on: ip link set lo up",
        ) from error


def to_start(ranks: LaunchEnvironment, num_processes: int | None) -> int:
    """Number of ranks that this process has to start itself: 0 to join those that are there.

    Args:
        ranks: what was discovered.
        num_processes: what the config asks for; None for whatever is there.
    Raises:
        LaunchError: the launcher started another number than the config asks for, or the two disagree, or it started
            copies that know nothing of each other. An elastic launcher may start any number.
    """
    if ranks.launched:
        if num_processes not in (None, ranks.world_size) and not ranks.elastic:
            raise LaunchError(
                f"num_processes is {num_processes}, and the launcher started {ranks.world_size}",
                "give both the same number, or leave num_processes out of the config",
            )
        return 0
    check_copies(num_processes)
    if None not in (num_processes, ranks.asked) and num_processes != ranks.asked:
        raise LaunchError(
            f"num_processes is {num_processes}, and accelerate launch was asked for {ranks.asked}",
            "give both the same number, or leave num_processes out of the config",
        )
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
