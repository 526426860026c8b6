"""The machine: driver, versions, GPUs and how they are joined."""

import json
import os
import platform
import shutil
import subprocess
import sys

import torch

from benchmarks.hardware.findings import Findings, Settings, first_line
from benchmarks.hardware.processes import ENVIRONMENT
from course_lib.errors import CourseError
from course_lib.launching import gpus
from course_lib.missing_extra import require_torch

QUERY = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "power.limit",
    "clocks.max.sm",
    "pcie.link.gen.max",
    "pcie.link.width.max",
)


def probe() -> dict[str, object]:
    """How many GPUs there are, and what they are; or why there is none. Takes the driver into this process.

    Returns:
        ``gpus``, ``name``, ``memory``, ``bf16`` and ``simulated`` as :class:`Settings` has them, and ``why``; or
        ``unusable``: why one of them cannot be used.
    """
    count, why = torch.cuda.device_count(), ""
    if not count:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if torch.version.cuda is None and torch.version.hip is None:
            why = f"torch {torch.__version__} is a build for CPUs"
            why += ", though a driver is here: see `course doctor`" if shutil.which("nvidia-smi") else ""
        elif hidden is not None:
            why = f"torch sees none of CUDA_VISIBLE_DEVICES={hidden!r}"
        else:
            why = f"torch {torch.__version__} sees none"
        return {"gpus": 0, "why": why}
    try:
        require_torch("train")
        for index in range(count):
            gpus.take(index)
    except CourseError as error:
        return {"gpus": count, "unusable": str(error)}
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "gpus": count,
        "name": properties[0].name,
        "memory": min(each.total_memory for each in properties),
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        "simulated": "gpu_sim" in sys.modules,
    }


def run(settings: Settings, findings: Findings) -> None:
    """Write down what this machine is."""
    from course_lib.system import machine  # wants psutil, and the question whether there are GPUs does not

    here = machine.describe(hub_timeout=0.1)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "absent"
    facts = findings.table("what", "here")
    facts.row("system", f"{here.os} {here.os_release}, Python {here.python}, {platform.machine()}")
    facts.row("processor", f"{here.cpu}, {here.cores} cores for this process, {here.memory_bytes / 2**30:.0f} GiB")
    facts.row("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}, NCCL {nccl}")
    facts.row("triton", machine.version("triton") or "absent")
    facts.row("engines", ", ".join(f"{name} {version}" for name, version in here.engines.items()))
    chosen = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("NCCL_", "CUDA_", "TORCH_NCCL", "PYTORCH_", "OMP_")) and name not in ENVIRONMENT
    ]
    facts.row("variables", ", ".join(chosen) or "none")
    devices = findings.table("GPU", "name", "memory (GiB)", "of it free", "compute capability", "bf16 in hardware")
    for index, gpu in enumerate(here.gpus):
        free = torch.cuda.mem_get_info(index)[0]
        devices.row(
            index,
            gpu.name,
            f"{gpu.memory_bytes / 2**30:.1f}",
            f"{free / 2**30:.1f}",
            gpu.capability,
            machine.native_bf16("cuda"),
        )
    if len(here.gpus) != settings.gpus:
        findings.fail("GPUs", f"{settings.gpus} were counted at first, and {len(here.gpus)} now")
    with findings.trying("a sum on every GPU"):
        for index in range(settings.gpus):
            found = torch.ones(1 << 20, device=f"cuda:{index}").sum().item()
            if found != 1 << 20:
                findings.fail(f"GPU {index}", f"the sum of {1 << 20} ones is {found}")
    _nvidia_smi(findings, settings)


def _nvidia_smi(findings: Findings, settings: Settings) -> None:
    """Driver and topology, as the vendor's tool shows them."""
    if settings.simulated or not shutil.which("nvidia-smi"):
        why = "the device is simulated" if settings.simulated else "there is no nvidia-smi on PATH"
        findings.leave_out("driver and topology", why)
        return
    try:
        rows = _said("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader")
        topology = _said("nvidia-smi", "topo", "-m")
    except subprocess.SubprocessError as error:  # the tool is none of the course's
        findings.leave_out("driver and topology", first_line(str(error)))
        return
    driver = findings.table(*QUERY)
    for line in rows.splitlines():
        driver.row(*(cell.strip() for cell in line.split(",")))
    findings.note("```\n" + topology.split("\n\nLegend")[0].strip("\n") + "\n```")


def _said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


if __name__ == "__main__":
    print(json.dumps(probe()))
