"""Every mistake gives one clear line and a non-zero exit, no traceback, and nothing lost or half-written."""

import os
import re
import subprocess

import pytest

from course_lib import cli
from course_lib.commands import once
from course_lib.launching import forked_ranks
from course_lib.training.checkpoints import checkpoint
from tests.commands.conftest import QUICK, command
from tests.forked_process import Forked, run_course
from tests.waiting import until

BASE = ("train", *QUICK, "--training_type", "basic", "--eval_steps", "0")


def rows(labels):
    return "text,label\n" + "".join(f"text number {i} of the set,{labels[i % len(labels)]}\n" for i in range(40))


FILES = {
    "good.csv": rows("ab"),
    "empty.csv": "",
    "gap.csv": rows(["a", "b", "a", ""]),
    "latin.csv": "text,label\ncafé,a\nthé,b\n",
    "halves/train.csv": rows("ab"),
    "halves/validation.csv": "text,label\n",
    "unseen/train.csv": rows("ab"),
    "unseen/test.csv": rows("abc"),
    "keys.yaml": "run:\n  bath_size: 2\n",
    "mine/thesis.txt": "mine",
}
CASES = [  # a command line, a training of which gets what makes it small; and what its one line has to tell
    ("trian", "unknown command `trian`.*`train`"),
    ("train --learning-rat 1", "unknown option `--learning_rat`.*`--learning_rate`"),
    ("train fast", "`fast`"),
    ("train --seed", "expected one argument"),
    ("train --model tiny-brt", "tiny-brt.*`tiny-bert`"),
    ("train --model {there}", "config.json"),
    ("train --dataset tweet", "tweet.*`tweets`"),
    ("train --dataset {there}/none.csv", "none.csv"),
    ("train --dataset {there}/good.csv --text_column txt", "txt.*`text`"),
    ("train --train_split trian", "trian.*`train`"),
    ("train --config {there}/keys.yaml", "unknown key `run.bath_size`.*`batch_size`"),
    ("train --config {there}/none.yaml", "no config file"),
    ("train --dataset {there}/latin.csv", "latin.csv.*UTF-8"),
    ("train --dataset {there}/empty.csv", "empty.csv"),
    ("train --dataset {there}/halves", "validation"),
    ("train --dataset {there}/gap.csv", "row.*label|label.*row"),
    ("train --dataset {there}/unseen", "test.*`c`|`c`.*test"),
    ("train --batch_size 0", "`batch_size` cannot be '0'"),
    ("train --max_steps many", "`max_steps` cannot be 'many'"),
    ("train --resume_from_checkpoint latest", "no whole checkpoint"),
    ("train --resume_from_checkpoint {there}", "is no checkpoint"),
    ("train --output_dir {there}/good.csv", "is not a folder"),
    ("train --overwrite_output_dir --output_dir {there}/mine", "files that are no run"),
    ("train --output_dir /proc/run", "cannot be written"),
    ("train --device cuda", "device is cuda"),
    ("evaluate --model tiny-bert --training_type basic", "tiny-bert"),
]


@pytest.fixture
def there(tmp_path):
    """A folder with the FILES."""
    for name, text in FILES.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text, encoding="latin-1" if name == "latin.csv" else "utf-8")
    return tmp_path / "in"


@pytest.mark.parametrize(("line", "told"), CASES, ids=[line for line, _ in CASES])
def test_one_clear_line(line, told, course, there, tmp_path):
    command, *words = line.format(there=there).split()
    if command == "train":
        words = [*BASE[1:], "--output_dir", tmp_path / "run", *words]
    code, _, err = course(command, *words)
    assert code != 0 and spoken(err) == 1 and "Traceback" not in err
    assert re.match(f"course: .*({told})", err.strip().splitlines()[-1])
    assert not (tmp_path / "run" / "summary.json").exists() and not list(tmp_path.glob("run/checkpoint-*"))
    assert {str(file.relative_to(there)) for file in there.rglob("*.*")} == {*FILES}


def spoken(err):
    return sum(line.startswith("course: ") for line in err.splitlines())


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
    code, _, _ = course(*BASE, "--output_dir", finished, "--overwrite_output_dir", "--dataset", "nothing-such")
    assert code != 0, "and nothing is deleted before the new run can begin"
    assert (finished / "summary.json").read_text() == before and len(checkpoint.in_order(finished)) == 2


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


def test_a_disk_that_fills_up_while_saving(tmp_path):
    """A process that may make no file of over 15 MB: the weights fit, the optimizer's state does not."""
    arguments = command(*BASE, "--output_dir", tmp_path / "run", "--keep_best", "false")
    limited = ["bash", "-c", 'ulimit -f 15000; exec "$@"', "bash", *arguments]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "could not save" in done.stderr and "File too large" in done.stderr
    assert not list((tmp_path / "run").glob("*checkpoint*"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("train --dataset tweet", "`tweets`"),
        ("train --model tiny-brt", "`tiny-bert`"),
        ("train --dataset none.csv", "no file or folder none.csv"),
        ("evaluate --model tiny-bert --dataset tweet", "`tweets`"),
        ("evaluate --model none", "model folder none does not exist"),
    ],
)
def test_what_is_not_there_is_said_once_and_before_ranks_are_started(tmp_path, monkeypatch, capsys, line, told):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(forked_ranks, "run_forked", lambda *_, **__: pytest.fail("99 ranks were started"))
    monkeypatch.chdir(tmp_path)
    assert cli.main([*line.split(), "--device", "cpu", "--num_processes", "99"]) == 2
    said = capsys.readouterr().err
    assert spoken(said) == 1 == len(said.splitlines()) and told in said, said


def test_two_ranks_say_once_what_both_find(there, tmp_path):
    wrong = f"--num_processes 2 --device cpu --dataset {there}/good.csv --text_column txt".split()
    done = run_course("train", *QUICK, *wrong, "--output_dir", tmp_path / "run")
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
