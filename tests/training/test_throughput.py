"""Tokens, FLOPs and MFU against numbers made by hand; stopwatch, phases and votes."""

import itertools
import time

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import BertConfig, ViTConfig

from course_lib.data.ordering import lengths_at
from course_lib.parallel.clock import Clock, Phases, Stopwatch
from course_lib.planning import hardware
from course_lib.training.state import TrainState
from course_lib.training.throughput import Throughput, peak_of
from course_lib.training.votes import Votes

CPU = torch.device("cpu")
BERT = BertConfig(vocab_size=100, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16)
LENGTHS = [5, 2, 9, 4]


def throughput(architecture=BERT, task="classification"):
    return Throughput(LENGTHS, architecture, task, CPU, "no")


@pytest.mark.parametrize(("task", "head"), [("classification", 0), ("masked_lm", 100 * 8)])
def test_tokens_and_flops_by_hand(task, head):
    """A block has 4 · 8² weights in attention and 2 · 8 · 16 behind it; 6 FLOPs each per token, and 12 · 8 per pair."""
    counted, state = throughput(task=task), TrainState(seconds=2.0)
    counted.count(state, np.array([2, 0]))
    counted.count(state, np.array([1]))
    assert (state.samples, state.tokens) == (3, 9 + 5 + 2)
    assert state.flops == (3 * 6 * (256 + 256) + 6 * head) * 16 + 3 * 12 * 8 * (81 + 25 + 4)
    assert counted.rates(state, 4) == {"samples_per_second": 1.5, "tokens_per_second": 8.0}
    counted.peak = 1e6
    assert counted.rates(state, 4)["mfu"] == state.flops / 2 / 4e6
    assert counted.rates(TrainState(), 4) == {}, "no time has passed"


@pytest.mark.parametrize("lengths", [LENGTHS, pa.chunked_array([LENGTHS[:1], LENGTHS[1:]])])
def test_lengths_of_rows_in_any_order(lengths):
    assert lengths_at(lengths, np.array([3, 0, 2])).tolist() == [4, 5, 9]


def test_a_cpu_and_an_unknown_model_have_no_mfu():
    assert throughput().note == "no MFU: no peak is known for a CPU" and throughput().peak is None
    for unknown in (None, ViTConfig()):
        counted, state = throughput(unknown), TrainState(seconds=1.0)
        counted.count(state, np.array([0]))
        assert counted.note.startswith("no MFU: ") and state.flops == 0 and state.tokens == 5


def test_ranks_of_different_hardware_have_no_common_peak():
    same, other = throughput(), throughput()
    same.peak = other.peak = 1.0
    same.agree(lambda name: [name, name])
    other.agree(lambda name: [name, "H100"])
    assert same.peak == 1.0 and other.peak is None
    assert other.note == "no MFU: the ranks' hardware differs (H100, a CPU)"


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "no", 67e12),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla T4", "bf16", None),
        ("NVIDIA A100-SXM4-40GB", "no", 19.5e12),
        ("NVIDIA H100 PCIe", "bf16", None),
    ],
)
def test_the_peak_of_a_device_by_its_drivers_name(monkeypatch, name, precision, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_of(torch.device("cuda", 0), precision)[:2] == (name, peak)


def test_matmuls_that_may_be_rounded_have_the_tensor_cores_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_of(torch.device("cuda"), "no")[1:] == (156e12, "of 156 TFLOP/s per GPU: A100-80, tf32, dense")


def test_the_drivers_names_are_of_accelerators_that_are_known():
    assert set(hardware._catalogue()["device_names"].values()) == set(hardware.accelerators()) - {"CPU"}


def test_a_stopwatch_leaves_out_what_it_was_stopped_for(monkeypatch):
    now = iter([0.0, 3.0, 10.0, 14.0, 20.0, 21.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch()
    assert watch.lap() == 3.0
    with watch.stopped():
        pass
    assert watch.lap() == 17.0 - 4.0 and watch.lap() == 1.5


def test_phases_add_up_as_they_end(monkeypatch):
    """Each is a second longer than the last; the clock is read at the beginning and the end of each."""
    now = itertools.accumulate(itertools.chain((0, 1, 0, 2), (0, 1, 4, 1)))
    phases = Phases(Clock(CPU))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    for _ in range(2):
        with phases("one"):
            pass
    assert phases.seconds == {}
    phases.settle()
    assert phases.seconds == {"one": 1 + 2}
    with phases("other"), phases("one"):
        pass
    phases.settle()
    assert phases.seconds == {"one": 1 + 2 + 4, "other": 1 + 4 + 1}


def test_votes_of_a_cpu_are_read_at_once():
    votes = Votes(CPU)
    assert votes.counted(waited=True) == 0
    votes.cast(torch.tensor(3))
    assert votes.counted(waited=False) == 3 and votes.counted(waited=False) == 0
