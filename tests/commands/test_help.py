"""Help that begins with what matters, fields that are explained, completion, and errors that end with a command."""

import shlex
import subprocess

import pytest

from course_lib import cli
from course_lib.commands import options
from course_lib.commands.explain import explained
from course_lib.config import options as fields
from course_lib.errors import ConfigError


@pytest.fixture
def page(capsys, monkeypatch):
    """What `course ... --help` prints at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def of(*words):
        with pytest.raises(SystemExit):
            cli.parse([*words, "--help"])
        return capsys.readouterr().out

    return of


def test_help_begins_with_ten_options_and_fits_80_columns(page):
    text = page("train")
    lines = text.splitlines()
    assert lines[0] == "usage: course train [--config FILE] [--OPTION VALUE ...]"
    assert max(map(len, lines)) <= 80
    first = text.index(f"{options.FIRST}:")
    places = [text.index(f"\n  --{name} ") for name in options.MATTER]
    assert len(places) == 10 and places == sorted(places) and first < places[0]
    assert all(places[-1] < text.index(f"\n{section}:") for section in options.SECTIONS)
    assert "--per_device_train_batch_size" not in text
    assert "per_device_train_batch_size for batch_size" in " ".join(text.split())
    assert "--num_epochs X" in text and "--batch_size N" in text and "--dataset TEXT" in text


def test_the_help_of_evaluate_offers_nothing_of_training(page):
    text = page("evaluate")
    assert "--eval_batch_size N" in text and "--num_processes N" in text
    assert all(f"--{name}" not in text for name in ("num_epochs", "early_stopping_patience", "learning_rate"))
    assert "num_train_epochs" not in text


def test_every_field_is_explained_in_lines_of_the_terminal_s_width(monkeypatch, capsys):
    for field in fields():
        text = explained(field.name, 80)
        assert max(map(len, text.splitlines())) <= 80 and "default   " in text, text
        unbroken = " ".join(text.split())
        assert " ".join(field.help.split()) in unbroken and f"in YAML {field.section}: " in unbroken
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["train", "--explain", "schedule"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) in range(50, 61)
    assert cli.main(["train", "--explain", "per-device-train-batch-size"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("--batch_size\n") and "a whole number from 1" in out and "default   16" in out
    assert "every run" in out and "--train_batch_size" in out
    assert "--optimizer sgd" in explained("momentum", 80)
    assert "a number from 0 to 1" in explained("warmup_ratio", 80) and "or none" in explained("max_steps", 80)
    with pytest.raises(ConfigError, match="did you mean `learning_rate`"):
        explained("learning_rat", 80)


def test_bash_completes_commands_options_and_values(tmp_path, capsys):
    assert cli.main(["--print-completion", "bash"]) == 0
    path = tmp_path / "course"
    path.write_text(capsys.readouterr().out)

    def completed(*words):
        body = f"""
            source {shlex.quote(str(path))}
            COMP_WORDS=({" ".join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; COMPREPLY=()
            $(complete -p course | sed 's/.*-F \\([^ ]*\\).*/\\1/')
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", body], capture_output=True, text=True, timeout=30)
        assert not done.stderr, done.stderr
        return set(done.stdout.split())

    assert completed("course", "tra") == {"train"}
    assert {"--learning_rate", "--learning_rate="} & completed("course", "train", "--learning_r")
    assert {"zero1", "zero2", "zero3"} <= completed("course", "train", "--strategy", "z")
    assert cli.main(["--print-completion", "zsh"]) == 0 and cli.main(["--print-completion", "fish"]) == 0
    assert cli.main(["--print-completion", "ksh"]) == 2
    assert "choose from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "works"),
    [
        ("trian --model tiny-bert", "train --model tiny-bert"),
        ("train --learning-rat=1e-4 --seed 1", "train --learning_rate=1e-4 --seed 1"),
        ("train --training_type basic --num_processes 2", "train --num_processes 2 --training_type accelerated"),
        ("train --schedule zbv --seed 1", "train --schedule zbv --seed 1 --training_type pipeline"),
        ("train --momentum 0.5", "train"),
        ("train --optimizer adamww", "train --optimizer adamw"),
    ],
)
def test_an_error_ends_with_the_command_that_works(line, works, capsys):
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err.rstrip().endswith(f" Try: course {works}")


def test_no_command_is_made_up():
    """Of one that stays the same, as where the mistake stands in a file, or that would break the line."""
    spelt, cured = ConfigError("x", spelt={"trian": "train"}), ConfigError("x", cure={"momentum": None, "seed": "1"})
    assert cli.mended(["trian", "--model", "a b"], spelt) == "course train --model 'a b'"
    assert cli.mended(["trian", "two\nlines"], spelt) == cli.mended(["train"], spelt) == ""
    assert (
        cli.mended(["train", "--momentum=2", "--seed", "7", "--seed=8", "--lr", "1"], cured)
        == "course train --lr 1 --seed 1"
    )
    assert cli.mended(["train"], ConfigError("x", cure={"momentum": None})) == ""
    other_name = cli.mended(["train", "--lr", "1"], ConfigError("x", cure={"learning_rate": "2"}))
    assert other_name == "course train --learning_rate 2"


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--config=nofile.yaml", "name a YAML file that is there, or leave it out\n"),
        ("--config=quickstat.yaml", "did you mean `configs/quickstart.yaml`?\n"),
        ("--model=", "Hub name: minilm, tiny-bert, tiny-gpt2, tiny-llama, tiny-olmoe, tiny-mixtral\n"),
        ("--strategy=zero4", "did you mean `zero3` or `zero2` or `zero1`?\n"),
    ],
)
def test_hints_name_what_is_near_and_nothing_else(capsys, tmp_path, monkeypatch, option, hint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for name in (".pre-commit-config.yaml", "environment.yml", "configs/quickstart.yaml"):
        (tmp_path / name).write_text("seed: 1")
    assert cli.main(["train", option, "--training_type", "basic", "--output_dir", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.endswith(hint)
