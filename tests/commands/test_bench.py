"""``course bench scaling``: real runs on one process and two, compared."""

import json
import shlex

import pandas as pd
import pytest

from course_lib.errors import CourseError
from course_lib.figures.scaling import scaling as figure_of
from course_lib.lessons import scaling
from course_lib.tracking import sweeps
from tests.commands.conftest import run
from tests.forked_process import train_forked


def write_metrics(folder, seconds_and_rates):
    """Three logged steps and an evaluation, as a run leaves them."""
    lines = [{"step": 10, "eval.loss": 1.0}]
    for step, (seconds, rate) in zip((10, 20, 30), seconds_and_rates, strict=True):
        lines.append({"step": step, "loss": 1.0, "seconds": seconds, "samples_per_second": rate})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_is_counted_is_what_comes_after_the_warm_up(tmp_path):
    """A first third that is ten times slower changes nothing."""
    write_metrics(tmp_path, [(10.0, 4.0), (11.0, 80 / 11), (12.0, 10.0)])
    assert scaling.after_warm_up(tmp_path / "metrics.jsonl") == pytest.approx((2.0, 80.0, 20))


def test_efficiency_is_throughput_by_the_growth_in_processes(tmp_path, monkeypatch):
    rates = {2: 100.0, 4: 150.0, 8: 200.0}
    asked = []

    def train_apart(options, folder):
        asked.append(dict(zip(options[::2], options[1::2], strict=True)))
        count = int(options[-1])
        folder.mkdir(parents=True)
        write_metrics(folder, [(seconds, rates[count]) for seconds in (1.0, 2.0, 3.0)])
        return {"train": {"global_batch_size": 4 * count}, "memory": {"peak_bytes": [2**20, 2**21]}}

    monkeypatch.setattr(scaling, "train_apart", train_apart)
    points = scaling.study(["--model", "tiny-bert"], (2, 4, 8), tmp_path, strong=True, say=lambda line: None)
    assert [point.speed_up for point in points] == pytest.approx([1, 1.5, 2])
    assert [point.efficiency for point in points] == pytest.approx([1, 0.75, 0.5])
    assert [(point.step_ms, point.peak_mib) for point in points] == [(pytest.approx(100), 2.0)] * 3
    assert all(options["--split_batches"] == "true" and options["--push_to_hub"] == "none" for options in asked)
    figure = figure_of(scaling.frame(points))
    assert figure.get_suptitle() == "8 processes do 2.00 times the work of 2: 50% efficient"
    perfect, measured = figure.axes[0].lines
    assert list(perfect.get_ydata()) == [100, 200, 400] and list(measured.get_ydata()) == pytest.approx([100, 150, 200])


def test_a_run_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps.Trainings, "run", train_forked)
    with pytest.raises(CourseError, match="^num_processes 1: .*nowhere"):
        scaling.study(["--dataset", str(tmp_path / "nowhere.csv")], (1, 2), tmp_path / "out")


@pytest.mark.long
def test_the_command_measures_and_leaves_table_and_figure(tmp_path):
    tiny = shlex.split("--model tiny-bert --max_train_samples 64 --max_length 32 --batch_size 4 --device cpu")
    done = run("bench", "scaling", *tiny, "--num_processes", "1", "2", "--steps", "6", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "out" / "scaling.csv")
    assert table["processes"].tolist() == [1, 2] and table["global_batch"].tolist() == [4, 8]
    assert table["efficiency"][0] == 1 and (table[["step_ms", "samples_per_second"]] > 0).all(axis=None)
    assert table["samples_per_second"][1] == pytest.approx(8 / table["step_ms"][1] * 1e3, rel=0.01)
    assert (tmp_path / "out" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "weak scaling" in done.stdout and "efficiency" in done.stdout


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "nothing to benchmark: give --model NAME, --list-models, or `course bench scaling`"),
        ("scaling --steps 2", "--steps 2: take at least 3"),
        ("scaling --num_processes 2 2", "--num_processes 2 2: give each number once"),
        ("scaling --batch_sise 2", "unknown option `--batch_sise`: did you mean `--batch_size`"),
        ("scaling --scaling strong --num_processes 1 2 --strategy zero9", "`strategy` cannot be 'zero9'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_run(course, line, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = course("bench", *line.split())
    assert code == 2 and told in err and not list(tmp_path.iterdir())
