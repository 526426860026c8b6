"""Tables of actions: as torch writes them, as committed, and legal for every size that they admit."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline import csv_form
from course_lib.parallel.pipeline.actions import Action, B, F, I, Schedule, W
from course_lib.parallel.pipeline.fitted.search import NAMES, build, stage_costs, stages_for
from course_lib.parallel.pipeline.passes import lower, merge_backward, split_backward, without_communication
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.simulation import Costs
from course_lib.parallel.pipeline.validation import check

GOLDEN = Path(__file__).parent / "golden"
SIZES = list(product(range(1, 6), range(1, 13), (1, 2, 3)))
TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def legal(name):
    """Every table of a schedule within SIZES."""
    for ranks, microbatches, stages in SIZES:
        try:
            yield make(name, ranks, microbatches, stages)
        except ConfigError:
            continue


def torch_rows(name, ranks, microbatches, stages_per_rank):
    """Torch's own table, as text, without the steps at which it waits."""
    made = object.__new__(torch_schedules.get_schedule_class(TORCH[name]))
    made.pp_group_size, made._n_microbatches = ranks, microbatches
    made._num_stages = made.num_stages = ranks * stages_per_rank
    made.n_local_stages, made._stages = stages_per_rank, [None] * stages_per_rank
    made.number_of_rounds = max(1, microbatches // ranks)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    rows = (
        made._get_pipeline_order()
        if name in ("gpipe", "1f1b")
        else {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    )
    return [
        [
            str(action)
            for action in rows[rank]
            if action is not None and action.computation_type != torch_schedules.REDUCE_GRAD
        ]
        for rank in range(ranks)
    ]


def with_pairs(table):
    """The table as torch prints it, forward and backward that may overlap in one cell."""
    text = csv_form.text(table)
    for forward in table.overlapped:
        text = re.sub(rf"\b({forward}),([^,\n]*)", r"(\1;\2)OVERLAP_F_B", text)
    return text


@pytest.mark.parametrize("name", [name for name in TORCH if name != "1f1b"])
def test_the_table_is_torchs(name):
    for table in legal(name):
        ours = [row.split(",") for row in with_pairs(table).splitlines()]
        assert ours == torch_rows(name, table.ranks, table.microbatches, table.stages // table.ranks)


def test_1f1b_is_torchs_but_for_the_last_rank_whose_printed_order_skips_micro_batch_0():
    # What torch runs there is right; the order that it prints begins with micro-batch 1.
    for table in legal("1f1b"):
        if table.microbatches >= table.ranks > 1:
            torchs = torch_rows("1f1b", table.ranks, table.microbatches, 1)
            assert [list(map(str, row)) for row in table.rows[:-1]] == torchs[:-1]
            turns = product(range(table.microbatches), (F, B))
            assert table.rows[-1] == tuple(Action(table.ranks - 1, kind, microbatch) for microbatch, kind in turns)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_the_committed_one(name):
    stages = stages_for(name)
    table = build(name, 4, 8, stages, stage_costs(Costs(), stages))
    assert csv_form.text(table) == (GOLDEN / f"{name}.txt").read_text(), "look at the difference before you commit it"


@pytest.mark.parametrize("name", KINDS)
def test_every_legal_size_is_proved(name):
    tables = list(legal(name))
    for table in tables:
        peaks = check(table)
        assert len(peaks) == table.ranks and max(peaks) <= table.microbatches * table.stages // table.ranks
    sizes = {"interleaved": 150, "interleaved_zero_bubble": 150, "looped_bfs": 180, "dualpipev": 35}
    assert len(tables) == sizes.get(name, 60)


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("gpip", (4, 8, None), "unknown schedule `gpip`: did you mean `gpipe`?"),
        ("1f1b", (0, 8, None), "0 ranks: take at least 1"),
        ("1f1b", (4, 0, None), "0 micro-batches: take at least 1"),
        ("interleaved", (4, 8, 0), "0 stages per rank: take at least 1"),
        ("1f1b", (4, 8, 2), "1f1b with 2 stages per rank: it takes exactly 1"),
        ("interleaved", (4, 9, 2), "interleaved with 9 micro-batches on 4 ranks: they must divide into 2 equal groups"),
        ("dualpipev", (4, 7, None), "7 micro-batches on 4 ranks: it takes at least as many as stages, 8"),
    ],
)
def test_what_is_illegal_is_refused_with_the_rule(name, numbers, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make(name, *numbers)


@pytest.mark.parametrize("text", ["2F0", "12I3", "0W10", "2SEND_F0", "0RECV_B7"])
def test_actions_print_as_torch_prints_them(text):
    assert str(Action.parse(text)) == text == str(torch_schedules._Action.from_str(text))


@pytest.mark.parametrize("text", ["", "2X0", "2F0F", "-1F0"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ConfigError, match=f"`{re.escape(text)}` is no action: write stage, kind .* as in 2F0"):
        Action.parse(text)


@pytest.mark.parametrize("name", KINDS)
def test_lowering_is_torchs(name):
    """The same sends and receives at the same places; pairs that may overlap are lowered as two actions."""
    of_torch = torch_schedules._Action.from_str
    for table in legal(name):
        torchs = torch_schedules._add_send_recv(
            {rank: [of_torch(str(action)) for action in row] for rank, row in enumerate(table.rows)},
            stage_to_rank=table.stage_ranks.__getitem__,
            num_stages=table.stages,
        )
        lowered = lower(table)
        for rank, row in enumerate(lowered.rows):
            assert list(map(str, row)) == list(map(str, torchs[rank]))
        assert without_communication(lowered) == table and (lowered.lowered or table.ranks == 1)


def test_a_table_is_lowered_once():
    with pytest.raises(ConfigError, match="1f1b has its sends and receives already"):
        lower(lower(make("1f1b", 2, 2)))


@pytest.mark.parametrize("name", KINDS)
def test_csv_round_trip_and_torchs_runtime(name, tmp_path):
    table = make(name, 4, 8)
    path, dumped = tmp_path / f"{name}.csv", tmp_path / "torchs.csv"
    for form in (table, lower(table)):
        csv_form.write(form, path)
        assert replace(csv_form.read(path), overlapped=table.overlapped) == form
        runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
        runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = 4, table.stages, 8
        runtime._stages, runtime.pipeline_order, runtime._defer_pp_recv = [], {}, False
        runtime._load_csv(path, format="compute_comms" if form.lowered else "compute_only")
        assert tuple(runtime.stage_index_to_group_rank[stage] for stage in range(table.stages)) == table.stage_ranks
        runtime._dump_csv(dumped, format="compute_comms")
        torchs = csv_form.read(dumped)
        assert without_communication(torchs).rows == table.rows
        assert torchs.rows == form.rows or not form.lowered
        check(torchs)  # torch lowers it with its bookkeeping in between: some receives come elsewhere


def test_csv_reads_torchs_waits_pairs_and_bookkeeping():
    table = make("dualpipev", 2, 4)
    assert csv_form.parse(with_pairs(table), "dualpipev") == table and table.overlapped
    torchs = ",0UNSHARD,0F0,,0B0,0REDUCE_GRAD\n1F0 , 1B0,1RESHARD,\n"
    assert csv_form.parse(torchs) == Schedule(
        "table", (0, 1), 1, ((Action(0, F, 0), Action(0, B, 0)), (Action(1, F, 0), Action(1, B, 0)))
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "rank 0 of table: `0X0` is no action"),
        ("0F0\n0B0\n", "stage 0 of table has rank 0 and 1: each stage needs one rank"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 of table has rank none"),
        ("", "table holds no action"),
        ("0F0,0B0\n\n1F0,1B0\n", "rank 1 of table has nothing to do"),
    ],
)
def test_csv_that_is_no_table_is_refused(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        csv_form.parse(text)


def test_a_file_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the table .*absent.csv"):
        csv_form.read(tmp_path / "absent.csv")
    with pytest.raises(ConfigError, match="cannot write .*x.csv .*: name a file in a folder that exists"):
        csv_form.write(make("1f1b", 2, 2), tmp_path / "absent" / "x.csv")


def test_splitting_and_merging_backwards():
    table = make("1f1b", 3, 5)
    split = split_backward(table)
    assert {action.kind for row in split.rows for action in row} == {F, I, W}
    assert merge_backward(split) == table and check(split) == check(table)
    apart = make("zb_h1", 3, 5)
    merged = merge_backward(apart)
    check(merged)
    adjacent = re.findall(r"(\d+)I(\d+),\1W\2\b", str(apart))
    kinds = Counter(action.kind for row in merged.rows for action in row)
    assert kinds[B] == len(adjacent) > 0 and kinds[W] == kinds[I] == 15 - len(adjacent)


def test_the_modules_need_no_torch():
    code = (
        "import sys, course_lib.parallel.pipeline.fitted.search, course_lib.parallel.pipeline.validation, "
        "course_lib.parallel.pipeline.csv_form, course_lib.parallel.pipeline.formulas\n"
        "print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240).stdout == b"[]\n"
