"""What lesson 02 claims, measured anew: drift, the ring's bytes, buckets that leave early, compression, torch's DDP."""

import datetime
import re
from statistics import median

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from course_lib.launching.launch import RankError, launch
from course_lib.parallel.ddp import DataParallel
from tests.notebooks.conftest import assert_quoted, defined, says, stored
from tests.ranks import on_ranks

PARAMETERS = {"device": "auto", "world_size": 2, "steps": 8, "repeats": 3}


def test_without_a_word_the_ranks_drift_apart(lesson):
    assert lesson["spread_both"] == 0 < 0.01 < lesson["spread_broadcast_only"] < lesson["spread_nothing"]
    assert lesson["spread_mean_only"] > 0.1


def test_the_ring(lesson):
    halves = lesson["sums_after_reduce_scatter"]
    assert all((value == 1111) == (rank == part) for rank, row in enumerate(halves) for part, value in enumerate(row))
    assert lesson["sums_after_all_gather"] == [[1111] * 4] * 4
    for n in (2, 3, 4):
        assert lesson[f"ring_{n}"] == pytest.approx(2 * (n - 1) / n, rel=1e-5)
        assert lesson[f"naive_{n}"] == n - 1


def test_the_bytes_on_the_wire_are_the_rings(lesson):
    for totals in lesson["wire_total_in_sizes"].values():  # without a private network all are None
        assert totals == [None] * 3 or totals == pytest.approx([2, 4, 6], rel=0.05)


def test_buckets_over_a_slow_link(lesson):
    """Who wins is measured, and said; tests/lessons/data_parallel/test_buckets.py has it in virtual time."""
    messages, tries = lesson["messages_over_the_link"], lesson["tries_over_the_link"]
    assert messages["one bucket"] == 1 < messages["buckets of half a MiB"] < messages["one per parameter"] == 12 * 4 + 4
    assert lesson["gain_over_the_link"] == median(tries["one bucket"]) / median(tries["buckets of half a MiB"])
    assert says(lesson, f"one bucket takes {lesson['gain_over_the_link']:.2f} times as long as buckets of half a MiB")
    assert lesson["most_buckets_7b"] == pytest.approx((0.8 - 2 * 63 / 64 * 14e9 / 50e9) / 1e-3)
    buckets = lesson["tiny_buckets"]
    assert buckets["one bucket"] == 1 < buckets["buckets of half a MiB"] < buckets["one by one"]


def test_buckets_leave_early_in_reverse_order_only(lesson):
    missing = lesson["gradients_missing_at_first_send"]
    assert missing["reverse order"] > 0 and missing["one per parameter"] > 0
    assert missing["forward order"] == missing["one bucket"] == 0
    hidden = lesson["hidden_share_of_time"]
    assert hidden["forward order"] == hidden["one bucket"] == 0 < hidden["reverse order"] <= 1  # not how much


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (r"Without the mean they drift (\S+) apart", "spread_broadcast_only"),
        (r"without the broadcast they stay (\S+) apart", "spread_mean_only"),
        (r"without both it is (\S+)\.$", "spread_nothing"),
    ],
)
def test_the_first_takeaway_gives_each_way_its_own_number(words, name):
    values = stored("02_data_parallel")
    assert float(re.search(words, values["takeaways"][0]).group(1)) == pytest.approx(values[name], abs=0.005)


@pytest.fixture(scope="module")
def page():
    return defined(
        "02_data_parallel", "def broadcast_model(", "class TinyDDP:", "def exchange(", torch=torch, dist=dist
    )


@on_ranks(2, 3)
def test_the_ring_of_the_page_sums_as_torchs(page):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ours = torch.arange(12.0) * 10**rank
    torchs = ours.clone()
    dist.all_reduce(torchs)
    page["reduce_scatter"](ours.tensor_split(ranks))
    own = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
    torch.testing.assert_close(ours[own], torchs[own], rtol=0, atol=0)
    assert not ours.equal(torchs), "without the all-gather a rank has its own part alone"
    page["all_gather"](ours.tensor_split(ranks))
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0)


@pytest.mark.parametrize("bucket_bytes", [1, 600, 2**40])
@on_ranks(2)
def test_the_class_of_the_page_gives_torchs_gradients(page, bucket_bytes):
    torch.manual_seed(dist.get_rank())
    models = [
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(2)
    ]
    ours, theirs = page["TinyDDP"](models[0], bucket_bytes, reversed), DistributedDataParallel(models[1])
    models[1].load_state_dict(models[0].state_dict())
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        models[0](x).square().mean().backward()
        theirs(x).square().mean().backward()
        mine, torchs = ([parameter.grad for parameter in model.parameters()] for model in models)
        with pytest.raises(AssertionError):  # before finish() a rank has its own gradient
            torch.testing.assert_close(mine, torchs, rtol=0, atol=1e-3)
        ours.finish()
        torch.testing.assert_close(mine, torchs, rtol=0, atol=1e-7)
        for model in models:
            model.zero_grad()


def test_saying_less(lesson):
    size = lesson["gradient_megabytes"]  # on two ranks a ring sends it once
    assert lesson["megabytes_each"] == pytest.approx(4 * size)
    assert lesson["megabytes_no_sync"] == pytest.approx(size)
    assert lesson["megabytes_bf16"] == pytest.approx(size / 2)


def test_beside_torch(lesson):
    assert lesson["megabytes_ours"] == lesson["megabytes_torch"] == pytest.approx(lesson["gradient_megabytes"])
    wire = lesson["wire_megabytes_all_ranks"]
    if not isinstance(wire["ours"], str):  # the reason, where there is no private network
        assert wire["ours"] == pytest.approx(wire["torch"], rel=0.05)
        assert wire["bf16"] == pytest.approx(wire["ours"] / 2, rel=0.05)
    assert lesson["speed_against_torch"] > 0


def test_7b_on_64_gpus_is_the_papers_row(lesson):
    assert lesson["gigabytes_held_7b"] == 120
    assert lesson["gigabytes_sent_7b"] == pytest.approx(2 * 63 / 64 * 15)
    assert lesson["gigabytes_sent_7b_on_1024"] < 1.02 * lesson["gigabytes_sent_7b"]


def skip_a_backward():
    state = Accelerator()
    engine = DataParallel(nn.Linear(8, 3))
    _set_pg_timeout(datetime.timedelta(seconds=3), dist.group.WORLD)  # for the backward alone
    if state.process_index == 0:
        engine(torch.ones(2, 8)).sum().backward()


def test_the_error_it_quotes_is_real():
    with pytest.raises(RankError) as caught:
        launch(skip_a_backward, device="cpu", timeout=240)
    assert_quoted("02_data_parallel", f"{type(caught.value.cause).__name__}: {caught.value.cause}")
