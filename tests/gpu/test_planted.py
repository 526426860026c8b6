"""The race detector: every planted mistake is named by its line, and the same work done right is not."""

import pytest
import torch
import torch.distributed as dist

from tests.gpu.machine import on_ranks
from tests.gpu.planted import PLANTS
from tests.gpu.training import ORDERS
from tests.long_cases import some

CALM = [plant for plant in PLANTS if not plant.hangs]
HANGING = [plant for plant in PLANTS if plant.hangs]


def _run(plants, wrong):
    """On a rank: what each finds, and what it raises with its line."""
    import traceback

    import gpu_sim

    torch.set_num_threads(1)
    dist.init_process_group("nccl")
    if not any(plant.hangs for plant in plants):
        dist.all_reduce(torch.ones(1, device="cuda"))
    seen = {}
    for plant in plants:
        gpu_sim.forget()
        raised = ""
        try:
            kept = plant.function(wrong)
            torch.cuda.synchronize()
            del kept
        except Exception as error:
            file = plant.function.__code__.co_filename
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
            raised = f"{error} (line {lines[-1] if lines else '?'})"
        seen[plant.name] = gpu_sim.findings(), raised
    return seen


def _launch(plants, wrong, ranks):
    return on_ranks(ranks, _run, plants, wrong)


def _names(plant, seen):
    """Whether some rank names the marked line, by the kind of finding or in the error."""
    file = plant.function.__code__.co_filename
    for findings, raised in seen:
        if plant.kind == "error":
            if plant.says in raised and any(raised.endswith(f"(line {line})") for line in plant.lines):
                return True
        elif any(
            f.kind == plant.kind and plant.says in f and f.where in [f"{file}:{line}" for line in plant.lines]
            for f in findings
        ):
            return True
    return False


@pytest.mark.parametrize("order", some(ORDERS, "late"))
def test_every_planted_mistake_is_named_by_its_line_and_done_right_nothing_is_found(gpus, order):
    """In every order in which results arrive: a mistake is one also where the result happened to be there in time."""
    calls = [(_launch, (CALM, wrong, 2), {}) for wrong in (True, False)]
    wrong, right = gpus.run_each(calls, environment={"GPU_SIM_TIMEOUT": "10"} | ORDERS[order])
    seen = {plant: [rank[plant.name] for rank in wrong] for plant in CALM}
    assert {plant.name: found for plant, found in seen.items() if not _names(plant, found)} == {}, "missed"
    assert right == [{plant.name: ([], "") for plant in CALM}] * 2


@pytest.fixture(scope="module")
def hanging(gpus):
    """What the ranks of each plant that would hang find, by its name: where it is done wrong, and right."""

    def launched(plants, wrong, **environment):
        calls = [(_launch, ([plant], wrong, plant.ranks), {}) for plant in plants]
        found = gpus.run_each(calls, gpus=3, environment=environment)
        return {plant.name: [rank[plant.name] for rank in each] for plant, each in zip(plants, found, strict=True)}

    in_vain = [plant for plant in HANGING if plant.kind == "nobody came"]
    others = [plant for plant in HANGING if plant.kind != "nobody came"]
    wrong = launched(in_vain, True, GPU_SIM_TIMEOUT="8", GPU_SIM_ON_MISMATCH="raise")
    wrong |= launched(others, True, GPU_SIM_TIMEOUT="120", GPU_SIM_ON_MISMATCH="raise")
    right = launched(HANGING, False, GPU_SIM_TIMEOUT="240")
    return {name: (wrong[name], right[name]) for name in wrong}


@pytest.mark.parametrize("plant", HANGING, ids=lambda plant: plant.name)
def test_what_would_hang_is_named_by_its_line(plant, hanging):
    wrong, right = hanging[plant.name]
    assert _names(plant, wrong), wrong
    assert right == [([], "")] * plant.ranks
