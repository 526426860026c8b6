"""Runs listed, drawn, reported and served."""

import json
from html.parser import HTMLParser

import pytest

from course_lib.cli import main
from course_lib.errors import ConfigError, DataError
from course_lib.figures.runs import compare_curves, compare_results
from course_lib.lessons.tracking.figures import confusion
from course_lib.tracking.base import RunInfo
from course_lib.tracking.collect import metrics_frame, read_runs, runs_frame
from course_lib.tracking.jsonl import JsonLinesTracker
from course_lib.tracking.summary import chosen_by, score_columns

NASTY = "<script>alert(1)</script> | [link](http://example.org) `code`"


@pytest.fixture
def runs_folder(tmp_path):
    """Three runs: two that differ in their learning rate, and one of rank 1 without scores."""
    folder = tmp_path / "runs"
    for number, (name, rate, score) in enumerate([("slow", 1e-5, 0.5), ("fast", 1e-3, 0.75), ("other", 1e-3, None)]):
        tracker = JsonLinesTracker(RunInfo(f"id{number}", name, "project", None, folder / name / "tracking"))
        tracker.start()
        tracker.store_init_configuration({"learning_rate": rate, "model": "minilm", "output_dir": name})
        for step in (1, 2, 3):
            tracker.log({"train/loss": 1.0 / step + number, "eval/loss": float("nan")}, step)
        if score:
            tracker.log({"test/macro_f1": score}, 3)
            tracker.table("test/wrong_predictions", ("row", "text"), [[4, NASTY]], 3)
        tracker.finish()
    return folder


def test_frames_and_figures_hold_the_numbers_of_the_runs(runs_folder):
    runs = read_runs(runs_folder)
    metrics, table = metrics_frame(runs), runs_frame(runs)
    assert len(metrics) == 3 * 3 + 2  # what is no number is no row
    assert table.set_index("name")["config.learning_rate"].to_dict() == {"slow": 1e-5, "fast": 1e-3, "other": 1e-3}
    curves = compare_curves(metrics, ["train/loss", "test/macro_f1"])
    drawn = {line.get_label(): list(line.get_ydata()) for line in curves.axes[0].lines}
    assert drawn == {"slow": [1, 1 / 2, 1 / 3], "fast": [2, 1.5, pytest.approx(4 / 3)], "other": [3, 2.5, 2 + 1 / 3]}
    best = compare_results(table, "test/macro_f1")
    assert best.get_suptitle() == "fast has the best test/macro_f1: 0.75"
    assert [text.get_text() for text in best.axes[0].get_yticklabels()] == ["slow", "fast"]
    assert "slow has the best train/loss" in compare_results(table, "train/loss").get_suptitle()
    tied = compare_results(table.assign(**{"test/macro_f1": 0.5}), "test/macro_f1")
    assert tied.get_suptitle() == "3 runs share the best test/macro_f1: 0.5"


def test_classes_are_drawn_with_their_counts():
    matrix = confusion(["no", "yes"], [[8, 2], [5, 1]])
    assert matrix.get_suptitle() == "Of 6 texts that are yes, 1 are recognised"
    assert [text.get_text() for text in matrix.axes[0].texts] == ["8", "2", "5", "1"]


def test_a_score_has_half_the_width_of_its_interval(tmp_path, capsys):
    accuracy = {"test/accuracy": 0.8286, "test/accuracy_low": 0.811, "test/accuracy_high": 0.845}
    tracked(tmp_path, "one", {}, accuracy | {"test/loss": 0.5})
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["one", "finished", "120", "0.5", "0.8286", "±0.017"]


def test_the_command_lists_runs_with_what_they_differ_in(runs_folder, capsys):
    assert main(["runs", str(runs_folder)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "steps", "test/macro_f1", "learning_rate", "train/loss"]
    assert sorted(line.split()[:5] for line in lines) == [
        ["fast", "finished", "3", "0.75", "0.001"],
        ["other", "finished", "3", "0.001", "2.333"],
        ["slow", "finished", "3", "0.5", "1e-05"],
    ]
    assert main(["runs", str(runs_folder), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["name"]: row.get("test/macro_f1") for row in rows} == {"slow": 0.5, "fast": 0.75, "other": None}
    assert main(["runs", str(runs_folder / "none")]) == DataError.exit_code
    assert "no folder" in capsys.readouterr().err
    assert main(["runs", str(runs_folder), "--report", "runs.txt"]) == ConfigError.exit_code
    assert main(["runs", str(runs_folder), "--report", str(runs_folder / "r.md"), "--metrics", "train/los"]) == 2
    assert "no run has the metric `train/los`: did you mean `train/loss`" in capsys.readouterr().err


def tracked(folder, name, config, metrics):
    """A finished run with these last numbers."""
    tracker = JsonLinesTracker(RunInfo(name, name, "project", None, folder / name / "tracking"))
    tracker.start()
    tracker.store_init_configuration(config)
    for metric, value in metrics.items():
        tracker.log({metric: value}, 120)
    tracker.finish()


@pytest.fixture
def wide_runs(tmp_path):
    """Four runs on one file, without a test split, that differ in many fields."""
    folder = tmp_path / "wide"
    for i in range(4):
        model = f"sentence-transformers/model-{'x' * i}"
        said = {"model": model, "text_column": f"column{i}", "task": "classification"}
        rates = {"learning_rate": 10.0**-i, "weight_decay": i / 7, "warmup_ratio": i / 3, "watchdog": 60.0 * i}
        sizes = {"batch_size": 2**i, "max_length": 32 + i, "gradient_accumulation_steps": i + 1, "mine": i}
        steps = {"logging_steps": i + 1, "save_total_limit": i, "num_epochs": i + 0.5, "progress_bar": i % 2 == 0}
        train = {"train/loss": 1 / 3, "train/samples_per_second": 123.456, "eval/macro_f1": 0.5, "eval/accuracy": 0.6}
        scores = {"loss": 0.7, "accuracy": 0.8125, "macro_f1": 0.75 + i / 100}
        validation = {f"validation/{name}": value for name, value in scores.items()}
        tracked(folder, f"a-run-with-a-name-{i}", rates | sizes | said | steps, train | validation)
    return folder


@pytest.mark.parametrize("width", [80, 400])
def test_the_table_fits_its_terminal_with_the_metric_that_chose_first(wide_runs, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["runs", str(wide_runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert all(f"0.{75 + i}" in text for i in range(4)), "macro_f1 of the validation split"
    said = " ".join(text.partition("No room")[2].split())
    assert bool(said) == (width < 400)
    for name in ("progress_bar", "save_total_limit", "text_column", "watchdog", "logging_steps", "eval/"):
        assert name not in text
    head = text.partition("a-run")[0]
    assert "macro_f1" in head and "learning_" in head, "what they were chosen by, and what they differ in"
    if width == 400:
        head = "".join(text.split("a-run")[0].split())
        assert all(part in head for part in ("mine", "gradient_", "samples_per_", "validation/"))
    else:
        assert "samples_per_second" in said


def test_scores_are_those_of_the_split_that_was_held_out(tmp_path):
    both = {"validation/macro_f1": 0.1, "eval/macro_f1": 0.2}
    tracked(tmp_path, "tested", {"best_metric": "accuracy"}, both | {"test/macro_f1": 0.3, "test/accuracy": 0.4})
    tracked(tmp_path, "validated", {"task": "classification"}, both)
    tracked(tmp_path, "stopped", {"task": "causal_lm"}, {"eval/loss": 0.5})
    named = {run.name: run for run in read_runs(tmp_path)}
    runs = [named[name] for name in ("tested", "validated", "stopped")]
    assert score_columns(runs[:1]) == ["test/accuracy", "test/macro_f1"]
    assert score_columns(runs[1:2]) == ["validation/macro_f1"] and chosen_by(runs[1]) == "macro_f1"
    assert score_columns(runs[2:]) == ["eval/loss"] and chosen_by(runs[2]) == "loss"
    assert score_columns(runs) == ["test/accuracy", "test/macro_f1", "validation/macro_f1", "eval/loss"]


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.sources = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_reports_need_nothing_else_and_show_texts_as_they_are(runs_folder, tmp_path):
    assert main(["runs", str(runs_folder), "--report", str(tmp_path / "out" / "r.html")]) == 0
    text = (tmp_path / "out" / "r.html").read_text()
    page = Page(text)
    assert NASTY in page.text and "script" not in page.tags and "a" not in page.tags
    assert [source.partition(";")[0] for source in page.sources] == ["data:image/svg+xml"] * 2
    assert "overflow-x" not in text and "overflow-wrap:anywhere" in text and "macro_<wbr>f1" in text
    assert main(["runs", str(runs_folder), "--report", str(tmp_path / "out" / "r.md")]) == 0
    text = (tmp_path / "out" / "r.md").read_text()
    pictures = [line.split("(")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert pictures == ["r-curves.svg", "r-results.svg"]
    assert all("<svg" in (tmp_path / "out" / picture).read_text() for picture in pictures)
    assert "<script>" not in text and "[link]" not in text
    cells = [line.replace("\\|", "").count("|") for line in text.splitlines() if "alert" in line]
    assert cells == [3, 3]
