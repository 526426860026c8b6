"""`train` and `evaluate` from end to end: what they leave behind, and which ranks they run on."""

import json
import shlex
import signal
import subprocess

import psutil
import pytest
import yaml
from transformers import pipeline

from course_lib.config import files as config_files
from course_lib.training.checkpoints import checkpoint
from tests.commands.conftest import QUICK, command, run
from tests.forked_process import run_course
from tests.waiting import has_lines, until


@pytest.fixture(scope="module", autouse=True)
def narrow_presets():
    """The usual ones: fresh interpreters, which have them, go on with what forked ones began."""


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_run_leaves_config_metrics_summary_and_a_model_that_loads(course, tmp_path):
    code, out, _ = course("train", *QUICK, "--training-type", "basic", "--output_dir", tmp_path / "run")
    assert code == 0 and "fine-tuned" in out and "majority class" in out and "TF-IDF" in out
    folder = tmp_path / "run"
    config = config_files.load([folder / "config.yaml"])
    assert config.model.model == "tiny-bert" and config.run.max_steps == 6
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert [*losses] == [1, 2, 3, 4, 5, 6] and any("eval.accuracy" in line for line in lines)
    summary = summary_of(folder)
    assert summary["training_type"] == "basic" and summary["world_size"] == 1 and summary["strategy"] == "single"
    assert summary["cpu_kernels"] == "torch" and "fast CPU kernels" not in out
    scores, ends = summary["eval"], summary["eval"]["interval95"]
    assert scores.keys() == {"split", "loss", "accuracy", "macro_f1", "rows", "interval95"} and scores["rows"] == 61
    assert ends.keys() == {"loss", "accuracy", "macro_f1"}
    assert all(low < scores[name] < high for name, (low, high) in ends.items())
    low, high = ends["accuracy"]
    assert f"{scores['accuracy']:.3f} [{low:.3f}, {high:.3f}]" in out and "95 % interval" in out
    assert {name: set(baseline["interval95"]) for name, baseline in summary["baselines"].items()} == dict.fromkeys(
        ("majority_class", "tfidf_logistic_regression"), {"accuracy", "macro_f1"}
    )
    assert (summary["train"]["steps"], summary["train"]["samples"]) == (6, 24)
    assert summary["train"]["final_loss"] == losses[6] and summary["train"]["samples_per_second"] > 0
    assert len(summary["memory"]["peak_bytes"]) == 1 and summary["memory"]["peak_bytes"][0] > 10**8
    assert {"torch", "transformers", "accelerate"} <= set(summary["versions"]) and "git_revision" in summary
    answer = pipeline("text-classification", str(folder / "model"))("what a lovely day")[0]
    assert answer["label"] in ("negative", "neutral", "positive")
    card = (folder / "model" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["model-index"] and f"{scores['accuracy']:.4f}" in card
    assert f"{low:.4f} to {high:.4f}" in card

    options = shlex.split("--training_type basic --max_length 32 --max_eval_samples 61 --split test --json")
    code, out, _ = course("evaluate", "--model", folder / "model", *options)
    again = json.loads(out.splitlines()[-1])
    assert code == 0 and again["accuracy"] == scores["accuracy"] and again["interval95"]["accuracy"] == [low, high]
    assert again["loss"] == pytest.approx(scores["loss"], abs=1e-6) and again["notes"][0].startswith("test: 61 rows: ")


@pytest.mark.parametrize(("task", "model"), [("causal_lm", "tiny-gpt2"), ("masked_lm", "tiny-bert")])
def test_language_models(course, tmp_path, task, model):
    options = f"--task {task} --model {model} --training_type basic".split()
    code, out, err = course("train", *QUICK, *options, "--output_dir", tmp_path)
    assert code == 0, err
    scores = summary_of(tmp_path)["eval"]
    assert scores["perplexity"] > 1 and "accuracy" not in scores and "perplexity" in out
    assert all(low < scores[name] < high for name, (low, high) in scores["interval95"].items())


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        pytest.param((), ("--num_processes", "2"), marks=pytest.mark.long),
        (("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"), ()),  # which starts one
        pytest.param(TORCHRUN, (), marks=pytest.mark.long),
    ],
    ids=["plainly", "accelerate", "torchrun"],
)
def test_two_ranks_however_it_is_started(tmp_path, launcher, options):
    threads = {"OMP_NUM_THREADS": "1"} if launcher == TORCHRUN else {}
    done = run("train", *QUICK, "--output_dir", tmp_path, *options, launcher=launcher, **threads)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path)
    assert summary["world_size"] == 2 and summary["strategy"] == "ddp" and len(summary["memory"]["peak_bytes"]) == 2
    assert summary["train"]["samples"] == 48 and summary["train"]["global_batch_size"] == 8
    assert summary["cpu_kernels"] == "fast" and "fast CPU kernels" in done.stdout
    if "--cpu" in launcher:
        assert "asked for 2 processes and started one" in done.stdout


def test_fewer_ranks_than_asked_for_are_refused(tmp_path):
    options = ("--output_dir", tmp_path, "--num_processes", "3")
    done = run("train", *QUICK, *options, launcher=TORCHRUN, OMP_NUM_THREADS="1")
    assert done.returncode != 0 and "num_processes is 3, and the launcher started 2" in done.stderr
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_ctrl_c_saves_and_exits_130_and_the_run_goes_on(tmp_path, ranks):
    steps = f"--max_steps 2000 --save_steps 0 --num_processes {ranks} --num_epochs 1000 --eval_steps 0".split()
    options = ("train", *QUICK, "--output_dir", tmp_path, *steps)
    process = subprocess.Popen(command(*options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(has_lines(tmp_path / "metrics.jsonl", 5), process, what="five lines of metrics.jsonl")
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert err.count("interrupted at step") == 1 and "Traceback" not in err and "death signal" not in err
    saved = checkpoint.latest(tmp_path)
    assert not psutil.wait_procs(below, timeout=240)[1], "a rank was left running"
    step = json.loads((saved / "state.json").read_text())["state"]["step"]
    done = run_course(*options, "--resume_from_checkpoint", "latest", "--max_steps", step + 3)
    assert done.returncode == 0 and f"resumed from {saved}" in done.stdout
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"loss"' in line]
    assert steps[: step + 3] == list(range(1, step + 4))
