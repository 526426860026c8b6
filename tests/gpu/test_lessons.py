"""The lessons where there are GPUs: with their parameters as they stand, and with the GPUs that they are offered."""

import itertools
import os

import nbformat
import pytest
import torch
from accelerate import Accelerator
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.gpu.machine import HERE, SITE, on_ranks
from tests.notebooks.conftest import NOTEBOOKS, defined, execute
from tests.notebooks.test_all_lessons import LESSONS

QUICK = {
    "00_start_here": {"device": "cpu", "repeats": 1, "steps": 10},
    "03_accelerate": {"device": "auto", "steps": 6, "world_sizes": [1, 2]},
}
"""Lessons that run on the GPUs in a short time, and the parameters that make them short."""


@pytest.fixture
def lesson(gpus, tmp_path, monkeypatch):
    """A function (name, GPUs, **parameters) -> recorded values of a run whose kernel sees so many GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), str(HERE.parents[1])]))

    def run(name, count, **parameters):
        monkeypatch.setenv("GPU_SIM", str(count))
        return execute(name, tmp_path, cell_seconds=900, forked=False, **parameters)  # which sees GPUs

    return run


def has_device(name):
    """Whether a lesson has the parameter `device`."""
    cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    return any("\ndevice = " in "\n" + cell.source for cell in cells if "parameters" in cell.metadata.get("tags", []))


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_a_short_run(lesson, name):
    assert lesson(name, 2, **QUICK[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LESSONS)
def test_as_it_stands(lesson, name):
    assert lesson(name, 2)


def an_epoch_of_lesson_03(kind):
    """What its two cells do on two GPUs, by the accelerator that is written there or by Accelerate's own."""
    names = {"itertools": itertools, "os": os, "torch": torch, "nn": nn, "dist": dist, "seed": 42}
    names |= {"DataLoader": DataLoader, "TensorDataset": TensorDataset, "Accelerator": Accelerator}
    cells = defined("03_accelerate", "class TinyAccelerator", "def one_epoch", **names)
    return [(weights.cpu(), rows.cpu()) for weights, rows in on_ranks(2, cells["one_epoch"], cells[kind])]


def test_the_accelerator_of_lesson_03_is_accelerate_s_on_gpus_too(gpus):
    tiny, full = (gpus.run(an_epoch_of_lesson_03, kind) for kind in ("TinyAccelerator", "Accelerator"))
    torch.testing.assert_close(tiny, full)


def test_all_lessons_but_one_have_a_device():
    assert [name for name in LESSONS if not has_device(name)] == ["10_faults_and_hangs"]


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", [name for name in LESSONS if has_device(name)])
def test_on_the_gpus(lesson, name, count):
    assert lesson(name, count, device="auto")
