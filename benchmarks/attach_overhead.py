"""Cost of `course meter` and `course watch` per collective: CPU time of an all-reduce with and without them.

    python benchmarks/attach_overhead.py [--calls 3000]

The least of five stretches each; their threads' time is in it. An all-reduce of one rank moves nothing, so that what is
added is the tools' own. A step's overhead is this times its collectives.
"""

import os
import tempfile
import time

import torch
import torch.distributed as dist

from benchmarks.harness import options, publish, table
from course_lib.hangs import job_watch
from course_lib.metering import job_log

REPEATS = 5


def microseconds(calls: int) -> float:
    """CPU time of this process per all-reduce of 4 KiB."""
    values, stretches = torch.ones(1024), []
    for _ in range(REPEATS):
        start = time.process_time()
        for _ in range(calls):
            dist.all_reduce(values)
        stretches.append((time.process_time() - start) / calls * 1e6)
    return min(stretches)


def main() -> None:
    """Measure in this process, and write the page."""
    calls = options(__doc__, calls=3000).calls
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    bare, rows = microseconds(calls), []
    with tempfile.TemporaryDirectory() as folder:
        for name, begin in (
            ("course meter", lambda: job_log.begin(folder)),
            ("course watch", lambda: job_watch.begin({"seconds": 1000.0, "folder": folder})),
        ):
            tool = begin()
            rows.append((f"`{name}`", f"{microseconds(calls) - bare:.0f}"))
            tool.end(None)
    publish(
        "attach-overhead",
        "What the tools for anybody's job cost",
        ("torch",),
        f"A bare all-reduce of one rank takes {bare:.0f} µs of CPU time.",
        table("tool | µs more per collective", rows),
    )


if __name__ == "__main__":
    main()
