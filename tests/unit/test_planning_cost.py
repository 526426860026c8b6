"""The cost model beside every published row that it can express, and by its own limits."""

import pytest

from benchmarks import planner
from course_lib.planning import cost, hardware, models
from course_lib.planning.plan import Plan


def test_medians_over_the_published_rows():
    found, left = planner.compare()
    speed = {kind: figures for kind, figures in planner.by_kind(found).items() if not kind.endswith("memory")}
    assert sum(count for count, _, _ in speed.values()) == 139 and len(left) == 76
    medians = {"Megatron, weak scaling": 0.05, "Megatron, iteration": 0.08, "nanotron, best": 0.13,
               "MosaicML FSDP": 0.22, "Megatron Bridge": 0.10, "torchtitan FSDP": 0.23, "torchtitan TP": 0.17}
    for kind, limit in medians.items():
        assert speed[kind][1] <= limit, kind


def test_what_the_assumption_about_mosaics_kernel_would_change():
    """The page states both figures, and leads with the one without it."""
    found, _ = planner.compare(triton=True)
    assert planner.by_kind(found)["MosaicML FSDP"][1] < 0.10


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
    assert cost.collective("all_reduce", 1e9, 16, 1, hardware.cluster("A100-80", 16)) > cost.collective(
        "all_reduce", 1e9, 8, 1, cluster)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_bubble_is_megatrons_formula(ranks):
    """(p - 1) / m of the ideal time, over v when interleaved: arXiv 2104.04473 section 2.2."""
    model, cluster, m = models.load("opt-6.7b"), hardware.cluster("A100-80", ranks), 16
    for virtual, schedule in ((1, "1f1b"), (2, "interleaved")):
        found = cost.estimate(model, Plan(2048, "megatron", pipeline=ranks, accumulation=m, schedule=schedule,
                                          virtual=virtual), cluster)
        assert found.bubble / found.compute == pytest.approx((ranks - 1) / m / virtual)
