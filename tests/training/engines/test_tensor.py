"""`--tensor_parallel_size` beside every other axis: equal to one process, and its checkpoints go to any layout."""

import re
from unittest import mock

import pytest

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.lessons import parity
from course_lib.parallel import tensor_parallel
from tests.training.engines.layouts import agree, alone, apart, goes_on, on, saved
from tools.parity import BEGIN, END, PAGE

STEPS, SAVED = 3, 2
TWO = {"tensor_parallel_size": 2}
PIPELINE = {"training_type": "pipeline", "pipeline_parallel_size": 2, "pipeline_chunks": 2}
CASES = {
    "ddp": TWO,
    "zero1": TWO | {"strategy": "zero1"},
    "zero2": TWO | {"strategy": "zero2"},
    "zero3": TWO | {"strategy": "zero3"},
    "fsdp": TWO | {"strategy": "fsdp", "engine": "scratch"},
    "zero1, torch": TWO | {"strategy": "zero1", "engine": "torch"},
    "fsdp, torch": TWO | {"strategy": "fsdp", "engine": "torch"},
    "ddp, sequence": TWO | {"sequence_parallel": True},
    "zero1, sequence": TWO | {"strategy": "zero1", "sequence_parallel": True},
    "fsdp, sequence": TWO | {"strategy": "fsdp", "sequence_parallel": True},
    "pipeline": TWO | PIPELINE,
    "pipeline, zero1": TWO | PIPELINE | {"strategy": "zero1"},
    "pipeline, torch": TWO | PIPELINE | {"engine": "torch"},
    "pipeline, sequence": TWO | PIPELINE | {"sequence_parallel": True},
    "pipeline, head alone": TWO | PIPELINE | {"sequence_parallel": True, "split_spec": "transformer.h.3:end"},
    "pipeline, zero bubble": TWO | PIPELINE | {"schedule": "zbv"},
    "plain fsdp": {"strategy": "fsdp", "engine": "scratch"},
    "plain pipeline": PIPELINE,
}
SOME = ("zero3", "fsdp, torch", "pipeline, sequence")
"""In `make test`; all are in `make long`."""
TENSOR_FSDP = TWO | {"strategy": "fsdp", "engine": "scratch"}
ONWARDS = [  # what goes on from whose checkpoint, on four ranks
    ("one", TWO),
    ("one", TWO | PIPELINE | {"strategy": "zero1"}),
    ("ddp", {}),
    ("ddp", TENSOR_FSDP),
    ("fsdp", {"tensor_parallel_size": 4, "strategy": "zero1"}),
    ("fsdp, torch", TWO | PIPELINE),
    ("pipeline, zero1", {"strategy": "zero3", "engine": "scratch"}),
    ("zero1, torch", TWO | {"strategy": "zero2"}),
    ("plain fsdp", TWO),
    ("plain pipeline", TWO | {"strategy": "fsdp", "engine": "torch"}),
    ("zero3", {"strategy": "fsdp", "engine": "torch"}),
    ("ddp, sequence", PIPELINE),
]
COMMON = {"max_steps": STEPS, "save_steps": SAVED, "save_total_limit": None}


@pytest.fixture(scope="module")
def one(folder):
    return alone(folder / "one", **COMMON)


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.long)])
def found(request, folder, one):
    return on(4, folder, {name: CASES[name] for name in (CASES if request.param == "all" else SOME)}, **COMMON)


def test_every_layout_equals_one_process(found, one):
    for trace in found.values():
        agree(trace, one, relative_norm=1e-4)


def test_any_layout_goes_on_from_any_other(folder, found, one):
    cases = {
        f"{number} after {source}": options | {"resume_from_checkpoint": saved(folder, source, SAVED)}
        for number, (source, options) in enumerate(ONWARDS)
        if source in {*found, "one"}
    }
    for trace in on(4, folder / "again", cases, max_steps=STEPS).values():
        goes_on(trace, one, SAVED)
    last = saved(folder, "pipeline, sequence", SAVED)
    goes_on(alone(folder / "basic", max_steps=STEPS, resume_from_checkpoint=last), one, SAVED)


@pytest.mark.long
def test_two_ranks_equal_one_process_too(tmp_path):
    rows = {row: options for row, options in parity.ROWS.items() if row[0].endswith("× tensor 2")}
    alone = {row: options for row, options in rows.items() if 2 in parity.sizes(options)}
    cells = parity.matrix(tmp_path, (2,), alone, steps=STEPS)  # on four, with more beside them: above
    assert cells and [cell for cell in cells if not cell.agrees] == []


@pytest.mark.long
def test_three_axes_by_torchs_engines_equal_one_process_and_go_on_anywhere(tmp_path, one):
    cube = {"cube": TWO | PIPELINE | {"strategy": "fsdp"}}
    agree(on(8, tmp_path, cube, **COMMON)["cube"], one)
    for case in (TWO, TWO | PIPELINE | {"strategy": "zero1"}, {"strategy": "fsdp", "engine": "torch"}):
        onwards = case | {"resume_from_checkpoint": saved(tmp_path, "cube", SAVED)}
        goes_on(on(4, tmp_path / "again", {"x": onwards}, max_steps=STEPS)["x"], one, SAVED)


def test_the_page_has_every_row_of_the_matrix():
    text = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    shown = re.findall(r"^\| ([^|]+) \| (\w+) \|", text, re.M)[1:]
    assert shown == [*parity.ROWS]
    agree, cells = map(int, re.search(r"(\d+) of (\d+) cells agree", text).groups())
    assert agree == cells == sum(len(parity.sizes(layout)) for layout in parity.ROWS.values()) and "**" not in text


def test_without_the_exchange_the_comparison_would_notice(tmp_path, one):
    with mock.patch.object(tensor_parallel, "reduce", lambda hidden, _: hidden):
        found = on(4, tmp_path, {"ddp": TWO}, max_steps=STEPS)["ddp"]
    assert apart(found, one).loss > 100 * parity.LOSS_TOLERANCE


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_processes": 3}, "num_processes 3 is no multiple of tensor_parallel_size 2"),
        (
            {"sequence_parallel": True, "task": "causal_lm", "max_length": 33},
            "max_length 33 cannot be cut into 2 equal chunks, as sequence_parallel with tensor_parallel_size 2",
        ),
        ({"tensor_parallel_size": 1, "sequence_parallel": True}, "sequence_parallel True has no effect"),
    ],
)
def test_what_cannot_be_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        build(TWO | options)
