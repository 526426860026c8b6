"""Number of cores that this process may use."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Logical cores that this process may use, at least 1: of its affinity, its container's quota and Slurm's share.

    Args:
        root: where the system shows its cgroups, version 2 or 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(cores, slurm_cores() or cores)
    one_file, two_files = root / "cpu.max", [root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    if one_file.exists():
        quota, period = one_file.read_text().split()
    elif all(file.exists() for file in two_files):
        quota, period = (file.read_text().strip() for file in two_files)
    else:
        return cores
    unlimited = quota in ("max", "-1")
    return cores if unlimited else min(cores, max(1, math.ceil(int(quota) / int(period))))


def slurm_cores(environ: Mapping[str, str] | None = None) -> int | None:
    """Cores that ``--cpus-per-task`` asked Slurm for, which not every site binds tasks to; None where it was not given.

    A step's process is one task. A batch script has those of all tasks of its node.
    """
    environ = os.environ if environ is None else environ
    if not (per_task := environ.get("SLURM_CPUS_PER_TASK")):
        return None
    tasks = "1" if "SLURM_STEP_NUM_TASKS" in environ else environ.get("SLURM_TASKS_PER_NODE", "1")
    return int(per_task) * int(re.split(r"\D", tasks)[0])  # as in 2(x3),1


def keep_to_slurm_cores() -> None:
    """Let torch, which is not imported yet, start no more threads than Slurm gave this process cores."""
    if slurm_cores():
        share = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
