"""Several hosts on one Linux machine: network namespaces with addresses and names of their own, on one switch.

What runs on one of them reaches the others over TCP alone, as on a cluster, and its cable can be pulled. The hosts
share the disk, the processors and the memory. No root is needed where a user may make user namespaces.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from course_lib.errors import LaunchError
from course_lib.launching import forks
from course_lib.launching.netns import CLONE_NEWNET, NAMESPACE, call_libc, new_network
from course_lib.launching.rank_process import forget_accelerators

CLONE_NEWNS, CLONE_NEWUTS = 0x00020000, 0x04000000
MS_REC, MS_PRIVATE, MS_BIND = 0x4000, 0x40000, 0x1000
NETWORK = "10.77.0"
INTERFACE = "eth0"


@dataclass(frozen=True)
class Host:
    """One of the hosts.

    Attributes:
        name: its host name, which all of them can resolve.
        address: its IPv4 address.
        port: name of the switch's end of its cable.
        keeper: process id that holds its namespaces.
        switch: process id that holds the switch's.
    """

    name: str
    address: str
    port: str
    keeper: int
    switch: int

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with what a rank has to know of the host: gloo would take its name's address."""
        return os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE}

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Start a command on the host; options are those of ``subprocess.Popen``."""
        return subprocess.Popen(command, **{"env": self.environment} | options, preexec_fn=lambda: _join(self.keeper))

    def start(self, function: Callable[..., Any], *args: Any) -> BaseProcess:
        """Call ``function(*args)`` in a process on the host that is forked from here, or from a clean process."""
        return forks.start_clean(_on_host, functools.partial(function, *args), self)

    def processes(self) -> list[psutil.Process]:
        """What runs on the host."""
        mine = os.stat(f"/proc/{self.keeper}/ns/net").st_ino
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if process.pid != self.keeper and os.stat(f"/proc/{process.pid}/ns/net").st_ino == mine:
                    found.append(process)
        return found

    def power_off(self) -> None:
        """Pull the cable and end all that runs on the host, so that the others hear nothing of it."""
        self.cut()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def cut(self) -> None:
        """Pull the host's cable: what is sent is lost, and nobody is told."""
        _ip(self.switch, f"link set {self.port} down")

    def mend(self) -> None:
        """Plug it in again."""
        _ip(self.switch, f"link set {self.port} up")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Build hosts ``host0``, ``host1``, ... with the addresses 10.77.0.1, 10.77.0.2, ...; all is gone afterwards.

    Raises:
        LaunchError: this system cannot; it names what is missing.
    """
    if not NAMESPACE.exists():
        raise LaunchError(f"no network namespaces on {sys.platform}", "build hosts on Linux")
    if not shutil.which("ip"):
        raise LaunchError("there is no `ip` here, which lays the cables", "install iproute2")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="course-hosts-")))
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{NETWORK}.{i + 1} host{i}\n" for i in range(count)))
        names.chmod(0o644)
        switch = stack.enter_context(_kept(functools.partial(new_network, as_root=True))).pid
        _ip(switch, "link add switch type bridge", "link set switch up")
        built = []
        for i in range(count):
            keeper = stack.enter_context(_kept(functools.partial(_new_host, switch, f"host{i}", names))).pid
            host = Host(f"host{i}", f"{NETWORK}.{i + 1}", f"port{i}", keeper, switch)
            _ip(
                switch,
                f"link add {host.port} type veth peer name {INTERFACE} netns {keeper}",
                f"link set {host.port} master switch up",
            )
            _ip(keeper, "link set lo up", f"addr add {host.address}/24 dev {INTERFACE}", f"link set {INTERFACE} up")
            built.append(host)
            stack.callback(host.power_off)
        yield tuple(built)


def torchrun(
    function: Callable[..., Any],
    *args: Any,
    nodes: tuple[int, int],
    ranks: int,
    endpoint: str,
    is_head: bool,
    address: str = "127.0.0.1",
    max_restarts: int = 0,
) -> dict[int, Any]:
    """What ``torchrun --nnodes MIN:MAX --nproc_per_node RANKS`` does, its ranks forked rather than started anew.

    Args:
        function: what each rank calls.
        *args: the function's arguments.
        nodes: fewest and most machines.
        ranks: of this machine.
        endpoint: address and port at which the machines meet.
        is_head: whether this machine is the one with that address.
        address: this machine's, for the others.
        max_restarts: failures after which the ranks are started again.
    Returns:
        What this machine's ranks returned, by rank.
    Raises:
        ChildFailedError: a rank failed once too often.
        LaunchError: ranks that are forked from this process could not train.
    """
    if reason := forks.why_not_fork("cpu"):
        raise LaunchError(
            f"ranks that are forked from this process could not train ({reason})",
            "call torchrun() in a process that Host.start() made",
        )
    # torchrun waits 30 s for latecomers, and 15 s until a silent machine counts as gone. Too short a time is dangerous:
    # a machine that is merely busy is left behind, goes on by itself, and writes into the same folder.
    meeting = {"last_call_timeout": 5, "keep_alive_interval": 1, "keep_alive_max_attempt": 6, "is_host": is_head}
    config = LaunchConfig(
        *nodes,
        ranks,
        run_id="hosts",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs=meeting,
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="fork",
        local_addr=address,
        log_line_prefix_template="",
    )
    # Shared, the ranks' store is announced in the first round alone (torch 2.13): who joins later waits until it fails.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # For its event log the rendezvous names its callers, and reads the source of each: seconds, where there are many.
    with mock.patch.object(dynamic_rendezvous, "get_method_name", return_value=""):
        return elastic_launch(config, _as_rank)(function, args)


def _as_rank(function: Callable[..., Any], args: tuple) -> Any:
    """Call a function in a process that has none of the agent's signal handlers, and no Accelerator of its caller's."""
    forget_accelerators()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    return function(*args)


@contextlib.contextmanager
def _kept(enter: Callable[[], None]) -> Iterator[subprocess.Popen]:
    """A process that entered namespaces of its own and keeps them until the block ends."""
    reader, writer = os.pipe()

    def entering() -> None:
        try:
            enter()
        except OSError as error:  # of what is raised here, Popen tells nothing
            os.write(writer, str(error).encode())
            raise

    with open(reader, "rb", closefd=True) as said:
        try:
            # It ends with its input, so also with this process.
            keeper = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True, preexec_fn=entering)
        except subprocess.SubprocessError:
            os.close(writer)
            raise LaunchError(
                f"no host can be made here: {said.read().decode()}",
                "allow user namespaces, or run as root outside a container",
            ) from None
        os.close(writer)
    with keeper:
        yield keeper


def _new_host(switch: int, name: str, names: Path) -> None:
    """Give the process a network, a name and an ``/etc/hosts`` of its own."""
    _join(switch, kinds=("user",))
    call_libc("unshare", CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS)
    call_libc("sethostname", name.encode(), len(name))
    call_libc("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    call_libc("mount", str(names).encode(), b"/etc/hosts", None, MS_BIND, None)


def _on_host(call: Callable[[], Any], host: Host) -> None:
    _join(host.keeper)
    os.environ.update(host.environment)
    forget_accelerators()
    call()


def _join(keeper: int, kinds: Sequence[str] = ("user", "net", "uts", "mnt")) -> None:
    """Enter the namespaces that another process keeps; this one must have a single thread."""
    folder = os.getcwd()
    for kind in kinds:
        with open(f"/proc/{keeper}/ns/{kind}") as namespace:
            if os.fstat(namespace.fileno()).st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino:
                call_libc("setns", namespace.fileno(), 0)
    os.chdir(folder)  # entering another tree of mounts leads to its root


def _in(keeper: int, command: Sequence[str]) -> subprocess.CompletedProcess:
    """Run a command in the namespaces that a process keeps."""
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: _join(keeper))


def _ip(keeper: int, *commands: str) -> None:
    """Run ``ip`` commands in the namespaces that a process keeps."""
    for command in commands:
        done = _in(keeper, ["ip", *command.split()])
        if done.returncode:
            raise LaunchError(
                f"no host can be made here (ip {command}: {done.stderr.strip()})",
                "allow user namespaces, or run as root outside a container",
            )
