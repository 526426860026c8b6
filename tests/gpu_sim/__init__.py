"""GPUs and NCCL on a machine that has neither: a device ``cuda`` and a backend ``nccl`` for torch's CPU build.

Kernels and memory are the CPU's; the label, the order of work and the rules are a GPU's. See README.md for what it
knows, what it cannot know, and the source of each rule. ``GPU_SIM=2 PYTHONPATH=…/gpu_sim/site python script.py`` gives
a script, and every process that it starts, two GPUs.
"""

import contextlib
import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIBRARIES = (
    "libtorch_global_deps.so",
    "libc10.so",
    "libtorch_cpu.so",
    "libtorch.so",
    "libshm.so",
    "libtorch_python.so",
)


class Finding(str):
    """A race or a misuse; its text says what, where, and what would happen on a GPU.

    Attributes:
        kind: ``read before it was written``, ``two writes at once``, ``written while it was read``, ``written in
            flight``, ``freed in flight``, ``never waited for``, ``mismatch``, ``nobody came``, ``duplicate GPU`` or
            ``host sync``.
        where: ``file:line`` of the user's code that did it.
        stacks: the Python stack of it, and of what it collides with.
    """

    kind: str
    where: str
    stacks: str

    def __new__(cls, kind: str, text: str, where: str, stacks: str) -> "Finding":
        self = super().__new__(cls, text)
        self.kind, self.where, self.stacks = kind, where, stacks
        return self

    def __reduce__(self):
        return Finding, (self.kind, str(self), self.where, self.stacks)


class Sync(NamedTuple):
    """The host waited for the device."""

    what: str
    """``item``, ``synchronize``, ``copy device to host``, an operator's name …"""
    where: str
    stack: str


def install() -> None:
    """Give this process the simulated GPUs. Call it before torch is imported, which looks for them once.

    Raises:
        RuntimeError: torch is here already, or the device could not be compiled.
    """
    global ext
    if ext is not None:
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch has looked for GPUs already: install the simulated ones before it is imported")
    from gpu_sim.build import library

    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return  # a Python without torch needs no GPUs
    made, lib = library(), Path(found.origin).parent / "lib"
    for name in LIBRARIES:
        ctypes.CDLL(str(lib / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location("gpu_sim_device", made)
    assert spec and spec.loader
    import torch

    ext = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ext)
    if torch.version.cuda:
        ext.cover_kernels(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"))
    from gpu_sim import cuda

    cuda.install(ext)


ext = None


def findings() -> list[Finding]:
    """The races and misuses of this process so far."""
    return [Finding(*each) for each in ext.findings()]


def forget() -> None:
    """Begin a new list of findings."""
    ext.forget_findings()


def kernels() -> int:
    """Kernels launched so far: operators that reached the device, copies included."""
    return ext.kernels()


def host_syncs() -> int:
    """How often the host has waited for the device so far."""
    return ext.host_syncs()


def driver_used() -> bool:
    """Whether this process has used the driver, so that what it forks cannot."""
    return ext.driver_used()


def trace_syncs(on: bool = True) -> None:
    """Keep the host syncs from now on, for `traced_syncs`."""
    ext.trace_syncs(on)


def traced_syncs() -> list[Sync]:
    """Those kept since the last call."""
    return [Sync(*each) for each in ext.traced_syncs()]


@contextlib.contextmanager
def tracing_syncs() -> Iterator[list[Sync]]:
    """The host syncs within the block, filled in at its end."""
    syncs: list[Sync] = []
    traced_syncs()
    trace_syncs()
    try:
        yield syncs
    finally:
        trace_syncs(False)
        syncs += traced_syncs()
