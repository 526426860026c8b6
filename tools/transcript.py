"""Runs commands as a user types them, at 80 columns, and writes what they say into docs/commands.md.

    python tools/transcript.py

Each command is quick, trains nothing and asks no network; what it said before this page was begun stands beside it.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "commands.md"
WIDTH = 80


class Case(NamedTuple):
    """A command, the line of its output that matters (a pattern; by default the last one), and the earlier answer."""

    command: str
    before: str
    line: str = ""


CASES = (
    Case("trian --model tiny-bert", "[2] course: unknown command `trian`: did you mean `train`?"),
    Case(
        "train --learning_rat 1e-4",
        "[2] course: unknown option `--learning_rat`: did you mean `--learning_rate` or "
        "`--training_type` or `--clean_text`?",
    ),
    Case(
        "train --strategy zero4",
        "[2] course: option: `strategy` cannot be 'zero4': did you mean `zero3` or `zero2` or `zero1`?",
    ),
    Case(
        "train --config nofile.yaml",
        "[2] course: no config file nofile.yaml: choose from `.pre-commit-config.yaml`, `environment.yml`",
    ),
    Case(
        "train --training_type basic --num_processes 2",
        "[2] course: training_type basic runs one process, not num_processes=2: use --training_type accelerated",
    ),
    Case("train --schedule zbv --pipeline_parallel_size 2 --num_processes 2", "[0] trained data-parallel"),
    Case("train --bf16 --mixed_precision no", "[0] trained in fp32"),
    Case("train --explain warmup_ratio", "[2] course: unknown option `--explain`", "read by.*"),
    Case("train --help", "[0] 70 lines of usage, then sections; 116 columns", "what matters first:"),
    Case(
        "schedule --schedule dualpipev --ranks 8 --microbatches 32",
        "[0] a time line without a number, and a table several hundred columns wide",
        "rank  0 .*",
    ),
    Case("schedule --compare --ranks 4 --microbatches 8 --json", "[2] course: unknown option `--json`", '"schedule".*'),
    Case(
        "plan --model gpt2 --gpu H100 --tokens 3B --dataset corpus.txt",
        "[0] a command without data and steps",
        "--max_length.*",
    ),
    Case(
        "plan --model facebook/opt-1.3b --gpu A100-80 --tokens 1B",
        "[0] no price is known: name a SageMaker instance; and no margin",
        r"tokens take [^;]*; \$[\d,]+",
    ),
    Case("plan --model gpt2 --gpu H100 --gpus 0", "[2] course: --gpus 0: give a whole number from 1 on"),
    Case(
        "submit --model tiny-bert --instance_type ml.p4d.24xlarge --instance_count 2",
        "[1] sent, to run for up to 24 hours and $1,809.02",
    ),
    Case(
        "submit --model tiny-bert --instance_type ml.g5.xlarge --to slurm --dry_run",
        "[0] #SBATCH --time=24:00:00",
        "#SBATCH --time.*",
    ),
)


def said(command: str, line: str = "") -> str:
    """The exit code and the telling line of a command."""
    from course_lib import cli

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code: int | str | None
        try:
            code = cli.main(shlex.split(command))
        except SystemExit as ended:
            code = ended.code or 0
    text = re.sub(r" \\\n\s*", " ", out.getvalue())  # a command that was broken for the page, as a shell reads it
    text = " ".join(text.split()) if line.startswith("tokens") else text
    found = re.search(line, text) if line else None
    return f"[{code}] {found[0].strip() if found else text.strip().splitlines()[-1]}"


def page() -> str:
    """The page, from commands that are run now."""
    asked, here, keyboard = os.environ.get("COLUMNS"), os.getcwd(), sys.stdin
    sys.stdin = io.StringIO()  # nobody is there to be asked
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        with tempfile.TemporaryDirectory() as empty:
            os.chdir(empty)
            rows = [(case.command, case.before, said(case.command, case.line)) for case in CASES]
    finally:
        sys.stdin = keyboard
        os.chdir(here)
        os.environ.pop("COLUMNS")
        if asked is not None:
            os.environ["COLUMNS"] = asked
    blocks = [
        f"`course {command}`\n\n| | |\n|---|---|\n| before | {_cell(before)} |\n| now | {_cell(now)} |\n"
        for command, before, now in rows
    ]
    return (
        "# What commands say\n\nWritten by `python tools/transcript.py`, held by `tests/tools/test_transcript.py`: "
        "the exit code and the line that\nmatters, before and after the commands were gone through one by one "
        "(November 2026).\n\n" + "\n".join(blocks)
    )


def _cell(text: str) -> str:
    return "``" + text.replace("|", "\\|") + " ``" if "`" in text else f"`{text}`".replace("|", "\\|")


if __name__ == "__main__":
    from course_lib.writing import write_text

    write_text(PAGE, page())
