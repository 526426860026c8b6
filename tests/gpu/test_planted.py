"""The race detector: every planted mistake is named by its line, and the same work done right is not."""

import pytest

from tests.gpu.planted import PLANTS
from tests.gpu.test_no_false_alarms import SEEDS

CALM = [plant for plant in PLANTS if not plant.hangs]
HANGING = [plant for plant in PLANTS if plant.hangs]
ORDERS = [pytest.param(name, marks=() if name == "late" else pytest.mark.long) for name in SEEDS]
"""In which results arrive: a mistake is one also where the result happened to be there in time."""


def _run(plants, wrong):
    """On a rank: what each finds, and what it raises with its line."""
    import os
    import sys
    import traceback

    import gpu_sim
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda")) if not any(plant.hangs for plant in plants) else None
    seen = {}
    for plant in plants:
        gpu_sim.forget()
        raised = ""
        try:
            plant.function(wrong)
            if not plant.hangs:
                torch.cuda.synchronize()
        except Exception as error:
            where = [
                frame.lineno
                for frame in traceback.extract_tb(error.__traceback__)
                if frame.filename == plant.function.__code__.co_filename
            ]
            raised = f"{error} (line {where[-1] if where else '?'})"
        seen[plant.name] = gpu_sim.findings(), raised
    if any(plant.hangs for plant in plants):  # the group is stuck, as it would be on GPUs: its clean-up is too
        sys.stdout.flush()
    return seen, os.getpid()


def _launch(plants, wrong, ranks):
    from course_lib.launching.launch import launch

    return [
        seen
        for seen, _ in launch(
            _run, plants, wrong, num_processes=ranks, device="cuda", start_method="fork", timeout=240, stream=False
        )
    ]


def _names(plant, seen):
    """Whether some rank names the marked line, by the kind of finding or in the error."""
    file, lines = plant.function.__code__.co_filename, plant.lines
    assert lines, f"{plant.name} has no marked line"
    for findings, raised in seen:
        if plant.kind == "error":
            if plant.says in raised and any(raised.endswith(f"(line {line})") for line in lines):
                return True
        elif any(
            f.kind == plant.kind and plant.says in f and f.where in [f"{file}:{line}" for line in lines]
            for f in findings
        ):
            return True
    return False


def test_there_are_at_least_forty():
    assert len(PLANTS) >= 40 and len({plant.name for plant in PLANTS}) == len(PLANTS)


@pytest.mark.parametrize("order", ORDERS)
def test_every_planted_mistake_is_named_by_its_line(gpus, order):
    by_rank = gpus.run(_launch, CALM, True, 2, environment={"GPU_SIM_TIMEOUT": "10"} | SEEDS[order])
    missed = {
        plant.name: [rank[plant.name] for rank in by_rank]
        for plant in CALM
        if not _names(plant, [rank[plant.name] for rank in by_rank])
    }
    assert not missed


@pytest.mark.parametrize("order", ORDERS)
def test_done_right_nothing_is_found(gpus, order):
    by_rank = gpus.run(_launch, CALM, False, 2, environment={"GPU_SIM_TIMEOUT": "10"} | SEEDS[order])
    alarms = {name: seen for rank in by_rank for name, seen in rank.items() if seen != ([], "")}
    assert not alarms


@pytest.fixture(scope="module")
def hanging(gpus):
    """What the ranks of each plant that would hang find, by its name: where it is done wrong, and right."""

    def launched(plants, wrong, **environment):
        found = gpus.run_each(
            [(_launch, ([plant], wrong, plant.ranks), {}) for plant in plants], gpus=3, environment=environment
        )
        return {plant.name: [rank[plant.name] for rank in each] for plant, each in zip(plants, found, strict=True)}

    in_vain = [plant for plant in HANGING if plant.kind == "nobody came"]
    others = [plant for plant in HANGING if plant.kind != "nobody came"]
    on_mismatch = {"GPU_SIM_ON_MISMATCH": "raise"}
    wrong = launched(in_vain, True, GPU_SIM_TIMEOUT="8", **on_mismatch) | launched(
        others, True, GPU_SIM_TIMEOUT="120", **on_mismatch
    )
    right = launched(HANGING, False, GPU_SIM_TIMEOUT="240")
    return {name: (wrong[name], right[name]) for name in wrong}


@pytest.mark.parametrize("plant", HANGING, ids=lambda plant: plant.name)
def test_what_would_hang_is_named_by_its_line(plant, hanging):
    wrong, right = hanging[plant.name]
    assert _names(plant, wrong), wrong
    assert right == [([], "")] * plant.ranks
