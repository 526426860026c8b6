"""`course plan`: what it prints, and one line for what is wrong."""

import json
import math
import re
import shlex

import pytest

from course_lib import cli, config_files
from course_lib.commands.options import config_from
from course_lib.commands.plan import tokens
from course_lib.planning import hardware, margins

ASKED = "plan --model facebook/opt-6.7b --gpus 8 --gpu A100-80 --global-batch 1024 --sequence-length 2048"


def test_the_page(capsys):
    assert cli.main([*ASKED.split(), "--tokens", "100B"]) == 0
    page = capsys.readouterr().out
    for said in ("6,658,473,984 parameters", "FSDP", "a rank  [", "is the fastest of", "Next best", "DDP does not fit",
                 "100,000,000,000 tokens take", "torchrun --standalone --nproc_per_node 8"):
        assert said in page
    speed = margins.THROUGHPUT
    assert (f"Of {speed.rows} measured runs half were within {speed.median:.1%} of the planned tokens/s, nine in ten "
            f"within {speed.ninth:.1%}") in " ".join(page.split())
    low, hours, high = (float(re.search(pattern, page.replace(",", "").replace("\n", " "))[1]) for pattern in (
        r"nine in ten: ([\d.]+) to", r"tokens take ([\d.]+) hours", r"nine in ten: [\d.]+ to +([\d.]+)\)"))
    assert (low, high) == pytest.approx((hours * (1 - speed.ninth), hours * (1 + speed.ninth)), rel=1e-3)


def read_line(line):
    words = shlex.split(line)
    return config_from(cli.parse(words[words.index("course_lib.cli") + 1:]))


def test_what_is_printed_and_written_starts_what_was_planned(tmp_path, capsys):
    line = [*ASKED.split(), "--families", "FSDP", "--tokens", "3e9", "--dataset", "wikitext"]
    assert cli.main([*line, "--json", "--emit", str(tmp_path)]) == 0
    steps = math.ceil(3e9 / (1024 * 2048))
    printed = read_line(json.loads(capsys.readouterr().out)["launch"])
    written = config_files.load([tmp_path / "course.yaml"])
    hours = json.loads((tmp_path / "training_arguments.json").read_text())
    for config in (printed, written):
        assert (config.data.dataset, config.run.max_steps, config.data.max_length) == ("wikitext", steps, 2048)
        assert config.run.batch_size * config.run.gradient_accumulation_steps * 8 == 1024
        assert config.model.model == "facebook/opt-6.7b" and str(config.output_dir).startswith("runs/wikitext-opt")
    assert hours["max_steps"] == steps
    for name in ("torchrun.sh", "job.sbatch", "skypilot.yaml"):
        text = (tmp_path / name).read_text()
        assert f"--max_steps {steps}" in text and "--dataset wikitext" in text and "--max_length 2048" in text
    limit = float((tmp_path / "sagemaker.sh").read_text().split("--max_hours ")[1].split()[0])
    assert limit < 100 and f"{int(limit):02d}:" in (tmp_path / "job.sbatch").read_text()
    assert cli.main(ASKED.split()) == 0
    page = capsys.readouterr().out
    assert "on pydocs, which every machine has: name your data with --dataset" in " ".join(page.split())
    assert "--dataset pydocs" in page and "--max_steps" not in page


def test_a_bare_accelerator_has_the_price_that_select_knows(capsys):
    line = "--model facebook/opt-1.3b --gpu A100-80 --gpus 4"
    assert cli.main(["select", "--model-name", "facebook/opt-1.3b", "--gpu-count", "4", "--sequence-length",
                     "2048"]) == 0
    selected = json.loads(capsys.readouterr().out)["dollars_per_million_tokens"]["A100-80"]
    hourly = hardware.lowest_price("A100-80")
    assert cli.main(["plan", *line.split(), "--tokens", "1M", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert best["dollars"] == pytest.approx(best["hours"] * 4 * hourly) and 0.3 < best["dollars"] / selected < 3
    assert cli.main(["plan", *line.split(), "--tokens", "1B"]) == 0
    assert "at the list price of the cheapest SageMaker instance with it" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["plan", "--model", "gpt2", "--gpu", "RTX-4090", "--tokens", "1B"]) == 0
    assert "no price is known: SageMaker has no instance with it" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("more", ["", "--tokens 100B", "--what-if gpus=8,16,64", "--tokens 1B --what-if gpus=1,8"])
def test_the_page_fits_80_columns(capsys, monkeypatch, more):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["plan", "--model", "llama-8b", "--gpu", "H100", *more.split()]) == 0
    page = capsys.readouterr().out.partition("Start it with")[0]
    assert max(map(len, page.splitlines())) <= 80


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
