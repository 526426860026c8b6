"""`course audit`: text, JSON, exit codes, and what it refuses."""

import json

import pytest

from tests.forked_process import run_course

TRAINING = """
import torch
import torch.distributed as dist
from torch import nn


def make(layout, divided=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(12, 8, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64)
    part = layout.place(dist.get_rank())["dp"]

    def reduce(*_):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if divided:
                parameter.grad /= layout.dp

    optimizer.register_step_pre_hook(reduce)
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    return model, optimizer, loss, (inputs.chunk(layout.dp)[part], targets.chunk(layout.dp)[part])


def right(layout):
    return make(layout, divided=True)
"""


@pytest.fixture
def training(tmp_path):
    path = tmp_path / "my_training.py"
    path.write_text(TRAINING)
    return path


def test_a_wrong_factor_is_told_with_the_axis_and_that_nothing_else_shows_it(training):
    """The table alone is on stdout, whatever the file prints."""
    training.write_text(TRAINING + "print('chatter')")
    done = run_course("audit", f"{training}:make", "--ranks", "3")
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and max(map(len, lines)) <= 110 and "chatter" in done.stderr
    assert lines[0].startswith("layout")
    assert lines[1].split() == ["dp2", lines[1].split()[1], "2", "0", "of", "4"] and float(lines[1].split()[1]) < 1e-6
    assert " ".join(" ".join(lines[2:4]).split()) == (
        "`0.weight`, `0.bias`, `2.weight` and 1 more: 2 times the reference, the size of dp: summed over it once too "
        "often, or not divided by it"
    )
    assert "the losses and the weights after them do not show it in two steps" in lines[4]
    assert "and 1 more: 3 times the reference, the size of dp" in done.stdout


def test_a_right_one_ends_with_0_and_json_has_every_parameter(training):
    done = run_course("audit", f"{training}:right", "--ranks", "2", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["clean"] and [v["layout"] for v in told["verdicts"]] == [{"dp": 2}]
    assert [g["name"] for g in told["verdicts"][0]["gradients"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{file}:mak", "has no function `mak`: give FILE.py:FUNCTION"),
        ("nofile.py:make", "cannot read nofile.py: give a file and a function, as my_training.py:make"),
        ("{file}:make --axes dp,xx", "unknown axis 'xx' of a layout: use pp, dp, shard, cp, ep, tp"),
        ("{file}:make --ranks 1", "layouts of up to 1 ranks: take 2 or more"),
    ],
)
def test_bad_input_is_one_line(training, line, said):
    done = run_course("audit", *line.format(file=training).split())
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_what_raises_is_told_by_its_line(training):
    training.write_text(TRAINING.replace("dist.all_reduce(parameter.grad)", "raise ValueError('no')"))
    done = run_course("audit", f"{training}:make", "--ranks", "2")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "one process: rank 0 raised ValueError: no" in done.stderr and 'my_training.py", line 16' in done.stderr
