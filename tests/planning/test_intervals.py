"""How sure the planner is: errors of published runs, intervals that hold for what was left out, chances to fit."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from benchmarks import planner, planner_sweep
from course_lib.planning import cost, hardware, intervals, margins, memory, models, strategy
from course_lib.planning.intervals import REGIMES, RESERVED, SHARE, around, chance_that_it_fits
from course_lib.planning.memory import RUNTIME

PAGE = Path(planner.__file__).with_name("planner.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compared():
    return planner.compare()[0]


def test_the_errors_are_those_of_the_published_rows(compared):
    known = planner.known_errors(compared)
    assert json.loads(planner.ERRORS.read_text(encoding="utf-8")) == known
    assert sum(map(len, known["GiB"].values())) == sum(row.quantity == "GiB" for row in compared) > 50


@pytest.mark.parametrize(("name", "margin"), [("tokens/s/GPU", margins.THROUGHPUT), ("GiB", margins.MEMORY)])
def test_margins_are_the_page_s(name, margin):
    row = re.search(rf"\*\*all, {re.escape(name)}\*\* \| (\d+) \| ([\d.]+)% \| ([\d.]+)% \|", PAGE)
    found = [margin.rows, 100 * margin.median, 100 * margin.ninth]
    assert found == pytest.approx([float(number) for number in row.groups()])


def test_intervals_hold_in_every_regime_for_a_source_that_was_left_out(compared):
    """80 % are to lie within; 75 to 90 % do, long context included, wherever nine rows or more can tell."""
    held = planner.held(compared)
    told = 0
    for quantity in ("tokens/s/GPU", "GiB"):
        for regime in (*REGIMES, "all"):
            inside = [holds for row, holds in held if row.quantity == quantity and regime in (row.regime, "all")]
            assert f"| {quantity}, {regime} | {sum(inside)} of {len(inside)}, " in PAGE
            if len(inside) >= intervals.ENOUGH:
                assert planner.WANTED[0] <= sum(inside) / len(inside) <= planner.WANTED[1], (quantity, regime)
                told += 1
    assert told == 9, "five regimes of speed, two of memory, and each quantity's all"


def test_a_source_is_left_out_of_the_intervals_that_it_is_held_against(compared):
    """A source whose errors are far off holds nothing by its own rows."""
    odd = [replace(row, source="odd", predicted=100 * row.measured) for row in compared if row.regime == "small"][:30]
    held = planner.held(compared + odd)
    assert not any(holds for row, holds in held if row.source == "odd")
    assert {planner.publication(row.source) for row in compared if "2401.10241" in row.source} == {"arXiv 2401.10241"}
    assert planner.publication("pytorch/torchtitan docs/performance.md at 3278a52f") == "pytorch/torchtitan"


@pytest.mark.parametrize("rows", [9, 10, 19, 29, 39, 86, 99])
def test_ranks_are_exact(rows):
    """With n errors the ends are those of rank floor((n + 1) / 10) from either side: with 9 the first and the last."""
    known = [i / 1000 for i in range(1, rows + 1)]
    span, rank = around(100.0, known), (rows + 1) // 10
    assert (span.low, span.high) == (100 / (1 + known[-rank]), 100 / (1 + known[rank - 1]))
    assert (rows + 1) * intervals.TAIL >= rank > (rows + 1) * intervals.TAIL - 1


def test_an_interval_of_one_error_is_a_point():
    assert around(100.0, [0.0]).low == around(100.0, [0.0]).high == 100.0 and SHARE == 0.8


def test_the_chance_falls_with_what_is_planned_and_is_never_certain():
    capacity = 80 * 2**30
    shares = (0.2, 0.5, 0.7, 0.8, 0.9, 1.0, 1.5)
    chances = [chance_that_it_fits(share * (capacity - RUNTIME), capacity) for share in shares]
    assert chances == sorted(chances, reverse=True) and 0 < chances[-1] < 0.05 < 0.95 < chances[0] < 1
    known = intervals.errors("GiB", "other")
    right = sum(0.8 / (1 + error) * reserved <= 1 for error in known for reserved in RESERVED)
    assert chances[3] == pytest.approx((right + 0.5) / (len(known) * len(RESERVED) + 1))


@pytest.mark.parametrize("name", ["T4", "A100-80", "B200"])
def test_what_fits_does_so_in_half_of_cases(name):
    """The share of a GPU that a plan may take is where the chance passes one half, to a hundredth."""
    capacity = hardware.accelerator(name).memory
    shares = (memory.USABLE, memory.USABLE + 0.01)
    at, beyond = (chance_that_it_fits(share * (capacity - RUNTIME), capacity) for share in shares)
    assert at >= strategy.AT_LEAST > beyond


def test_a_sweep_is_read_as_its_layouts_say(tmp_path):
    """Three rows in the sweep's columns: one that ran, one that ran out, one that is none of its question."""
    columns = ["Trial ID", "World Size", "Average Step Time", "activation_checkpointing_type", "kernel"]
    columns += ["micro_batch_size", "model_parallel_size", "pipe_parallel_size"]
    rows = [
        [1, 64, 26.5, "disabled", "flash_attention2 + RMS kernel", 1, 2, 1],
        [2, 64, "OOM Error", "disabled", "flash_attention2", 8, 1, 1],
        [3, 64, 60.0, "disabled", "torch", 1, 2, 2],
    ]
    records = pandas.DataFrame(rows, columns=columns).to_dict("records")
    read = [planner_sweep.read("llama_13B_bfloat16_64_GPUs_all_runs.xlsx", row) for row in records]
    assert read[0].measured == pytest.approx(2048 * 2048 / 26.5 / 64) and read[0].chance > 0.5 and read[2] is None
    assert read[1].measured is None and read[1].chance < 0.1
    page = "\n".join(planner_sweep.report(read[:2]))
    assert "Of 1 that were told half a chance or more 1 ran, 100%; of the 1 others 0, 0%." in page
    with pytest.raises(SystemExit, match="no spreadsheet in"):
        planner_sweep.runs(tmp_path)


def test_small_models_wait_for_the_host_as_long_as_others_measured():
    """Two rows of the second sweep, one of either half, whose steps were predicted at half of their time."""
    titles = ["# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length"]
    titles += [f"{kind} parallelism" for kind in ("tensor", "data", "pipeline")] + ["iteration time (ms)"]
    values = [4, 32, 1, 1024, 16, 20, 1024, 1, 4, 1, 545.0], [8, 16, 1, 2048, 16, 16, 1024, 4, 2, 1, 417.0]
    rows = [dict(zip(titles, row, strict=True)) for row in values]
    assert [planner_sweep.read_small(row)[1] for row in rows] == pytest.approx([0, 0], abs=0.25)
    page = "\n".join(planner_sweep.of_small_models(rows))
    assert "2 runs of arXiv 2312.12391" in page and "| tensor ranks 4, median |  | " in page


def test_a_plan_that_is_as_fast_and_likelier_to_fit_is_proposed():
    """FSDP with eight sequences takes 69 of 80 GiB, which is no plan; with four it takes 41 and is as fast."""
    model, cluster = models.load("facebook/opt-6.7b"), hardware.cluster("A100-80", 8)
    found = strategy.search(model, cluster, 2048)
    four = next(candidate for candidate in found.candidates if candidate.plan.strategy == "FSDP")
    eight = replace(four.plan, micro_batch=8, accumulation=four.plan.accumulation // 2)
    assert four.plan.micro_batch == 4 and eight not in [candidate.plan for candidate in found.candidates]
    full = memory.estimate(model, eight).total
    assert 68 * 2**30 < full < cluster.accelerator.memory - RUNTIME
    assert chance_that_it_fits(full, cluster.accelerator.memory) < 0.5 < 0.9 < found.best.chance
    speed = cost.estimate(model, eight, cluster).tokens_per_second
    assert found.best.cost.tokens_per_second == pytest.approx(speed, rel=2e-3)
    assert "with a chance of" in strategy.explain(found)[0]
