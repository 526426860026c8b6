"""Every mistake gives one clear line and a non-zero exit, no traceback, and nothing lost or half-written."""

import json
import os
import subprocess

import pytest

from course_lib import cli
from course_lib.commands import once
from course_lib.launching import forked_ranks
from course_lib.training.checkpoints import checkpoint, manifest
from tests.commands.conftest import QUICK, command
from tests.forked_process import Forked, run_course
from tests.waiting import until

BASE = ("train", *QUICK, "--training_type", "basic", "--eval_steps", "0")


def csv(folder, text, name="data.csv"):
    path = folder / name
    path.write_text(text)
    return str(path)


def rows(labels, count=40):
    return "text,label\n" + "".join(f"text number {i} of the set,{labels[i % len(labels)]}\n" for i in range(count))


def unreadable(folder):
    path = folder / "latin.csv"
    path.write_bytes("text,label\ncafé,a\nthé,b\n".encode("latin-1"))
    return str(path)


def splits(folder, **files):
    for name, text in files.items():
        csv(folder, text, f"{name}.csv")
    return str(folder)


# What is wrong, the options that say so, and what the line has to tell.
CASES = {
    "unknown command": (lambda f: ("trian",), ["unknown command `trian`", "`train`"]),
    "unknown option": (
        lambda f: (*BASE, "--learning-rat", "1"),
        ["unknown option `--learning_rat`", "`--learning_rate`"],
    ),
    "stray word": (lambda f: (*BASE, "fast"), ["`fast`"]),
    "option without value": (lambda f: (*BASE, "--seed"), ["expected one argument"]),
    "unknown model": (lambda f: (*BASE, "--model", "tiny-brt"), ["tiny-brt", "`tiny-bert`"]),
    "model folder without config": (lambda f: (*BASE, "--model", str(f)), ["config.json"]),
    "unknown data set": (lambda f: (*BASE, "--dataset", "tweet"), ["tweet", "`tweets`"]),
    "missing data file": (lambda f: (*BASE, "--dataset", str(f / "none.csv")), ["none.csv"]),
    "unknown column": (lambda f: (*BASE, "--dataset", csv(f, rows("ab")), "--text_column", "txt"), ["txt", "`text`"]),
    "no such split": (lambda f: (*BASE, "--train_split", "trian"), ["trian", "`train`"]),
    "unknown YAML key": (
        lambda f: (*BASE, "--config", csv(f, "run:\n  bath_size: 2\n", "c.yaml")),
        ["unknown key `run.bath_size`", "`batch_size`"],
    ),
    "missing YAML file": (lambda f: (*BASE, "--config", str(f / "c.yaml")), ["no config file"]),
    "not UTF-8": (lambda f: (*BASE, "--dataset", unreadable(f)), ["latin.csv", "UTF-8"]),
    "empty file": (lambda f: (*BASE, "--dataset", csv(f, "")), ["data.csv"]),
    "empty split": (
        lambda f: (*BASE, "--dataset", splits(f, train=rows("ab"), validation="text,label\n")),
        ["validation"],
    ),
    "missing label": (lambda f: (*BASE, "--dataset", csv(f, rows(["a", "b", "a", ""]))), ["label", "row"]),
    "unseen label": (lambda f: (*BASE, "--dataset", splits(f, train=rows("ab"), test=rows("abc"))), ["`c`", "test"]),
    "batch size 0": (lambda f: (*BASE, "--batch_size", "0"), ["`batch_size` cannot be '0'"]),
    "word for a number": (lambda f: (*BASE, "--max_steps", "many"), ["`max_steps` cannot be 'many'"]),
    "nothing to resume": (lambda f: (*BASE, "--resume_from_checkpoint", "latest"), ["no whole checkpoint"]),
    "no checkpoint there": (lambda f: (*BASE, "--resume_from_checkpoint", str(f)), ["is no checkpoint"]),
    "output is a file": (lambda f: (*BASE, "--output_dir", csv(f, "mine", "notes.txt")), ["is not a folder"]),
    "output holds other files": (
        lambda f: (*BASE, "--overwrite_output_dir", "--output_dir", os.path.dirname(csv(f, "x", "thesis.txt"))),
        ["files that are no run"],
    ),
    "output on a read-only disk": (lambda f: (*BASE, "--output_dir", "/proc/run"), ["cannot be written"]),
    "no such device": (lambda f: (*BASE, "--device", "cuda"), ["device is cuda"]),
    "evaluate a preset": (lambda f: ("evaluate", "--model", "tiny-bert", "--training_type", "basic"), ["tiny-bert"]),
}


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line(name, course, tmp_path):
    make, told = CASES[name]
    (tmp_path / "in").mkdir()
    arguments = make(tmp_path / "in")
    before = sorted((tmp_path / "in").iterdir())
    if "--output_dir" not in arguments and arguments[0] == "train":
        arguments = (*arguments, "--output_dir", str(tmp_path / "run"))
    code, _, err = course(*arguments)
    line = err.strip().splitlines()[-1]
    assert code != 0 and line.startswith("course: ") and "Traceback" not in err
    assert spoken(err) == 1
    for part in told:
        assert part in line, line
    assert not (tmp_path / "run" / "summary.json").exists() and not list(tmp_path.glob("run/checkpoint-*"))
    assert sorted((tmp_path / "in").iterdir()) == before


def spoken(err):
    return sum(line.startswith("course: ") for line in err.splitlines())


def test_the_table_has_every_case():
    assert len(CASES) == 26


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run with two checkpoints."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert cli.main([*BASE, "--output_dir", str(folder)]) == 0
    assert len(checkpoint.in_order(folder)) == 2
    return folder


def test_an_output_folder_with_a_run_is_left_alone(course, finished):
    before = (finished / "summary.json").read_text()
    code, _, err = course(*BASE, "--output_dir", finished)
    assert code == 2 and "already holds a run" in err and "--overwrite_output_dir" in err
    assert (finished / "summary.json").read_text() == before


def test_overwriting_deletes_nothing_before_the_new_run_can_begin(course, finished):
    code, _, _ = course(*BASE, "--output_dir", finished, "--overwrite_output_dir", "--dataset", "nothing-such")
    assert code != 0 and (finished / "summary.json").exists() and len(checkpoint.in_order(finished)) == 2


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 1000), "model.safetensors has 1000 bytes"),
        (lambda folder: (folder / "optimizer.safetensors").unlink(), "lacks optimizer.safetensors"),
    ],
    ids=["cut short", "file missing"],
)
def test_a_damaged_checkpoint_is_refused(course, finished, tmp_path, damage, told):
    copy = tmp_path / "checkpoint-000006"
    subprocess.run(["cp", "-r", str(finished / "checkpoint-000006"), str(copy)], check=True)
    damage(copy)
    code, _, err = course(*BASE, "--output_dir", tmp_path / "run", "--resume_from_checkpoint", copy)
    assert code != 0 and told in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--model", "tiny-gpt2"), "model tiny-bert, and this run has tiny-gpt2"),
        (("--optimizer", "sgd"), "optimizer adamw, and this run has sgd"),
        (("--batch_size", "8"), "global_batch_size 4, and this run has 8"),
        (("--seed", "1"), "seed 42, and this run has 1"),
        (("--lowercase", "true"), "lowercase false, and this run has true"),
    ],
    ids=["model", "optimizer", "batch", "seed", "data"],
)
def test_a_checkpoint_of_another_run_is_refused(course, finished, tmp_path, options, told):
    code, _, err = course(
        *BASE, "--output_dir", tmp_path / "run", "--resume_from_checkpoint", finished / "checkpoint-000003", *options
    )
    assert code != 0 and told in err and spoken(err) == 1


def test_a_loss_that_is_no_number_stops_at_its_step(course, tmp_path):
    code, _, err = course(
        *BASE,
        "--output_dir",
        tmp_path,
        "--learning_rate",
        "1e30",
        "--save_steps",
        "1",
        "--max_grad_norm",
        "0",
        "--optimizer",
        "sgd",
    )
    assert code == 1 and "is not a finite number at step" in err and "last good checkpoint is" in err
    step = int(err.split("at step ")[1].split(";")[0])
    kept = checkpoint.in_order(tmp_path)
    assert json.loads((kept[-1] / "state.json").read_text())["state"]["step"] == step - 1
    manifest.verify(kept[-1])


def test_a_disk_that_fills_up_while_saving(tmp_path):
    """A process that may make no file of over 15 MB: the weights fit, the optimizer's state does not."""
    arguments = command(*BASE, "--output_dir", tmp_path / "run", "--keep_best", "false")
    limited = ["bash", "-c", 'ulimit -f 15000; exec "$@"', "bash", *arguments]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "could not save" in done.stderr and "File too large" in done.stderr
    assert not list((tmp_path / "run").glob("*checkpoint*"))


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("train", ("--dataset", "tweet"), "`tweets`"),
        ("train", ("--model", "tiny-brt"), "`tiny-bert`"),
        ("train", ("--dataset", "none.csv"), "no file or folder none.csv"),
        ("evaluate", ("--dataset", "tweet"), "`tweets`"),
        ("evaluate", ("--model", "none"), "model folder none does not exist"),
    ],
)
def test_what_is_not_there_is_said_once_and_before_ranks_are_started(
    tmp_path, monkeypatch, capsys, command, options, words
):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(forked_ranks, "run_forked", lambda *_, **__: pytest.fail("99 ranks were started"))
    monkeypatch.chdir(tmp_path)
    base = QUICK if command == "train" else ("--model", "tiny-bert")
    assert cli.main([command, *base, "--device", "cpu", "--num_processes", "99", *options]) == 2
    said = capsys.readouterr().err
    assert spoken(said) == 1 == len(said.splitlines()) and words in said, said


def test_two_ranks_say_once_what_both_find(tmp_path):
    done = run_course(
        "train",
        *QUICK,
        "--num_processes",
        "2",
        "--output_dir",
        tmp_path / "run",
        "--device",
        "cpu",
        "--dataset",
        csv(tmp_path, rows("ab")),
        "--text_column",
        "txt",
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert spoken(done.stderr) == 1 and "`text`" in done.stderr


def test_of_ranks_that_speak_at_one_moment_one_is_heard(tmp_path, monkeypatch):
    """As where rank 0 has not had a core for five seconds, and the others have waited that long."""

    def speaks():
        until((tmp_path / "go").exists, what="all ranks")
        return cli.report("none of that", 2)

    monkeypatch.setattr(cli.time, "sleep", lambda seconds: None)
    with open(tmp_path / "said", "w") as said, once.said_once():
        ranks = [Forked(speaks, os.environ | {"RANK": str(rank + 1)}, output=(said.fileno(),) * 2) for rank in range(8)]
        (tmp_path / "go").touch()
        assert [rank.wait() for rank in ranks] == [2] * 8
    assert (tmp_path / "said").read_text().count("none of that") == 1
