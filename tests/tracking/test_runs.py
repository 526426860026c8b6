"""One run in two trackers, resumed, and read back from both."""

import json
import os
import socket
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import pipeline

from course_lib.cli import parse
from course_lib.config import build
from course_lib.errors import ConfigError, TrainingInterrupted
from course_lib.tracking.base import Guarded, RunInfo, Tracker
from course_lib.tracking.collect import METRIC_COLUMNS, differing_options, distinct, metrics_frame, read_runs
from course_lib.tracking.jsonl import JsonLinesTracker
from course_lib.training import run as runs
from course_lib.training.callbacks import Callback
from course_lib.training.run import build_trainer

KEY = "0123456789abcdef" * 2 + "01234567"
SIZES = {"model": "tiny-bert", "max_train_samples": 44, "max_eval_samples": 33, "max_length": 32, "max_steps": 6}
STEPS = {"logging_steps": 2, "eval_steps": 3, "save_steps": 4, "learning_rate": 1e-3}
QUIET = {"training_type": "basic", "device": "cpu", "progress_bar": False, "baselines": False, "tracker": "jsonl"}


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "of wandb"))


def config_of(folder, **options):
    return build(SIZES | STEPS | QUIET | {"output_dir": str(folder)} | options)


class InterruptedAt7(Callback):
    """Stops a run between two checkpoints."""

    def on_step_end(self, trainer):
        if trainer.state.step == 7:
            raise TrainingInterrupted("at step 7")


def series(run, metric):
    return [(step, value) for step, _, name, value in run.rows if name == metric]


def entries_of(folder):
    """What the run wrote line by line."""
    return [json.loads(line) for line in (folder / "tracking" / "rank-0.jsonl").read_text().splitlines()]


def test_two_trackers_keep_the_same_numbers_and_a_resumed_run_goes_on(tmp_path, capfd):
    """Stopped after step 7, resumed from step 4: steps 6 and on are those of the second part, and stand once."""
    folder = tmp_path / "stopped"
    options = {"tracker": "jsonl,wandb", "watch": "all", "log_predictions": 5, "log_model": True, "max_steps": 8}
    options |= {"run_group": "pair"}
    with pytest.raises(TrainingInterrupted):
        runs.train(config_of(folder, **options), [InterruptedAt7()])
    stopped = read_runs(folder)
    assert {(run.tracker, run.state) for run in stopped} == {("jsonl", "interrupted"), ("wandb", "interrupted")}
    assert [[step for step, _ in series(run, "train/loss")] for run in stopped] == [[2, 4, 6]] * 2
    summary = runs.train(config_of(folder, resume_from_checkpoint="latest", **options))

    jsonl, wandb = sorted(read_runs(folder), key=lambda run: run.tracker)
    assert (jsonl.id, jsonl.group, jsonl.state, jsonl.resumed_at) == (wandb.id, "pair", "finished", 4)
    assert (wandb.group, wandb.state, wandb.resumed_at) == ("pair", "finished", 4)
    assert [step for step, _ in series(jsonl, "train/loss")] == [2, 4, 6, 8]
    assert [step for step, _ in series(jsonl, "eval/loss")] == [3, 6, 8]
    numbers = [sorted((step, name, value) for step, _, name, value in run.rows) for run in (jsonl, wandb)]
    assert len(numbers[0]) > 40 and numbers[0] == numbers[1]
    assert series(jsonl, "test/accuracy") == [(8, summary["eval"]["accuracy"])]
    assert series(wandb, "system/rank0/memory_mib")[0][1] > 50
    frame = metrics_frame([jsonl, wandb])
    assert list(frame.columns) == list(METRIC_COLUMNS) and set(frame["tracker"]) == {"jsonl", "wandb"}
    assert distinct([wandb, jsonl]) == [jsonl] and differing_options([jsonl, wandb]) == []

    said = capfd.readouterr().out
    assert said.count("W&B: offline, as WANDB_API_KEY is not set") == 2 and said.count("wandb sync ") == 2
    media = {path.name for path in folder.glob("tracking/wandb/offline-*/files/media/table/test/*")}
    assert len(media) == 2 and any(name.startswith("wrong_predictions") for name in media)


def test_the_end_of_a_run_that_was_cut_off_is_not_invented(tmp_path):
    config = config_of(tmp_path / "run", max_steps=4)
    runs.train(config)
    path = tmp_path / "run" / "tracking" / "rank-0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-2][:20])
    (run,) = read_runs(tmp_path)
    assert run.state == "unfinished" and series(run, "train/loss")[-1][0] == 4
    path.write_text(lines[0] + "{broken\n" + lines[1])
    with pytest.raises(Exception, match="line 2 of .*rank-0.jsonl is not JSON"):
        read_runs(tmp_path)


def test_wrong_predictions_are_those_of_an_independent_pass(tmp_path):
    config = config_of(tmp_path / "run", log_predictions=50, max_steps=8)
    runs.train(config)
    text = build_trainer(config)[1]
    rows, names = text.splits["test"], text.label_names
    classify = pipeline("text-classification", str(tmp_path / "run" / "model"), truncation=True, max_length=32)
    predicted = [names.index(answer["label"]) for answer in classify(list(rows["text"]))]
    wrong = {i for i, (said, label) in enumerate(zip(predicted, rows["label"], strict=True)) if said != label}

    entries = {entry["kind"]: entry for entry in entries_of(tmp_path / "run")}
    table = entries["table"]["rows"]
    assert 0 < len(wrong) < len(rows)
    assert {tuple(row[:3]) for row in table} == {(i, rows["text"][i], names[rows["label"][i]]) for i in wrong}
    losses = [row[4] for row in table]
    assert losses == sorted(losses, reverse=True)
    counts = torch.tensor(entries["confusion"]["counts"])
    assert (counts.sum(), counts.trace()) == (len(rows), len(rows) - len(wrong))


def test_watched_gradients_are_those_of_the_step(tmp_path):
    seen = []

    class Gradients(Callback):
        def on_train_begin(self, trainer):
            def look(*_):
                seen.append({name: p.grad.abs().max().item() for name, p in trainer.model.named_parameters()})

            trainer.optimizer.register_step_pre_hook(look)

    runs.train(config_of(tmp_path / "off", max_steps=4))
    assert "histograms" not in {entry["kind"] for entry in entries_of(tmp_path / "off")}
    runs.train(config_of(tmp_path / "on", max_steps=4, watch="gradients", watch_steps=2), [Gradients()])
    histograms = [entry for entry in entries_of(tmp_path / "on") if entry["kind"] == "histograms"]
    assert [entry["step"] for entry in histograms] == [2, 4]
    for entry in histograms:
        largest = seen[entry["step"] - 1]
        assert set(entry["values"]) == {f"gradients/{name}" for name in largest}
        for name, value in largest.items():
            edges = entry["values"][f"gradients/{name}"]["edges"]
            if value:
                assert max(-edges[0], edges[-1]) == pytest.approx(value, rel=1e-5)


def test_a_service_that_does_not_answer_leaves_the_run_offline_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else can take the port
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{bound.getsockname()[1]}")
        runs.train(config_of(tmp_path / "run", tracker="wandb", max_steps=2))
    said = capsys.readouterr().out
    assert "W&B: offline, as the service did not take the run" in said
    assert KEY not in said and "wandb sync" in said
    (run,) = read_runs(tmp_path)
    assert (run.state, run.tracker, len(series(run, "train/loss"))) == ("finished", "wandb", 1)


def test_trackio_and_tensorboard_keep_the_same_numbers_over_a_resume(tmp_path, monkeypatch):
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    options = {"tracker": "jsonl,trackio,tensorboard", "max_steps": 8}
    with pytest.raises(TrainingInterrupted):
        runs.train(config_of(tmp_path / "run", **options), [InterruptedAt7()])
    runs.train(config_of(tmp_path / "run", resume_from_checkpoint="latest", **options))
    jsonl, trackio = sorted(read_runs(tmp_path), key=lambda run: run.tracker)
    assert (trackio.id, trackio.state, trackio.tracker) == (jsonl.id, "finished", "trackio")
    assert series(jsonl, "train/loss") == series(trackio, "train/loss") and len(series(jsonl, "train/loss")) == 4
    events = EventAccumulator(str(next((tmp_path / "run" / "tracking" / "tensorboard").iterdir())))
    events.Reload()
    read = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert read == [(step, pytest.approx(value)) for step, value in series(jsonl, "train/loss")]


class Breaks(Tracker):
    name = "breaks"


@pytest.mark.parametrize("method", ["start", "log"])
def test_a_failing_tracker_is_said_once_and_the_training_goes_on(tmp_path, monkeypatch, capsys, method):
    breaks = mock.Mock(side_effect=OSError(28, "No space left on device, token=abcdefgh12345678"))
    monkeypatch.setattr(Breaks, method, breaks)
    monkeypatch.setattr(
        "course_lib.training.callbacks.tracking.make_trackers",
        lambda names, info: [Guarded(Breaks(info)), Guarded(JsonLinesTracker(info))],
    )
    summary = runs.train(config_of(tmp_path / "run", max_steps=6))
    assert summary["train"]["steps"] == 6 and breaks.call_count == 1
    said = [line for line in capsys.readouterr().out.splitlines() if "tracker breaks" in line]
    assert len(said) == 1 and f"failed in {method} (OSError: [Errno 28] No space left" in said[0]
    assert "abcdefgh" not in said[0]
    (run,) = read_runs(tmp_path)
    assert run.state == "finished" and len(series(run, "train/loss")) == 3


def test_a_diverged_run_is_closed_as_failed_and_none_keeps_nothing(tmp_path):
    with pytest.raises(Exception, match="not a finite number"):
        runs.train(config_of(tmp_path / "bad", learning_rate=1e30, max_grad_norm=0, optimizer="sgd"))
    assert [run.state for run in read_runs(tmp_path)] == ["failed"]
    runs.train(config_of(tmp_path / "none", tracker="none", max_steps=2))
    assert not (tmp_path / "none" / "tracking").exists()


def test_a_new_run_in_the_place_of_an_old_one_is_another_run(tmp_path):
    runs.train(config_of(tmp_path / "run", max_steps=2))
    (first,) = read_runs(tmp_path)
    runs.train(config_of(tmp_path / "run", max_steps=2, overwrite_output_dir=True))
    (second,) = read_runs(tmp_path)
    assert first.id != second.id and len(second.rows) == len(first.rows)


def test_keys_come_from_an_env_file_and_stand_in_no_file_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text(f"WANDB_API_KEY={KEY}\nWANDB_MODE=offline\n")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "")  # so that it is taken away again after the test
    monkeypatch.delenv("WANDB_API_KEY")
    plain = JsonLinesTracker(RunInfo("abc", "run", "project", None, tmp_path / "plain"))
    plain.start()
    plain.log({"note": KEY}, 1)
    assert KEY in (tmp_path / "plain" / "rank-0.jsonl").read_text(), "without the guard the key would be written"
    runs.train(config_of(tmp_path / "run", tracker="wandb,jsonl", max_steps=2, env_file=str(tmp_path / "keys")))
    assert os.environ["WANDB_API_KEY"] == KEY
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_options_that_do_not_fit_are_refused():
    assert parse(["train", "--tracker", "wandb,jsonl", "--log-model"]).tracker == "wandb,jsonl"
    assert build({"tracker": "wandb, jsonl,wandb"}).tracking.trackers == ("wandb", "jsonl")
    assert build({"tracker": "none"}).tracking.trackers == ()
    with pytest.raises(ConfigError, match="unknown tracker `wandbb`: did you mean `wandb`"):
        build({"tracker": "wandbb"})
    with pytest.raises(ConfigError, match="log_predictions needs classes"):
        build({"task": "causal_lm", "model": "tiny-gpt2", "log_predictions": 3})
