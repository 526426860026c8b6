"""How long things take to start: each beside its peer in the same run, medians of several.

    python benchmarks/startup.py

Writes benchmarks/startup.md. A peer is what cannot be avoided: a bare Python, or the imports that
the work needs.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from course_lib.launching.launch import launch
from course_lib.system import machine
from course_lib.writing import write_text

HERE = Path(__file__).resolve().parent
CLI = HERE.parent / "course_lib" / "cli.py"


def seconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Median wall-clock seconds of a call, after one that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def run(*command: str | Path) -> Callable[[], object]:
    """A command, run to its end with its output dropped."""
    return lambda: subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL, cwd=HERE.parent)


def main() -> None:
    """Measure and write the table."""
    rows = [
        ("`course --help`", seconds(run(sys.executable, CLI, "--help")), "a bare Python",
         seconds(run(sys.executable, "-c", "pass"))),
        ("`course train --help`", seconds(run(sys.executable, CLI, "train", "--help")), "a bare Python",
         seconds(run(sys.executable, "-c", "pass"))),
        ("`make setup`, the second time", seconds(run("make", "setup")), "`make help`", seconds(run("make", "help"))),
        ("`launch` of an empty function on 2 ranks", seconds(lambda: launch(os.getpid, num_processes=2)),
         "a Python that imports torch", seconds(run(sys.executable, "-c", "import torch"), 3)),
        ("`import course_lib.training.run`, all that training needs",
         seconds(run(sys.executable, "-c", "import course_lib.training.run"), 3), "the Hugging Face Trainer's import",
         seconds(run(sys.executable, "-c", "import datasets; from transformers import Trainer"), 3)),
    ]
    lines = ["| what | seconds | peer | seconds | ratio |", "|---|---|---|---|---|"]
    lines += [f"| {what} | {mine:.3f} | {peer} | {theirs:.3f} | {mine / theirs:.2f} |"
              for what, mine, peer, theirs in rows]
    text = (f"# Starting\n\n{machine.measured_on('torch', 'transformers')}\n\n"
            "Medians of 7 (3 where imports dominate).\n\n" + "\n".join(lines) + "\n")
    write_text(HERE / "startup.md", text)
    print(text)


if __name__ == "__main__":
    main()
