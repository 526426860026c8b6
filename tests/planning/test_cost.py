"""The cost model beside every published row that it can express, and by its own limits."""

import json
import statistics
from dataclasses import replace

import pytest

from benchmarks import planner, planner_rows
from course_lib.planning import activations, cost, hardware, memory, models, work
from course_lib.planning.plan import Plan


def test_medians_over_the_published_rows():
    rows, left = planner.compare()
    speed = {kind: figures for kind, figures in planner.by_kind(rows).items() if not kind.endswith("memory")}
    assert sum(count for count, _, _ in speed.values()) == 226 and len(left) > 70
    medians = {"zero bubble": 0.03, "torchtitan FSDP": 0.04, "torchtitan TP": 0.11, "Megatron, weak scaling": 0.05}
    medians |= {"NeMo": 0.08, "NeMo, long sequences": 0.08, "Megatron, iteration": 0.08, "Megatron Bridge": 0.11}
    medians |= {"MosaicML FSDP": 0.08, "fms-fsdp": 0.15, "EasyContext": 0.20, "nanotron, best": 0.25}
    medians |= {"torchtitan FSDP, memory": 0.15, "torchtitan CP, memory": 0.25}
    found = {kind: median for kind, (_, median, _) in planner.by_kind(rows).items()}
    assert {kind: found[kind] for kind, limit in medians.items() if found[kind] > limit} == {}
    assert statistics.median(abs(row.error) for row in rows if row.quantity == "tokens/s/GPU") < 0.10


def test_what_a_row_does_not_say_is_not_read_into_it():
    """A label that stands for several settings, another model's name, another iteration: left out, and no crash."""
    rows = {row["id"]: row for row in json.loads(planner.PUBLISHED.read_text(encoding="utf-8"))}
    row = next(row for row in rows.values() if row["config"].get("ac") == "selective (op)")
    assert planner_rows.torchtitan(row) is not None
    for name, value in (("ac", "selective (default)"), ("local_batch", "1 (2)"), ("model", "Llama 2 70B")):
        assert planner_rows.torchtitan({**row, "config": {**row["config"], name: value}}) is None, name
    iteration = rows["korthikanti-t5-530B"]
    assert planner_rows.megatron_iteration(iteration)[0].layers == 105
    assert planner_rows.megatron_iteration({**iteration, "config": {**iteration["config"], "model": "22B"}}) is None
    best = next(row for row in rows.values() if row["kind"] == "best_config")
    assert not planner_rows.nanotron(best)[1].compiled, "its source compiles nothing"


def test_what_is_held_out_is_decided_by_the_source_alone():
    rows = [row for row in planner.compare()[0] if row.source]
    halves = {source: {row.held_out for row in rows if row.source == source} for source in {row.source for row in rows}}
    assert all(len(half) == 1 for half in halves.values()) and {True, False} == set.union(*halves.values())
    assert planner.held_out("arXiv 2104.04473 Table 2") and not planner.held_out("arXiv 2104.04473 Table 1")
    assert {row.regime for row in rows} == set(planner.REGIMES)
    lines = list(planner.by_half(rows))
    assert len(lines) == 2 * (len(planner.REGIMES) + 1)


def test_catalogue_shares_are_the_calibrations():
    for (name, dtype), share in planner.shares().items():
        assert hardware.accelerator(name).matmul[dtype] == pytest.approx(share, abs=6e-4), (name, dtype)


def test_no_calibration_step_is_among_the_compared():
    names = {row.row for row in planner.compare()[0]}
    assert not any(step in names for step in planner.CALIBRATION.read_text(encoding="utf-8").split())


def test_a_ring_all_reduce_by_hand():
    """8 A100 in a node: 2 x 7/8 of a gigabyte at 231 GB/s, and the node's latency."""
    cluster = hardware.cluster("A100-80", 8)
    assert cost.collective("all_reduce", 1e9, 8, 1, cluster) == pytest.approx(2 * 7 / 8 * 1e9 / 231e9 + 129e-6)
    assert cost.collective("all_reduce", 1e9, 1, 1, cluster) == 0
    two_nodes = cost.collective("all_reduce", 1e9, 16, 1, hardware.cluster("A100-80", 16))
    assert two_nodes > cost.collective("all_reduce", 1e9, 8, 1, cluster)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_bubble_is_megatrons_formula(ranks):
    """(p - 1) / m of the ideal time, over v when interleaved: arXiv 2104.04473 section 2.2."""
    model, cluster, m = models.load("opt-6.7b"), hardware.cluster("A100-80", ranks), 16
    for virtual, schedule in ((1, "1f1b"), (2, "interleaved")):
        plan = Plan(2048, "megatron", pipeline=ranks, accumulation=m, schedule=schedule, virtual=virtual)
        step = cost.estimate(model, plan, cluster)
        assert step.bubble / step.compute == pytest.approx((ranks - 1) / m / virtual)


LLAMA_MATMULS = {"q": 4096, "k": 1024, "v": 1024, "o": 4096, "gate": 14336, "up": 14336, "down": 14336}
"""Llama 3 8B's seven, in the order in which a block runs them: width of the side that is not the residual stream."""


def test_every_second_matmul_is_recomputed_as_torchtitan_counts_them():
    """Its policy counts matmuls from 1 and keeps the odd ones' results, attention's, and the block's input."""
    model = models.load("llama-8b")
    counted = list(LLAMA_MATMULS.items())
    again = sum(width for place, (_, width) in enumerate(counted, 1) if place % 2 == 0)
    assert work.second_matmuls(model) == again / sum(LLAMA_MATMULS.values()) == pytest.approx(0.3654, abs=1e-4)
    results = LLAMA_MATMULS | {"o": 4096, "down": 4096}
    kept = sum(results[name] for place, (name, _) in enumerate(counted, 1) if place % 2)
    of_a_token = 2 * (kept + 4096 + 4096) + 4 * 32
    assert activations.of_block(model, 2, 8192, checkpointing="operators", flash=True) == 2 * 8192 * of_a_token
    plan = Plan(8192, "fsdp", 3, data=8, micro_batch=2, compiled=True)
    chip = hardware.accelerator("H100")
    forward, _ = work.block(model, plan, chip)
    work_again = work.recomputed(model, replace(plan, checkpointing="operators"), chip)
    assert work_again.matmul == pytest.approx(forward.matmul * again / sum(LLAMA_MATMULS.values()))
    assert work_again.attention == 0 and work_again.elementwise == forward.elementwise
    written = replace(plan, checkpointing="operators", flash=False)
    assert work.recomputed(model, written, chip).attention == work.block(model, written, chip)[0].attention > 0


def test_every_second_block_is_half_of_all():
    model, cluster = models.load("llama-8b"), hardware.cluster("A100-80", 64)
    none, half, full = (Plan(8192, "fsdp", 3, data=64, checkpointing=how) for how in ("none", "alternate", "full"))
    again = [cost.estimate(model, plan, cluster).recompute for plan in (none, half, full)]
    assert again[0] == 0 and again[1] == pytest.approx(again[2] / 2)
    kept = [memory.estimate(model, plan).activations for plan in (none, half, full)]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2)


def test_fsdp_in_a_pipeline_gathers_once_a_step():
    """Without a pipeline each micro-batch does; with one the parameters and whole gradients stay."""
    model, cluster = models.load("llama-70b"), hardware.cluster("H100", 128, network=5e9)
    piped, flat = (
        Plan(4096, "fsdp", 3, data=32 // stages, tensor=4, pipeline=stages, accumulation=8) for stages in (8, 1)
    )
    more = [replace(plan, accumulation=16) for plan in (piped, flat)]
    assert cost.estimate(model, more[0], cluster).data == pytest.approx(cost.estimate(model, piped, cluster).data)
    assert cost.estimate(model, more[1], cluster).data > 1.9 * cost.estimate(model, flat, cluster).data
    held = memory.estimate(model, piped)
    whole = model.parameters / 32  # of one rank of 4 x 8
    assert held.buffers > (2 + 4) * 0.9 * whole


def test_a_collective_over_many_nodes_has_a_hop_for_each_member_but_one():
    """NCCL's ring: hops over a border of nodes are the network's, the others the link's; a node's own are measured."""
    node, many = hardware.cluster("H100", 8), hardware.cluster("H100", 1024)
    assert node.latency(8, 1) == node.accelerator.latency
    assert many.latency(1024, 1) == pytest.approx(
        many.accelerator.latency + 127 * hardware.NETWORK_LATENCY + (1023 - 127 - 7) * hardware.LINK_STEP
    )
    assert many.latency(128, 8) == pytest.approx(127 * hardware.NETWORK_LATENCY), "one member in each node"
    assert many.latency(1024, 1) > 1.9 * many.latency(512, 1), "it grows with the nodes"
