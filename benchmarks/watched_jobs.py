"""`course watch` on ten scripts in the shapes of public ones, healthy and faulty, and on silent phases.

python -m benchmarks.watched_jobs      # from the repository's root, half an hour; writes benchmarks/watched-jobs.md
"""

import re
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import options, publish, table
from course_lib.launching.launch import launch
from tests.attach.test_command_strangers import FAULTS, SCRIPTS, watched
from tests.hangs.test_silent_phases import KINDS, LAUNCHES, PHASES, SECONDS, phases

SIDE_BY_SIDE = 2


def of_script(job: tuple[str, str]) -> tuple[str, ...]:
    """A row of the table; one that is not named as it should is marked."""
    script, fault = job
    with tempfile.TemporaryDirectory() as folder:
        said, done = watched(script, Path(folder), fault)
    first = " ".join(re.sub(r"process \d+ on \S+", "its process", said.split("\n")[0]).split()[2:])
    first = re.sub(r"\S*/strangers/", "", first)
    right = bool(re.search(FAULTS[fault], said)) if fault else not said and done.returncode == 0
    return script, fault or "none", "yes" if right else "**no**", first


def of_phases(seed: int) -> str | None:
    """Of one launch what it was accused of."""
    with tempfile.TemporaryDirectory() as folder:
        return next(
            filter(None, launch(phases, seed, Path(folder), num_processes=2, device="cpu", timeout=900, stream=False)),
            None,
        )


def main() -> None:
    """Run all, and write the table."""
    options(__doc__)
    jobs = [(script, fault) for script in SCRIPTS for fault in ("", *FAULTS)]
    accused = [of_phases(seed) for seed in range(LAUNCHES)]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        rows = list(pool.map(of_script, jobs))
    kinds = Counter(KINDS[number % len(KINDS)] for number in range(LAUNCHES * PHASES))
    publish(
        "watched-jobs",
        "Watched jobs",
        ("torch", "transformers", "accelerate"),
        "Scripts of `tests/attach/strangers` on two ranks by torchrun under `course watch --seconds 4`; what goes "
        "wrong does so on rank 1 in its third step: it sleeps, is killed, or calls an all_reduce of its own. "
        "Named: the rank and its line, or nothing of a healthy one.",
        table("script | fault | named | said", rows),
        f"Silent phases of healthy ranks (`tests/hangs/test_silent_phases.py`), each two to four times as long as "
        f"the watchdog's {SECONDS:g} seconds, while the other rank waits in a barrier; downloads and uploads at "
        "0.1 to 5 MB/s:",
        table("phase | times", kinds.items()),
        f"Accused: {sum(each is not None for each in accused)} of {kinds.total()}.",
    )


if __name__ == "__main__":
    main()
