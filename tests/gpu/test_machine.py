"""The fixture itself: on simulated GPUs, and with GPU_TESTS=hardware on real ones."""

import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from course_lib.launching.launch import RankError
from tests.gpu.machine import ROOT, SITE, OnGPUsError, wants_simulation


def count():
    return torch.cuda.device_count()


def test_a_process_sees_as_many_gpus_as_it_was_given(gpus):
    assert [gpus.run(count, gpus=number) for number in (1, 2)] == [1, 2]


def product():
    left = torch.arange(6.0, device="cuda").view(2, 3)
    return (left @ left.T).cpu()


def test_it_computes_on_them(gpus):
    assert torch.equal(gpus.run(product, gpus=1), torch.tensor([[5.0, 14.0], [14.0, 50.0]]))


def on_rank():
    device = torch.device("cuda", int(os.environ["RANK"]))
    dist.init_process_group("nccl")
    value = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(value)
    return value.item()


@pytest.mark.parametrize("number", [1, 2])
def test_its_process_forks_ranks_that_meet_over_nccl(gpus, number):
    assert gpus.ranks(number, on_rank) == [number * (number + 1) / 2] * number


def fails():
    print("what it printed")
    return torch.ones(1, device="cuda") + torch.ones(2, 3, 4)[0]


def test_an_exception_comes_with_what_was_printed(gpus):
    with pytest.raises(OnGPUsError, match="RuntimeError: Expected all tensors(.|\n)*what it printed"):
        gpus.run(fails, gpus=1)


def counters():
    import gpu_sim

    return gpu_sim.kernels()


@pytest.mark.simulated("it counts kernels")
def test_the_simulation_counts(gpus):
    assert isinstance(gpus.run(counters, gpus=1), int)


def test_a_function_that_wants_the_simulation_is_known_by_its_error():
    missing = ModuleNotFoundError("No module named 'gpu_sim'", name="gpu_sim")
    on_a_rank = RankError.__new__(RankError)
    on_a_rank.cause = missing
    assert wants_simulation(missing) and wants_simulation(on_a_rank)
    assert not wants_simulation(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert not wants_simulation(RuntimeError("gpu_sim"))


@pytest.mark.simulated("it rehearses the other mode, with simulated GPUs in the place of real ones")
def test_on_hardware_nothing_is_simulated_and_what_cannot_run_is_skipped_with_its_reason(gpus, tmp_path):
    seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment = seen | {"GPU_TESTS": "hardware", "GPU_SIM": "1", "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_machine.py", "-p", "no:cacheprovider"]
    command.append(f"--junitxml={tmp_path / 'found.xml'}")
    said = subprocess.run(command, cwd=ROOT, env=environment, timeout=800, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
    found = ElementTree.parse(tmp_path / "found.xml").iter("testcase")
    cases = {case.get("name"): case.find("skipped") for case in found}
    reasons = {name: skipped.get("message") for name, skipped in cases.items() if skipped is not None}
    assert reasons.pop("test_the_simulation_counts") == "needs the simulated device: it counts kernels"
    assert reasons.pop("test_its_process_forks_ranks_that_meet_over_nccl[2]") == "needs 2 GPUs, and there is 1"
    assert reasons.pop("test_a_process_sees_as_many_gpus_as_it_was_given") == "needs 2 GPUs, and there is 1"
    assert list(reasons) == ["test_on_hardware_nothing_is_simulated_and_what_cannot_run_is_skipped_with_its_reason"]
    assert len(cases) == 8
