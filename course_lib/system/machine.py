"""Hardware of this machine and its speed: cores, memory, GPUs, engines, the Hub, matmul rate."""

import datetime
import importlib.metadata
import math
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from course_lib.launching.cores import usable_cores
from course_lib.system import hub_reachable

ENGINES = (
    "torch",
    "accelerate",
    "transformers",
    "datasets",
    "evaluate",
    "deepspeed",
    "tokenizers",
    "wandb",
    "scikit-learn",
    "papermill",
)

SHARED_MEMORY = 2**30
"""Bytes of /dev/shm with which loaders' workers, NCCL and DeepSpeed get by."""

_CPU_FEATURES = {
    "avx2": "avx2",
    "avx512_f": "avx512f",
    "avx512_bf16": "avx512_bf16",
    "amx_bf16": "amx_bf16",
    "neon": "neon",
    "bf16": "arm_bf16",
    "sve_bf16": "sve_bf16",
}
_NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "arm_bf16", "sve_bf16"}


@dataclass(frozen=True)
class Gpu:
    """One CUDA or ROCm device."""

    name: str
    memory_bytes: int
    capability: str
    """Compute capability, for example `9.0`."""


@dataclass(frozen=True)
class Machine:
    """Resources that the process may use of the machine it runs on."""

    os: str
    """`Linux`, `Darwin` (macOS) or `Windows`."""
    os_release: str
    python: str
    cpu: str
    """Model name."""
    cores: int
    """Logical cores that this process may use: CPU affinity and cgroup quota counted."""
    memory_bytes: int
    """RAM, or the cgroup's limit where that is less."""
    memory_available_bytes: int
    """What can be allocated now without swapping, at most memory_bytes."""
    cpu_features: tuple[str, ...]
    """Of avx2, avx512f, avx512_bf16, amx_bf16, neon, arm_bf16, sve_bf16: those that are there."""
    gpus: tuple[Gpu, ...]
    backends: tuple[str, ...]
    """Of gloo, nccl, mps: those that this build of torch can use here."""
    engines: dict[str, str | None]
    """Version by distribution name; None where it is not installed."""
    hub_problem: str | None
    """None where the Hub answers, else why it does not."""


def describe(hub_timeout: float = 1.0) -> Machine:
    """Look at the machine; takes at most hub_timeout seconds and a little more.

    Args:
        hub_timeout: seconds to wait for the Hub.
    """
    memory = psutil.virtual_memory()
    limit = cgroup_memory_limit()
    total = min(memory.total, limit) if limit else memory.total
    features = torch.cpu.get_capabilities()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return Machine(
        os=platform.system(),
        os_release=platform.release(),
        python=platform.python_version(),
        cpu=features.get("cpu_name") or platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_bytes=total,
        memory_available_bytes=min(memory.available, total),
        cpu_features=_cpu_features(),
        gpus=tuple(Gpu(p.name, p.total_memory, f"{p.major}.{p.minor}") for p in properties),
        backends=_backends(),
        engines={name: version(name) for name in ENGINES},
        hub_problem=hub_reachable.problem(hub_timeout),
    )


def measured_on(*engines: str) -> str:
    """Markdown for the head of a table: date, machine, versions of Python and these engines, and the command run."""
    here = describe()
    versions = ", ".join([f"Python {here.python}", *(f"{name} {here.engines[name]}" for name in engines)])
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of `python -m`
    program = f"-m {spec.name}" if spec else os.path.relpath(sys.argv[0])
    return (
        f"{datetime.date.today()}; {here.cpu}, {here.cores} cores, {here.memory_bytes / 2**30:.0f} GiB; {versions}."
        f"\n`python {' '.join([program, *sys.argv[1:]])}`"
    )


def _cpu_features() -> tuple[str, ...]:
    capabilities = torch.cpu.get_capabilities()
    return tuple(name for key, name in _CPU_FEATURES.items() if capabilities.get(key))


def _backends() -> tuple[str, ...]:
    distributed = torch.distributed.is_available()
    there = {
        "gloo": distributed and torch.distributed.is_gloo_available(),
        "nccl": distributed and torch.distributed.is_nccl_available() and torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    return tuple(name for name, usable in there.items() if usable)


def version(distribution: str) -> str | None:
    """Version of an installed distribution, read from its metadata without importing it; None where it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cgroup_memory_limit(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that a container or batch system allows this process (cgroup v2 or v1); None without a limit.

    A v1 hierarchy without a limit holds a number near 2**63, which any RAM is below.
    """
    if not proc.exists():
        return None
    limits = []
    for line in proc.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = base / group.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(base) and (folder / file).exists():
                text = (folder / file).read_text().strip()
                limits += [] if text == "max" else [int(text)]
    return min(limits, default=None)


def shared_memory() -> float:
    """Bytes free in /dev/shm, in which a loader's workers hand over tensors; infinite where there is no such limit."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else math.inf


def native_bf16(device_type: str) -> bool:
    """True where bf16 matrices are multiplied by the hardware itself, so that autocast to bf16 is faster than fp32.

    On a CPU this asks for the AVX-512 BF16, AMX or Arm BF16 instructions under Linux or Windows; other CPUs convert
    to fp32 and back, which is slower. Apple devices count as without.

    Args:
        device_type: `cpu`, `cuda` or `mps`.
    """
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return device_type == "cpu" and sys.platform != "darwin" and bool(_NATIVE_BF16.intersection(_cpu_features()))


def matmul_rate(
    dtype: torch.dtype, size: int = 1024, seconds: float = 0.5, device: torch.device | str = "cpu"
) -> float:
    """Measured FLOP/s of the fastest square matrix product among those that fit into the time.

    The fastest, not the mean: this is the ceiling that a training step is compared with.

    Args:
        dtype: of the operands and of the result.
        size: rows and columns; a product counts 2 size**3 operations.
        seconds: time to measure, after one product to warm up.
        device: where.
    """
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    out = left @ right
    synchronise = (lambda: None) if left.is_cpu else torch.accelerator.synchronize
    fastest, end = float("inf"), time.perf_counter() + seconds
    while fastest == float("inf") or time.perf_counter() < end:
        synchronise()
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        synchronise()
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def peak_memory_bytes(device: torch.device | str) -> int:
    """Most memory held so far: allocated tensors on a CUDA device, resident memory of the process elsewhere."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        # Not getrusage: its ru_maxrss survives exec, so a rank would report the peak of whatever launched it.
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    if os.name == "nt":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
