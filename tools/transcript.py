"""Runs commands as a user types them, at 80 columns, and writes what they say into docs/commands.md.

    python tools/transcript.py

Each command is quick, trains nothing and asks no network.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "commands.md"
WIDTH = 80


CASES = {
    "trian --model tiny-bert": "",
    "train --learning_rat 1e-4": "",
    "train --strategy zero4": "",
    "train --config nofile.yaml": "",
    "train --training_type basic --num_processes 2": "",
    "train --schedule zbv --pipeline_parallel_size 2 --num_processes 2": "",
    "train --bf16 --mixed_precision no": "",
    "train --explain warmup_ratio": "read by.*",
    "train --help": "what matters first:",
    "schedule --schedule dualpipev --ranks 8 --microbatches 32": "rank  0 .*",
    "schedule --compare --ranks 4 --microbatches 8 --json": '"schedule".*',
    "plan --model gpt2 --gpu H100 --tokens 3B --dataset corpus.txt": "--max_length.*",
    "plan --model facebook/opt-1.3b --gpu A100-80 --tokens 1B": "tokens take [^;]*; \\$[\\d,]+",
    "plan --model gpt2 --gpu H100 --gpus 0": "",
    "submit --model tiny-bert --instance_type ml.p4d.24xlarge --instance_count 2": "",
    "submit --model tiny-bert --instance_type ml.g5.xlarge --to slurm --dry_run": "#SBATCH --time.*",
}
"""Commands, and of each the line of its output that matters: a pattern, or empty for the last one."""


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
            rows = [
                f"| {_cell(f'course {command}')} | {_cell(said(command, line))} |" for command, line in CASES.items()
            ]
    finally:
        sys.stdin = keyboard
        os.chdir(here)
        os.environ.pop("COLUMNS")
        if asked is not None:
            os.environ["COLUMNS"] = asked
    return (
        "# What commands say\n\nWritten by `python tools/transcript.py`, held by `tests/tools/test_transcript.py`: "
        "the exit code and the line that\nmatters.\n\n| command | says |\n|---|---|\n" + "\n".join(rows) + "\n"
    )


def _cell(text: str) -> str:
    return "``" + text.replace("|", "\\|") + " ``" if "`" in text else f"`{text}`".replace("|", "\\|")


if __name__ == "__main__":
    from course_lib.writing import write_text

    write_text(PAGE, page())
