"""`course watch` on ten scripts in the shapes of public ones, healthy and faulty, and on silent phases.

python -m benchmarks.watched_jobs      # from the repository's root, half an hour; writes benchmarks/watched-jobs.md
"""

import re
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from course_lib.launching.launch import launch
from course_lib.system import machine
from course_lib.writing import write_text
from tests.attach.test_command_strangers import FAULTS, SCRIPTS, watched
from tests.hangs.test_silent_phases import KINDS, LAUNCHES, PHASES, SECONDS, phases

HERE = Path(__file__).parent
SIDE_BY_SIDE = 2


def of_script(job: tuple[str, str]) -> str:
    """A line of the table; one that is not named as it should is marked."""
    script, fault = job
    with tempfile.TemporaryDirectory() as folder:
        said, done = watched(script, Path(folder), fault)
    first = " ".join(re.sub(r"process \d+ on \S+", "its process", said.split("\n")[0]).split()[2:])
    first = re.sub(r"\S*/strangers/", "", first)
    right = bool(re.search(FAULTS[fault], said)) if fault else not said and done.returncode == 0
    return f"| {script} | {fault or 'none'} | {'yes' if right else '**no**'} | {first} |"


def of_phases(seed: int) -> str | None:
    """Of one launch what it was accused of."""
    with tempfile.TemporaryDirectory() as folder:
        return next(
            filter(None, launch(phases, seed, Path(folder), num_processes=2, device="cpu", timeout=900, stream=False)),
            None,
        )


def main() -> None:
    """Run all, and write the table."""
    jobs = [(script, fault) for script in SCRIPTS for fault in ("", *FAULTS)]
    accused = [of_phases(seed) for seed in range(LAUNCHES)]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        lines = list(pool.map(of_script, jobs))
    kinds = Counter(KINDS[number % len(KINDS)] for number in range(LAUNCHES * PHASES))
    text = (
        f"# Watched jobs\n\n{machine.measured_on('torch', 'transformers', 'accelerate')}\n\n"
        f"Scripts of `tests/attach/strangers` on two ranks by torchrun under `course watch --seconds 4`; what goes "
        "wrong does so on rank 1 in its third step: it sleeps, is killed, or calls an all_reduce of its own. "
        "Named: the rank and its line, or nothing of a healthy one.\n\n"
        "| script | fault | named | said |\n|---|---|---|---|\n" + "\n".join(lines) + "\n\n"
        f"Silent phases of healthy ranks (`tests/hangs/test_silent_phases.py`), each two to four times as long as "
        f"the watchdog's {SECONDS:g} seconds, while the other rank waits in a barrier; downloads and uploads at "
        "0.1 to 5 MB/s:\n\n| phase | times |\n|---|---|\n"
        + "\n".join(f"| {kind} | {count} |" for kind, count in kinds.items())
        + f"\n\nAccused: {sum(each is not None for each in accused)} of {kinds.total()}.\n"
    )
    write_text(HERE / "watched-jobs.md", text)
    print(text)


if __name__ == "__main__":
    main()
