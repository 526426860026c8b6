"""Set-up of the ranks' process group: backends, network interface, time-out.

Accelerate and DeepSpeed make the group; what they are told stands here, once for every engine.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs

from course_lib.hangs.diagnosis import BUSY_FACTOR
from course_lib.launching import gpus
from course_lib.launching.launch_environment import reserved_port

GPU_BACKENDS = "cpu:gloo,cuda:nccl"
"""NCCL carries what is on GPUs; gloo what is on the host: offloaded state, Python objects, barriers."""


def use_own_gpu() -> None:
    """Make this rank's GPU the current one.

    Before anything asks CUDA: many a question (whether the GPU knows bfloat16, say) is put to the current GPU and makes
    a context there, some hundred megabytes of GPU 0 for every rank that has not chosen.

    Raises:
        LaunchError: it is full, another's, or not to be used.
    """
    gpus.take(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Let a process that no launcher started make a group of itself alone; a rank of a launcher does as it is told."""
    if "RANK" in os.environ:
        yield
        return
    with reserved_port() as port:
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        before = {name: os.environ.get(name) for name in alone}
        os.environ.update(alone)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def patience(watchdog_seconds: float) -> timedelta:
    """Time that a rank waits in a collective for the others, before its backend ends it.

    torch's 30 minutes for such groups (10 for NCCL alone), or longer than the watchdog lets a rank evaluate or save
    without a sign of life: the watchdog says who is to blame, a backend's time-out only that time is over.

    Args:
        watchdog_seconds: of the run's watchdog; 0: it is off.
    """
    return timedelta(seconds=max(30 * 60, (BUSY_FACTOR + 1) * watchdog_seconds))


def process_group(device: torch.device, watchdog_seconds: float) -> InitProcessGroupKwargs:
    """Arguments of the default process group, where a launcher has started ranks.

    No ``device_id``, which would form NCCL's communicators at once instead of in their first collective. With it NCCL
    also runs every send and receive of a group in one line with its collectives (torch's warning of "unbatched P2P
    ops" in "eager initialization mode"), where it otherwise gives each pair of ranks a line of its own. The schedules
    of pipelines count on those: what a rank receives from one neighbour must not wait until the other has taken what
    it is sent. A rank of a pipeline has two neighbours, so that is two small communicators; nothing else in a run sends
    from rank to rank. What else ``device_id`` gives, :func:`use_own_gpu` and Accelerate's barriers, which name the
    device, give too. DeepSpeed passes one by itself, and sends nothing from rank to rank.
    """
    backend = None
    if "LOCAL_RANK" in os.environ and device.type in ("cpu", "cuda"):  # else Accelerate would look for a group
        backend = GPU_BACKENDS if device.type == "cuda" else "gloo"
        choose_interface()
    return InitProcessGroupKwargs(backend=backend, timeout=patience(watchdog_seconds))


def have_patience(watchdog_seconds: float) -> None:
    """Give the groups that stand now the default group's time: torch makes each with its own default."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            # As torchtitan does it; there is no public way.
            dist.distributed_c10d._set_pg_timeout(patience(watchdog_seconds), group)


def choose_interface() -> None:
    """Tell gloo by which interface the ranks of other machines reach this one; ``GLOO_SOCKET_IFNAME`` wins.

    Left to itself gloo takes the address of the host's name, which Debian and Ubuntu write into /etc/hosts as
    127.0.1.1: the other machines would then wait at their own door. On one machine that does no harm.
    """
    everywhere, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if "GLOO_SOCKET_IFNAME" in os.environ or everywhere == here or "MASTER_ADDR" not in os.environ:
        return
    if name := interface_towards(os.environ["MASTER_ADDR"]):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_towards(host: str) -> str | None:
    """The interface by which packets to a host leave; where the host is this one, those to the rest of the world.

    None where there is no way, or only this machine's own.
    """
    for name in (host, "192.0.2.1"):  # an address that nobody has (RFC 5737): the default route's
        try:
            family, kind, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # nothing is sent: the kernel only looks for the way
                own = probe.getsockname()[0]
        except OSError:
            continue
        for interface, addresses in psutil.net_if_addrs().items():
            if not interface.startswith("lo") and own in {known.address.partition("%")[0] for known in addresses}:
                return interface
    return None
