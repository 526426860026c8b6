"""A network of their own for ranks, whose loopback counters count every byte that they send.

No library can flatter that number: it is the kernel's.
"""

import contextlib
import ctypes
import fcntl
import functools
import multiprocessing
import os
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from course_lib.errors import LaunchError
from course_lib.launching import forks
from course_lib.launching.output import PassedOn
from course_lib.launching.rank_process import redirect_output

MARK = "COURSE_PRIVATE_NETWORK"  # environment variable: the namespace that in_own_network() made
CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
TCP_SETTINGS = {"tcp_early_retrans": 0, "tcp_rto_min_us": 20_000_000}
"""Of a network of one's own: no tail loss probe, and 20 s before a segment is sent again. Loopback loses none; what is
sent twice is late, because the machine is busy, and would be counted twice."""
NAMESPACE = Path("/proc/self/ns/net")


def in_own_network(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` in a process that has a network namespace of its own, loopback only.

    Ranks that the function launches inherit it, and a `Meter` in them gives ``wire_bytes``. The caller keeps
    its network.

    Returns:
        What the function returned; it has to be picklable.
    Raises:
        LaunchError: this system does not allow it.
        Exception: what the function raised.
    """
    if not NAMESPACE.exists():
        raise LaunchError(f"no network namespaces on {sys.platform}", "measure the bytes on the wire on Linux")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    # Jupyter's and pytest's streams are objects of this process: what a fork writes to its copy of one is lost.
    shared = not forks.from_server() and sys.stdout is sys.__stdout__
    with contextlib.nullcontext() if shared else PassedOn() as output:
        process = forks.start_clean(_child, functools.partial(function, *args, **kwargs), sender, output)
        sender.close()
        try:
            failed, value = cloudpickle.loads(receiver.recv_bytes())
            process.join()
        except EOFError:
            process.join()
            raise LaunchError(
                f"the process in its own network ended with code {process.exitcode}", "look at what it printed"
            ) from None
        finally:
            receiver.close()
            process.terminate()  # where the caller was interrupted
            process.join()
    if failed:
        raise value
    return value


def loopback_bytes() -> int:
    """Bytes that the loopback interface of this namespace has sent; 0 where there are no such counters."""
    counters = Path("/proc/self/net/dev")
    if not counters.exists():
        return 0
    loopback = next(line for line in counters.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(loopback.split(":")[1].split()[8])


def not_private() -> str:
    """Reason why the counters may count others' bytes too; empty within `in_own_network`."""
    if not NAMESPACE.exists():
        return f"no network namespaces on {sys.platform}"
    if os.environ.get(MARK) != os.readlink(NAMESPACE):
        return "the network is shared with other programs: launch the ranks within in_own_network()"
    return ""


def _child(call: Callable[[], Any], sender: Connection, output: Connection | None) -> None:
    try:
        if output:
            redirect_output(output.fileno())
        _enter_own_network()
        answer = cloudpickle.dumps((False, call()))
    except BaseException as error:
        try:
            answer = cloudpickle.dumps((True, error))
            cloudpickle.loads(answer)
        except Exception:  # an exception that cannot be pickled: its text can
            answer = cloudpickle.dumps((True, RuntimeError("".join(traceback.format_exception(error)))))
    sender.send_bytes(answer)


_libc = ctypes.CDLL(None, use_errno=True)


def call_libc(name: str, *arguments: Any) -> None:
    """Call a function of the C library that returns 0, or raise its OSError."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def new_network(as_root: bool = False) -> None:
    """Leave the network for a new one; in a new user namespace where this user may not do so otherwise.

    Args:
        as_root: be its root there, who may lay cables and join others' namespaces, rather than the same user.
    Raises:
        OSError: this system does not allow it.
    """
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(CLONE_NEWNET) != 0:
        call_libc("unshare", CLONE_NEWUSER | CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{0 if as_root else user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{0 if as_root else group} {group} 1")


def _enter_own_network() -> None:
    """Leave the network for a new one that has a loopback interface."""
    try:
        new_network()
    except OSError as error:
        raise LaunchError(
            f"no network namespace can be made: {error.strerror}",
            "allow user namespaces, or go without the bytes on the wire",
        ) from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    for name, value in TCP_SETTINGS.items():
        with contextlib.suppress(OSError):  # a kernel that lacks it: tcp_rto_min_us came with Linux 6.11
            Path("/proc/sys/net/ipv4", name).write_text(str(value))
    os.environ[MARK] = os.readlink(NAMESPACE)
