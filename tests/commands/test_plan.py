"""`course plan`: what it prints, and one line for what is wrong."""

import json
import math
import re
import shlex

import pytest

from course_lib import cli
from course_lib.commands.options import config_from
from course_lib.commands.plan import tokens
from course_lib.commands.plan_page import broken
from course_lib.config import files as config_files
from course_lib.planning import hardware, margins

ASKED = "--model facebook/opt-6.7b --gpus 8 --gpu A100-80 --global-batch 1024 --sequence-length 2048"


SAID = """6,658,473,984 parameters | a rank  [ | is the fastest of | Next best | DDP does not fit
    | 100,000,000,000 tokens take | torchrun --standalone --nproc_per_node 8"""


@pytest.fixture
def planned(capsys):
    """What `course plan` prints; with --json, what that holds."""

    def plan(line):
        assert cli.main(["plan", *shlex.split(line)]) == 0
        printed = capsys.readouterr().out
        return json.loads(printed) if "--json" in line else printed

    return plan


def test_the_page(planned):
    page = planned(f"{ASKED} --tokens 100B")
    for said in SAID.split(" | "):
        assert said.strip() in page
    assert f"Of {margins.THROUGHPUT.rows} measured runs half were within {margins.THROUGHPUT.median:.1%}" in page


def test_the_page_has_one_number_for_memory_and_one_kind_of_interval(planned):
    page = " ".join(planned(f"{ASKED} --tokens 100B").replace(",", "").split())
    plan = planned(f"{ASKED} --tokens 100B --json")["plans"][0]
    held = f"{sum(plan['memory_bytes'].values()) / 2**30:.1f}"
    assert re.findall(r"([\d.]+) of [\d.]+ GiB", page) == [held, held], "the answer and the bar"
    assert f"{held} {plan['chance_that_it_fits']:.0%}" in page, "the table"
    numbers = r"([\d.]+) (?:tokens/s|hours) \(80% of such plans: ([\d.]+) to ([\d.]+)\)"
    speed, hours = (tuple(map(float, found)) for found in re.findall(numbers, page))
    assert "nine in ten" not in page and plan["interval_share"] == 0.8
    assert [hours[0] * speed[0] / end for end in speed[:0:-1]] == pytest.approx(hours[1:], rel=1e-3)


def read_line(line):
    words = shlex.split(line)
    return config_from(cli.parse(words[words.index("course_lib.cli") + 1 :]))


def test_what_is_printed_and_written_starts_what_was_planned(tmp_path, planned):
    told = planned(f"{ASKED} --families FSDP --tokens 3e9 --dataset wikitext --json --emit {tmp_path}")
    steps = math.ceil(3e9 / (1024 * 2048))
    printed = read_line(told["launch"])
    written = config_files.load([tmp_path / "course.yaml"])
    hours = json.loads((tmp_path / "training_arguments.json").read_text())
    for config in (printed, written):
        assert (config.data.dataset, config.run.max_steps, config.data.max_length) == ("wikitext", steps, 2048)
        assert config.run.batch_size * config.run.gradient_accumulation_steps * 8 == 1024
        assert config.model.model == "facebook/opt-6.7b" and str(config.output_dir).startswith("runs/wikitext-opt")
    assert hours["max_steps"] == steps
    for name in ("torchrun.sh", "job.sbatch"):
        text = (tmp_path / name).read_text()
        assert f"--max_steps {steps}" in text and "--dataset wikitext" in text and "--max_length 2048" in text
    limit = float((tmp_path / "sagemaker.sh").read_text().split("--max_hours ")[1].split()[0])
    assert limit < 100 and f"{int(limit):02d}:" in (tmp_path / "job.sbatch").read_text()
    page = planned(ASKED)
    assert "on pydocs, which every machine has: name your data with --dataset" in " ".join(page.split())
    assert "--dataset pydocs" in page and "--max_steps" not in page


def test_a_bare_accelerator_has_the_price_that_select_knows(planned, capsys):
    line = "--model facebook/opt-1.3b --gpu A100-80 --gpus 4"
    assert cli.main(shlex.split("select --model-name facebook/opt-1.3b --gpu-count 4 --sequence-length 2048")) == 0
    selected = json.loads(capsys.readouterr().out)["dollars_per_million_tokens"]["A100-80"]
    best = planned(f"{line} --tokens 1M --json")["plans"][0]
    assert best["dollars"] == pytest.approx(best["hours"] * 4 * hardware.lowest_price("A100-80"))
    assert 0.3 < best["dollars"] / selected < 3
    page = " ".join(planned(f"{line} --tokens 1B").split())
    assert "at the list price of the cheapest SageMaker instance with it" in page
    page = " ".join(planned("--model gpt2 --gpu RTX-4090 --tokens 1B").split())
    assert "no price is known: SageMaker has no instance with it" in page


@pytest.mark.parametrize("more", ["--tokens 100B", "--what-if gpus=8,16,64", "--tokens 1B --what-if gpus=1,8"])
def test_the_page_fits_80_columns(planned, monkeypatch, more):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, planned(f"--model llama-8b --gpu H100 {more}").splitlines())) <= 80


@pytest.mark.parametrize(("width", "lines"), [(20, 6), (60, 3), (80, 2), (1000, 1)])
def test_a_broken_command_is_the_same_command(width, lines):
    line = "torchrun --standalone --nproc_per_node 8 -m course_lib.cli train --dataset 'a  b --c' --max_length 2048"
    parts = broken(line, width)
    assert shlex.split("\n".join(parts).replace("\\\n", " ")) == shlex.split(line)
    assert all(part.endswith(" \\") for part in parts[:-1]) and len(parts) == lines
    assert all(len(part) <= width for part in parts) or width == 20
    assert any("'a  b --c'" in part for part in parts)


def test_data_of_any_name_are_one_word_of_the_command(planned):
    page = planned("""--model gpt2 --gpu A100-80 --dataset "it's my data" """)
    command = page.partition("torchrun")[2].partition("\n\n")[0]
    assert "it's my data" in shlex.split(command.replace("\\\n", " "))


def test_the_numbers_as_json(planned):
    printed = planned(f"{ASKED} --json")
    assert printed["parameters"] == 6_658_473_984 and printed["plans"][0]["plan"]["data"] == 8
    assert sum(printed["plans"][0]["memory_bytes"].values()) < printed["gpu_memory_bytes"]
    limited = planned(f"{ASKED} --json --max-memory-gb 24")
    assert limited["layouts_that_fit"] < printed["layouts_that_fit"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--model facebok/opt-6.7b --gpu A100-80", "did you mean `facebook/opt-6.7b`"),
        ("--model opt-6.7b --gpu A100-8O", "did you mean `a100-80`"),
        ("--model opt-6.7b --gpu A100-80 --gpus 0", "--gpus 0: give a whole number from 1 on"),
        ("--model opt-6.7b --gpu A100-80 --max-memory-gb 99", "99.0 GiB per GPU, and A100-80 has 80.0"),
        ("--model opt-6.7b --gpu A100-80 --tokens lots", "invalid tokens value: 'lots'"),
        ("--model opt-13b --gpu T4 --gpus 1 --max-memory-gb 6", "it fits with --gpu"),
    ],
)
def test_mistakes_are_one_line(wrong, says, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cli.main(["plan", *wrong.split()]) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and not out


def test_numbers_of_tokens():
    assert [tokens(text) for text in ("100B", "1.5t", "3e9", "500")] == [100e9, 1.5e12, 3e9, 500.0]
    for text in ("0", "B", "-3B", "1X", "nan"):
        with pytest.raises(ValueError):
            tokens(text)


@pytest.mark.parametrize(
    "asked",
    [
        "--model gpt2 --gpu T4",
        "--model llama-8b --gpu H100 --gpus 64 --sequence-length 131072",
        "--model facebook/opt-30b --gpu A100-40 --gpus 64",
    ],
)
def test_a_command_stands_where_a_command_is_promised(planned, monkeypatch, asked):
    """And is that of the plan in the first sentence, which is likely to fit."""
    monkeypatch.setenv("COLUMNS", "80")
    told, page = planned(f"{asked} --json"), planned(asked)
    best = told["plans"][0]
    assert best["chance_that_it_fits"] >= 0.8 and best["why_not_here"] is None
    assert best["strategy"] in told["answer"]
    command = page.partition("Start it with")[2].partition(":\n\n")[2].partition("\n\n")[0]
    assert shlex.split(command.replace("\\\n", " ")) == shlex.split(told["launch"])
    assert "No command" not in page and all(line.startswith("  ") for line in command.splitlines())


def test_without_a_command_it_says_so_and_shows_the_next_that_has_one(planned):
    asked = "--model gpt2 --gpu T4 --families FSDP"
    page = " ".join(planned(asked).split())
    assert "No command of this course starts it. It is for the Hugging Face Trainer" in page and "torchrun" not in page
    assert planned(f"{asked} --json")["launch"] is None
    page = planned("--model facebook/opt-125m --gpu A100-80 --gpus 1 --families FSDP DDP --loss linear")
    assert "computes all logits before the loss" in " ".join(page.split())


@pytest.mark.parametrize(("optimizer", "momentum"), [("muon", 0.9), ("sgd", 0.0), ("adafactor", 0.9)])
def test_the_optimizer_that_was_planned_is_in_the_command(planned, optimizer, momentum):
    read = read_line(planned(f"--model gpt2 --gpu A100-80 --optimizer {optimizer} --json")["launch"]).optim
    assert (read.optimizer, read.momentum) == (optimizer, momentum)
