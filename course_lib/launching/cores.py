"""How many cores this process may use."""

import math
import os
from pathlib import Path


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Logical cores that this process may use, at least 1: its affinity counts, and a container's quota of CPU time.

    Args:
        root: where the system shows its cgroups, version 2 or 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    one_file, two_files = root / "cpu.max", [root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    if one_file.exists():
        quota, period = one_file.read_text().split()
    elif all(file.exists() for file in two_files):
        quota, period = (file.read_text().strip() for file in two_files)
    else:
        return cores
    unlimited = quota in ("max", "-1")
    return cores if unlimited else min(cores, max(1, math.ceil(int(quota) / int(period))))
