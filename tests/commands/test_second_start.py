"""A second start with other options: its steps, its files and its lines say what it was told."""

import json
import re
import shlex

import pytest
import yaml

from course_lib import cli
from course_lib.training.after_step import diverged
from course_lib.training.checkpoints import checkpoint
from tests.commands.conftest import QUICK

BASE = ("train", *QUICK, "--training_type", "basic", "--eval_steps", "0", "--baselines", "false")
TOLD = ("--learning_rate", "1e-5", "--weight_decay", "0.5", "--adam_beta2", "0.95")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "run"
    assert cli.main([*BASE, "--output_dir", str(folder)]) == 0
    return folder


def steps_of(folder):
    """Loss and learning rate by step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: (line["loss"], line["learning_rate"]) for line in lines if "loss" in line}


def suggested(err):
    """The command that a message ends with."""
    return shlex.split(err.rpartition("Try: course ")[2].strip())


def test_the_steps_after_it_the_card_the_summary_and_the_config_are_of_the_new_options(course, finished, tmp_path):
    third = finished / checkpoint.name(3)
    code, out, _ = course(*BASE, *TOLD, "--output_dir", tmp_path / "told", "--resume_from_checkpoint", third)
    line = next(line for line in out.splitlines() if line.startswith("resumed from"))
    assert code == 0 and line.endswith(
        "(step 3 of 6) with learning_rate 1e-05 (was 0.001), weight_decay 0.5 (was 0.01), adam_beta2 0.95 (was 0.999)"
    )
    assert course(*BASE, "--output_dir", tmp_path / "same", "--resume_from_checkpoint", third)[0] == 0
    first, told, same = steps_of(finished), steps_of(tmp_path / "told"), steps_of(tmp_path / "same")
    assert same == {step: first[step] for step in (4, 5, 6)}
    assert [told[step][1] for step in (4, 5, 6)] == pytest.approx([first[step][1] / 100 for step in (4, 5, 6)])
    assert told[4][0] == first[4][0] and told[5][0] != first[5][0] and told[6][0] != first[6][0]
    changed = {"learning_rate": [1e-3, 1e-5], "weight_decay": [0.01, 0.5], "adam_beta2": [0.999, 0.95]}
    for folder, kept in ((tmp_path / "told", [{"step": 3, "changed": changed}]), (tmp_path / "same", [])):
        assert json.loads((folder / "summary.json").read_text())["train"]["changes"] == kept
    card = (tmp_path / "told" / "model" / "README.md").read_text()
    assert "peak learning rate of 1e-05" in card and "- From step 4: learning_rate 1e-05 (before: 0.001), " in card
    assert "From step" not in (tmp_path / "same" / "model" / "README.md").read_text()
    config = yaml.safe_load((tmp_path / "told" / "config.yaml").read_text())
    assert config["optim"]["learning_rate"] == 1e-5


@pytest.mark.parametrize(
    "options",
    ["--seed 1", "--max_length 16", "--drop_last true", "--optimizer sgd --batch_size 8", "--data_seed 7"],
)
def test_a_refusal_leaves_the_run_as_it_was_and_ends_with_what_works(course, finished, options):
    before = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file() and path.name != ".lock"}
    again = (*BASE, "--output_dir", finished, "--resume_from_checkpoint", "auto")
    code, out, err = course(*again, *options.split())
    assert code == 1 and err.count("\n") == 1 and "resumed" not in out
    for name, value in re.findall(r"--(\w+) (\w+)", options):
        assert f"{name} " in err and value in err.partition("and this run has")[2].partition(":")[0]
    assert {name: (finished / name).read_bytes() for name in before} == before
    code, out, _ = course(*suggested(err))
    assert code == 0 and "(step 6 of 6)\n" in out


def test_a_run_that_diverged_goes_on_with_a_lower_rate_by_the_command_that_its_message_ends_with(course, tmp_path):
    kept = shlex.split("--save_steps 1 --lr_scheduler constant --save_total_limit 9 --max_steps 3")
    good = (*BASE, "--output_dir", tmp_path, *kept)
    assert course(*good)[0] == 0
    wild = (*good, "--max_steps", "9", "--learning_rate", "1e30", "--max_grad_norm", "0")
    code, _, err = course(*wild, "--resume_from_checkpoint", "auto")
    assert code == 1 and "is not a finite number at step" in err
    step = int(err.split("at step ")[1].split(";")[0])
    assert step == 5 and f"the last good checkpoint is {tmp_path / checkpoint.name(3)}" in err
    # The weights right before it give the same again, whatever the rate is.
    code, _, again = course(*wild, "--learning_rate", "1e-5", "--resume_from_checkpoint", tmp_path / checkpoint.name(4))
    assert code == 1 and "is not a finite number at step 5;" in again
    assert course(*suggested(err))[0] == 0
    assert sorted(steps_of(tmp_path)) == list(range(1, 10)) and steps_of(tmp_path)[9][1] == 5e-5


def test_what_is_said_of_a_divergence_is_the_command_that_mends_it(tmp_path):
    kept = [tmp_path / checkpoint.name(step) for step in (4, 8, 9)]
    early, late = diverged(9, 1e-2, kept), diverged(10, 1e-2, kept)
    assert str(kept[0]) in str(early) and early.cure["resume_from_checkpoint"] == str(kept[0])
    assert late.cure == {"learning_rate": "0.001", "overwrite_output_dir": None, "resume_from_checkpoint": str(kept[1])}
    only = diverged(5, 1e30, kept)
    assert "whose weights give the same again" in str(only)
    assert only.cure == {"learning_rate": "5e-05", "overwrite_output_dir": "true", "resume_from_checkpoint": None}
    assert "there is no checkpoint before it" in str(diverged(2, 1e-2, []))
    assert "no learning rate is the cause" in str(diverged(1, 1e-2, [], True)) and not diverged(1, 1e-2, [], True).cure


def test_without_a_whole_checkpoint_the_message_names_what_works(course, tmp_path):
    base = (*BASE, "--output_dir", tmp_path / "run", "--save_steps", "0", "--max_steps", "1")
    assert course(*base)[0] == 0
    code, _, err = course(*base, "--resume_from_checkpoint", "latest")
    assert code == 1 and "no whole checkpoint" in err
    assert course(*suggested(err))[0] == 0
