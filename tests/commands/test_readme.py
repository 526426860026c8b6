"""What README and docs/ tell people to type runs: each training line as it stands, with a tiny model and few rows.

That each is taken at all is tests/test_shown_commands.py's affair.
"""

import json
import shlex
from pathlib import Path

import pytest

from tests.forked_process import run_course
from tests.long_cases import some
from tests.test_shown_commands import shown

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(path for path in sorted(ROOT.glob("docs/*.md")) if path.name != "commands.md")]
SHOWN = [line.partition("#")[0].strip() for page in PAGES for _, line in shown(page)]
LINES = sorted({line for line in SHOWN if line.startswith("course train") and "--num_processes" in line})
SMALL = (
    "--model tiny-bert --max_train_samples 64 --max_eval_samples 16 --max_length 16 --max_steps 2 --baselines false "
    "--progress_bar false --device cpu"
)
OFTEN = next(line for line in LINES if "pipeline" in line)
"""Run in every test; what the others start is tested where it is built."""


@pytest.mark.parametrize("line", some(LINES, OFTEN))
def test_it_runs(tmp_path, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    ranks = int(shlex.split(line)[shlex.split(line).index("--num_processes") + 1])
    small = SMALL.replace("--model tiny-bert", "") if "--model tiny-" in line else SMALL
    small += " --max_steps 6" * ("--profile" in line)  # which waits, warms up, and then looks at some
    done = run_course(*shlex.split(line)[1:], *small.split(), "--output_dir", tmp_path / "run", timeout=720)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == ranks and summary["eval"]["loss"] > 0
    assert list((tmp_path / "run" / "model").glob("*model.safetensors"))  # the adapters alone, of --lora_r
