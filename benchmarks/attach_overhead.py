"""Cost of `course meter` and `course watch` per collective: CPU time of an all-reduce with and without them.

    python benchmarks/attach_overhead.py [--calls 3000]

The least of five stretches each; their threads' time is in it. An all-reduce of one rank moves nothing, so that what is
added is the tools' own. A step's overhead is this times its collectives.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.hangs import job_watch
from course_lib.metering import job_log
from course_lib.system import machine
from course_lib.writing import write_text

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
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=3000)
    calls = parser.parse_args().calls
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
            rows.append(f"| `{name}` | {microseconds(calls) - bare:.0f} |")
            tool.end(None)
    here = machine.describe()
    text = "\n".join(
        [
            "# What the tools for anybody's job cost",
            "",
            f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {here.cpu}; "
            "`python benchmarks/attach_overhead.py`.",
            f"A bare all-reduce of one rank takes {bare:.0f} µs of CPU time.",
            "",
            "| tool | µs more per collective |",
            "|---|---|",
            *rows,
            "",
        ]
    )
    write_text(Path(__file__).with_name("attach-overhead.md"), text)
    print(text)


if __name__ == "__main__":
    main()
