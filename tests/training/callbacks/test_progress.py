"""What a run says of itself: first lines, and a line per logged step and evaluation where there is no bar."""

import contextlib
import io
import os
import pty
import re
import signal
import sys

import pytest

from course_lib.config import build
from course_lib.errors import TrainingInterrupted
from course_lib.launching import interrupts
from course_lib.training.callbacks import FunctionCallback
from course_lib.training.callbacks.base import shows_bar
from course_lib.training.callbacks.progress import LogLines, terminal_lines
from course_lib.training.checkpoints import checkpoint
from course_lib.training.run import train
from tests.training import quick

QUICK = quick.QUICK | {
    "model": "tiny-bert",
    "training_type": "basic",
    "max_train_samples": 48,
    "max_length": 16,
    "max_steps": 6,
    "logging_steps": 2,
    "warmup_steps": 2,
    "learning_rate": 1e-3,
    "watchdog": 0.0,
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What a run without a bar prints, and its folder."""
    folder, text = tmp_path_factory.mktemp("run") / "run", io.StringIO()
    config = build(QUICK | {"output_dir": str(folder), "eval_steps": 3})
    with contextlib.redirect_stdout(text):
        train(config, terminal_lines(config))
    return text.getvalue().splitlines(), folder


def test_the_first_lines_say_what_is_trained_on_what_how_and_where(printed):
    lines, folder = printed
    assert lines[0] == "data       tweets"
    for line, split, rows in zip(lines[1:4], ("train", "validation", "test"), (48, 8, 8), strict=True):
        said = re.fullmatch(
            rf"{split:<10} {rows} rows: negative (\d+), neutral (\d+), positive (\d+); (\d+) rows? "
            r"\(\d+\.\d%\) cut at 16 tokens, which leaves out (\d+\.\d)% of the tokens",
            line,
        )
        *counts, cut, share = map(float, said.groups())
        assert sum(counts) == rows and 0 < cut <= rows and 0 < share < 100
    assert re.fullmatch(r"model      tiny-bert, \d+\.\d million weights, classification", lines[4])
    assert re.fullmatch(r"ranks      1 \(cpu, precision (no|bf16)\), basic", lines[5])
    assert lines[6:8] == ["steps      6 of 4 rows, 12 per epoch", f"writes to  {folder}"]


def test_each_logged_step_and_evaluation_is_a_line_with_the_time_left(printed):
    lines = [line for line in printed[0] if line.startswith("step ")]
    logged = r"step (\d)/6, epoch 0\.\d\d, loss \d\.\d{4}, lr \d\.\de-\d\d, \d+ samples/s, \d\d:\d\d left"
    assert [step for line in lines if "/" in line for step in re.findall(f"^{logged}$", line)] == ["2", "4", "6"]
    evaluations = [line for line in lines if "/" not in line]
    assert [line.partition(":")[0] for line in evaluations] == ["step 3", "step 6"]
    for line in evaluations:
        scores = re.findall(r"(loss|accuracy|macro_f1) (\d\.\d{4}) \[(\d\.\d{4}), (\d\.\d{4})\]", line)
        assert [name for name, *_ in scores] == ["loss", "accuracy", "macro_f1"], "each with its 95 % interval"
        assert all(float(low) < float(score) < float(high) for _, score, low, high in scores)
        assert "rows" not in line and "low" not in line


def test_the_learning_rate_is_the_one_that_the_step_was_made_with(printed):
    """Warm-up over two steps to 1e-3, then linearly to 0 at step 6: step k takes the rate at k - 1."""
    rates = [line["learning_rate"] for line in quick.logged(printed[1]) if "loss" in line]
    assert rates == pytest.approx([0.5e-3, 0.75e-3, 0.25e-3])


def test_a_bar_needs_a_terminal(monkeypatch):
    config = build(QUICK | {"progress_bar": True})
    main, other = pty.openpty()
    with os.fdopen(main), os.fdopen(other, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert shows_bar(config) and not any(isinstance(each, LogLines) for each in terminal_lines(config))
        assert not shows_bar(config.replace(progress_bar=False))
    with open(os.devnull, "w") as nobody:
        monkeypatch.setattr(sys, "stderr", nobody)
        assert not shows_bar(config) and any(isinstance(each, LogLines) for each in terminal_lines(config))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_with_its_own_code_and_says_what_was_saved(tmp_path, monkeypatch, number, code):
    monkeypatch.setattr(interrupts, "SAME_WISH", -1.0)  # the second follows at once

    def twice(trainer):
        if trainer.state.step == 3:
            signal.raise_signal(number)
            signal.raise_signal(number)

    for saves, told in ((0, "there is no checkpoint"), (2, f"the last checkpoint is .*{checkpoint.name(2)}")):
        config = build(QUICK | {"output_dir": str(tmp_path / str(saves)), "save_steps": saves})
        with pytest.raises(TrainingInterrupted, match=f"stopped at once by a second {number.name}; {told}") as ended:
            train(config, [FunctionCallback(twice)])
        assert ended.value.exit_code == code
