"""A terminal that lacks a character gets its escape: no command ends for it."""

import os
import shlex
import subprocess
import sys

import pytest

from .conftest import CLI, QUICK

ASCII = {"PYTHONIOENCODING": "ascii"}


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "数据.csv"
    lines = [f"{'好 ≤ 很好' if i % 2 else '坏'} text {i},{'积极' if i % 2 else '消极'}" for i in range(60)]
    file.write_text("text,label\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return file


def spoken(*arguments, **env):
    done = subprocess.run(
        [sys.executable, str(CLI), *map(str, arguments)], capture_output=True, timeout=960, env=os.environ | ASCII | env
    )
    assert b"Traceback" not in done.stderr + done.stdout, done.stderr.decode()
    return done.returncode, done.stdout.decode("ascii"), done.stderr.decode("ascii")


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("train --explain schedule", 0, "schedule"),
        ("trän", 2, r"unknown command `tr\xe4n`"),
        ("train --dataset 无.csv", 2, r"\u65e0.csv"),
        ("train --模型 x", 2, r"unknown option `--\u6a21"),
        ("schedule --schedule zbv --ranks 2 --microbatches 4", 0, "rank 0"),
        ("--help", 0, "usage"),
    ],
)
def test_what_a_command_says(line, code, told):
    ended, out, err = spoken(*line.split())
    assert ended == code and told in out + err


def test_a_training(rows, tmp_path):
    options = shlex.split("--max_steps 1 --tracker none --num_processes 2 --device cpu")
    code, out, err = spoken("train", *QUICK, *options, "--dataset", rows, "--output_dir", tmp_path / "输出")
    assert code == 0, err
    assert r"\u6d88\u6781" in out and r"\u8f93\u51fa" in out
    code, out, _ = spoken("runs", tmp_path / "输出")
    assert code == 0 and r"\u8f93\u51fa" in out


def test_an_argument_that_is_no_text_is_refused():
    code, _, err = spoken("train", "--dataset", "数据.csv", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")
    assert code == 2 and "is no text in this system's encoding" in err and "PYTHONUTF8=1" in err
