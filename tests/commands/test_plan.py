"""`course plan`: what it prints, and one line for what is wrong."""

import json
import shlex

import pytest

from course_lib import cli
from course_lib.commands.plan import tokens

ASKED = "plan --model facebook/opt-6.7b --gpus 8 --gpu A100-80 --global-batch 1024 --sequence-length 2048"


def test_the_page(capsys):
    assert cli.main([*ASKED.split(), "--tokens", "100B"]) == 0
    page = capsys.readouterr().out
    for said in ("6,658,473,984 parameters", "FSDP", "a rank  [", "is the fastest of", "Next best", "DDP does not fit",
                 "100,000,000,000 tokens take", "torchrun --standalone --nproc_per_node 8"):
        assert said in page


def test_json_and_a_launch_line_that_our_trainer_reads(capsys):
    assert cli.main([*ASKED.split(), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["parameters"] == 6_658_473_984 and printed["plans"][0]["plan"]["data"] == 8
    assert sum(printed["plans"][0]["memory_bytes"].values()) < printed["gpu_memory_bytes"]
    line = shlex.split(printed["launch"])
    read = cli.parse(line[line.index("course_lib.cli") + 1:])
    assert read.run.__module__ == "course_lib.commands.train"


@pytest.mark.parametrize(("wrong", "says"), [
    ("--model facebok/opt-6.7b --gpu A100-80", "did you mean `facebook/opt-6.7b`"),
    ("--model opt-6.7b --gpu A100-8O", "did you mean `a100-80`"),
    ("--model opt-6.7b --gpu A100-80 --gpus 0", "--gpus 0: give a whole number from 1 on"),
    ("--model opt-6.7b --gpu A100-80 --max-memory-gb 99", "99.0 GiB per GPU, and A100-80 has 80.0"),
    ("--model opt-6.7b --gpu A100-80 --tokens lots", "invalid tokens value: 'lots'"),
    ("--model opt-13b --gpu T4 --gpus 1 --max-memory-gb 6", "it fits with --gpu"),
], ids=str)
def test_mistakes_are_one_line(wrong, says, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cli.main(["plan", *wrong.split()]) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and not out


def test_less_memory_changes_the_plan(capsys):
    best = []
    for limit in ("80", "24"):
        cli.main([*ASKED.split(), "--max-memory-gb", limit, "--json"])
        best.append(json.loads(capsys.readouterr().out)["layouts_that_fit"])
    assert best[1] < best[0]


def test_numbers_of_tokens():
    assert [tokens(text) for text in ("100B", "1.5t", "3e9", "500")] == [100e9, 1.5e12, 3e9, 500.0]
    for text in ("0", "B", "-3B", "1X", "nan"):
        with pytest.raises(ValueError):
            tokens(text)
