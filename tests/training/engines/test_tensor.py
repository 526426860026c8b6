"""`--tensor_parallel_size` beside every other axis: equal to one process, and its checkpoints go to any layout."""

import re
from unittest import mock

import pytest
import torch

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.lessons import parity
from course_lib.parallel import tensor_parallel
from course_lib.parallel.sharding import Shard
from course_lib.parallel.tensor_parallel import ParameterSplit
from course_lib.training.checkpoints import checkpoint
from course_lib.training.checkpoints.tensor_shards import places
from tests.fresh_accelerator import forget_accelerator
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
ONWARDS = {  # what goes on from whose checkpoint, on four ranks
    "one process to ddp": ("one", "ddp", TWO),
    "one process to pipeline": ("one", "pipeline", TWO | PIPELINE | {"strategy": "zero1"}),
    "ddp to plain ddp": ("ddp", "plain", {}),
    "ddp to fsdp": ("ddp", "fsdp", TWO | {"strategy": "fsdp", "engine": "scratch"}),
    "fsdp to four": ("fsdp", "zero1", {"tensor_parallel_size": 4, "strategy": "zero1"}),
    "fsdp, torch to pipeline": ("fsdp, torch", "pipeline", TWO | PIPELINE),
    "pipeline, zero1 to zero3": ("pipeline, zero1", "zero3", {"strategy": "zero3", "engine": "scratch"}),
    "zero1, torch to zero2": ("zero1, torch", "zero2", TWO | {"strategy": "zero2"}),
    "plain fsdp to ddp": ("plain fsdp", "ddp", TWO),
    "plain pipeline to fsdp": ("plain pipeline", "fsdp, torch", TWO | {"strategy": "fsdp", "engine": "torch"}),
    "zero3 to plain fsdp": ("zero3", "plain fsdp", {"strategy": "fsdp", "engine": "torch"}),
    "ddp, sequence to plain pipeline": ("ddp, sequence", "plain pipeline", PIPELINE),
}


def rows(options):
    """Rows of a batch that make the global batch of one process on four ranks."""
    copies = 4 // options.get("tensor_parallel_size", 1) // options.get("pipeline_parallel_size", 1)
    return parity.GLOBAL_ROWS // 2 // copies


def runs(folder, cases, **common):
    """Several runs, one after the other on the same ranks; what each left."""
    found = {}
    for name, options in cases.items():
        forget_accelerator()
        found[name] = parity.trace(
            parity.task(
                folder / name.replace(" ", "-"),
                1,
                **({"max_steps": STEPS, "batch_size": rows(options)} | common | options),
            )
        )
    return found


@pytest.fixture(scope="module")
def one(folder):
    return parity.trace(
        parity.task(folder / "one", 1, training_type="basic", max_steps=STEPS, save_steps=SAVED, save_total_limit=None)
    )


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.long)])
def found(request, folder, one):
    cases = {name: CASES[name] for name in (CASES if request.param == "all" else SOME)}
    return launch(runs, folder, cases, save_steps=SAVED, save_total_limit=None, num_processes=4, timeout=2200)[0]


def test_every_layout_equals_one_process(found, one):
    assert len(found) in (len(SOME), len(CASES)) and (len(SOME), len(CASES)) == (3, 18)
    cells = [parity.compare(trace, one, name, "", 4) for name, trace in found.items()]
    assert [cell for cell in cells if not cell.agrees] == []
    assert all(cell.norm < 1e-4 * max(one.norms) for cell in cells)


def test_any_layout_goes_on_from_any_other(folder, found, one):
    def last(name):
        return str(folder / name.replace(" ", "-") / checkpoint.name(SAVED))

    cases = {
        name: options | {"resume_from_checkpoint": last(source)}
        for name, (source, _, options) in ONWARDS.items()
        if source in {*found, "one"}
    }
    again = launch(runs, folder / "again", cases, num_processes=4, timeout=1600)[0]
    assert len(ONWARDS) == 12 and len(again) == (12 if len(found) == len(CASES) else 4)
    for name, trace in again.items():
        assert trace.losses == pytest.approx(one.losses[SAVED:], abs=parity.LOSS_TOLERANCE), name
        largest = max((trace.weights[key] - one.weights[key]).abs().max().item() for key in one.weights)
        assert largest <= parity.WEIGHT_TOLERANCE, name
    basic = parity.trace(
        parity.task(
            folder / "basic",
            1,
            training_type="basic",
            max_steps=STEPS,
            resume_from_checkpoint=last("pipeline, sequence"),
        )
    )
    assert basic.losses == pytest.approx(one.losses[SAVED:], abs=parity.LOSS_TOLERANCE)


@pytest.mark.long
def test_two_ranks_equal_one_process_too(tmp_path):
    rows = {row: options for row, options in parity.ROWS.items() if row[0].endswith("× tensor 2")}
    alone = {row: options for row, options in rows.items() if 2 in parity.sizes(options)}
    cells = parity.matrix(tmp_path, (2,), alone, steps=STEPS)  # on four, with more beside them: above
    assert len(cells) == 5 and [cell for cell in cells if not cell.agrees] == []


@pytest.mark.long
def test_three_axes_by_torchs_engines_equal_one_process_and_go_on_anywhere(tmp_path, one):
    cube = {"cube": TWO | PIPELINE | {"strategy": "fsdp", "batch_size": parity.GLOBAL_ROWS // 4}}
    found = launch(runs, tmp_path, cube, save_steps=SAVED, num_processes=8, timeout=900)[0]["cube"]
    assert parity.compare(found, one, "cube", "torch", 8).agrees
    saved = str(tmp_path / "cube" / checkpoint.name(SAVED))
    for case in (TWO, TWO | PIPELINE | {"strategy": "zero1"}, {"strategy": "fsdp", "engine": "torch"}):
        again = launch(
            runs, tmp_path / "again", {"x": case}, resume_from_checkpoint=saved, num_processes=4, timeout=400
        )[0]["x"]
        assert again.losses == pytest.approx(one.losses[SAVED:], abs=parity.LOSS_TOLERANCE), case


def test_the_page_has_every_row_of_the_matrix():
    text = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    shown = re.findall(r"^\| ([^|]+) \| (\w+) \|", text, re.M)[1:]
    assert shown == [*parity.ROWS]
    agree, cells = map(int, re.search(r"(\d+) of (\d+) cells agree", text).groups())
    assert agree == cells == sum(len(parity.sizes(layout)) for layout in parity.ROWS.values()) and "**" not in text


def without_the_sum(folder):
    with mock.patch.object(tensor_parallel, "reduce", lambda hidden, _: hidden):
        return runs(folder, {"ddp": TWO})


def test_without_the_exchange_the_comparison_would_notice(tmp_path, one):
    cell = parity.compare(launch(without_the_sum, tmp_path, num_processes=4, timeout=800)[0]["ddp"], one, "ddp", "", 4)
    assert not cell.agrees and cell.loss > 100 * parity.LOSS_TOLERANCE


@pytest.mark.parametrize(
    ("shape", "split"),
    [
        ((6, 4), ParameterSplit(0)),
        ((4, 6), ParameterSplit(1)),
        ((3, 12), ParameterSplit(1, fused=3)),
        ((12,), ParameterSplit(0, 3)),
    ],
)
def test_a_run_of_a_piece_is_found_in_the_whole(shape, split):
    whole, seen = torch.arange(torch.Size(shape).numel()).view(shape), []
    for rank in range(2):
        shard = torch.cat(
            [part.chunk(2, split.dim)[rank] for part in whole.chunk(split.fused, split.dim)], split.dim
        ).flatten()
        for start, length in ((0, shard.numel()), (1, shard.numel() - 2), (shard.numel(), 0)):
            index = places(split, torch.Size(shape), 2, rank, start, length)
            assert torch.equal(whole.flatten()[index], Shard(whole.shape, start, shard[start : start + length]).data)
        seen += places(split, torch.Size(shape), 2, rank, 0, shard.numel()).tolist()
    assert sorted(seen) == list(range(whole.numel()))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_processes": 3}, "num_processes 3 is no multiple of tensor_parallel_size 2"),
        (
            {"sequence_parallel": True, "task": "causal_lm", "max_length": 33},
            "max_length 33 cannot be cut into 2 equal chunks, as sequence_parallel with tensor_parallel_size 2 does",
        ),
        ({"tensor_parallel_size": 1, "sequence_parallel": True}, "sequence_parallel True has no effect"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, told):
    with pytest.raises(ConfigError) as error:
        build(TWO | options)
    assert told in str(error.value) and "\n" not in str(error.value)
