"""The race detector says nothing of engines that are right: torch's own, Accelerate's plugin, DeepSpeed."""

import contextlib

import pytest

from tests.gpu.engines import ENGINES, RANKS, alone
from tests.long_cases import some

SEEDS = {
    "late": {"GPU_SIM_EARLY": "0"},
    "early-1": {"GPU_SIM_EARLY": "0.3", "GPU_SIM_SEED": "1"},
    "early-2": {"GPU_SIM_EARLY": "0.05", "GPU_SIM_SEED": "2"},
}
"""When results arrive that nobody has waited for yet: never, or at odds drawn from a seed."""


def _rank(engine):
    import gpu_sim
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    losses = ENGINES[engine]()
    torch.cuda.synchronize()
    return losses, [(f.kind, str(f), f.stacks) for f in gpu_sim.findings()], gpu_sim.kernels()


def _launch(engine, ranks):
    from course_lib.launching.launch import launch

    return launch(_rank, engine, num_processes=ranks, device="cuda", start_method="fork", timeout=800, stream=False)


@pytest.fixture(scope="module")
def expected():
    return alone()


def check(gpus, engine, when, expected):
    ranks = RANKS.get(engine, 2)
    for losses, findings, kernels in gpus.run(_launch, engine, ranks, gpus=ranks, timeout=960, environment=SEEDS[when]):
        assert findings == [] and kernels > 100
        assert losses == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("engine", some(ENGINES, "ddp", "fsdp2", "schedule_zbv"))
def test_nothing_is_found_where_nothing_is_wrong(engine, gpus, expected):
    check(gpus, engine, "late", expected)


@pytest.mark.long
@pytest.mark.parametrize("when", ["early-1", "early-2"])
@pytest.mark.parametrize("engine", ENGINES)
def test_nor_where_results_come_at_other_moments(engine, when, gpus, expected):
    check(gpus, engine, when, expected)


def test_all_are_here():
    assert len(ENGINES) == 16


def _without_waits(engine, name):
    """Its streams, or its works, no longer wait for one another."""
    import gpu_sim
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    if name == "events":
        torch.cuda.Stream.wait_event = torch.cuda.Event.wait = lambda *_: None
    else:
        dist.Work.wait = lambda *_: True
    with contextlib.suppress(Exception):  # what it computes is garbage, which an engine may notice
        ENGINES[engine]()
    return {f.kind for f in gpu_sim.findings()}


def _launch_without(engine, name):
    from course_lib.launching.launch import launch

    return launch(
        _without_waits, engine, name, num_processes=2, device="cuda", start_method="fork", timeout=400, stream=False
    )


@pytest.mark.parametrize(
    "case",
    some(
        [
            ("fsdp2", "events"),
            ("accelerate_fsdp", "events"),
            ("deepspeed_2_overlapped", "events"),
            ("schedule_1f1b", "works"),
            ("schedule_zbv", "works"),
            ("zero_redundancy_optimizer", "works"),
        ],
        ("fsdp2", "events"),
        ("schedule_zbv", "works"),
    ),
    ids="-".join,
)
def test_without_their_waits_the_same_engines_are_caught(case, gpus):
    kinds = set().union(*gpus.run(_launch_without, *case, timeout=600))
    assert kinds & {"read before it was written", "two writes at once", "written while it was read", "never waited for"}
