"""What lesson 02 claims, measured anew: drift, the ring's bytes, buckets that leave early, compression, torch's DDP."""

import datetime
import html
import re
from statistics import median

import nbformat
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from course_lib.errors import ModelError
from course_lib.launching.launch import RankError, launch
from course_lib.lessons.notebook import recorded
from course_lib.parallel.ddp import DataParallel
from tests.notebooks.conftest import NOTEBOOKS, says


@pytest.fixture(scope="module")
def lesson(run_lesson):
    return run_lesson("02_data_parallel", device="auto", world_size=2, steps=8, repeats=3)


def test_without_a_word_the_ranks_drift_apart(lesson):
    assert lesson["spread_broadcast_only"] > 0.01
    assert lesson["spread_both"] == 0
    assert lesson["spread_mean_only"] > 0.1 and lesson["spread_nothing"] > lesson["spread_broadcast_only"]


def test_the_ring(lesson):
    halves = lesson["sums_after_reduce_scatter"]
    assert all((value == 1111) == (rank == part) for rank, row in enumerate(halves) for part, value in enumerate(row))
    assert lesson["sums_after_all_gather"] == [[1111] * 4] * 4
    for n in (2, 3, 4):
        assert lesson[f"ring_{n}"] == pytest.approx(2 * (n - 1) / n, rel=1e-5)
        assert lesson[f"naive_{n}"] == n - 1


def test_the_bytes_on_the_wire_are_the_rings(lesson):
    by_way = lesson["wire_total_in_sizes"]
    assert set(by_way) == {"naive", "ring", "torch"}
    for totals in by_way.values():  # without a private network all are None
        assert totals == [None] * 3 or totals == pytest.approx([2, 4, 6], rel=0.05)


def test_buckets_over_a_slow_link(lesson):
    """Who wins is measured, and said; tests/lessons/data_parallel/test_buckets.py has it in virtual time."""
    messages, tries = lesson["messages_over_the_link"], lesson["tries_over_the_link"]
    assert messages["one bucket"] == 1 < messages["buckets of half a MiB"] < messages["one per parameter"] == 12 * 4 + 4
    assert [len(seconds) for seconds in tries.values()] == [3] * 3
    assert lesson["gain_over_the_link"] == median(tries["one bucket"]) / median(tries["buckets of half a MiB"])
    assert says(lesson, f"one bucket takes {lesson['gain_over_the_link']:.2f} times as long as buckets of half a MiB")
    assert lesson["most_buckets_7b"] == pytest.approx((0.8 - 2 * 63 / 64 * 14e9 / 50e9) / 1e-3)


def test_buckets_leave_early_in_reverse_order_only(lesson):
    missing = lesson["gradients_missing_at_first_send"]
    assert missing["reverse order"] > 0 and missing["one per parameter"] > 0
    assert missing["forward order"] == missing["one bucket"] == 0
    hidden = lesson["hidden_share_of_time"]
    assert hidden["forward order"] == hidden["one bucket"] == 0 < hidden["reverse order"] <= 1, (
        "not how much: what is begun before the backward ends has a part within it"
    )


def words_of(executed):
    """The takeaways of an executed notebook."""
    cells = nbformat.read(executed, as_version=4).cells
    return [
        re.sub(r"<[^>]+>", "", html.unescape(output["data"]["text/html"]))
        for cell in cells
        for output in cell.get("outputs", [])
        if "<b>Takeaway.</b>" in output.get("data", {}).get("text/html", "")
    ]


def test_the_first_takeaway_gives_each_way_its_own_number():
    """Leaving out either, and leaving out both, are three numbers; the stored page has them under their own words."""
    path = NOTEBOOKS / "02_data_parallel.ipynb"
    values, first = recorded(path), words_of(path)[0]
    for words, name in (
        (r"Without the mean they drift (\S+) apart", "spread_broadcast_only"),
        (r"without the broadcast they stay (\S+) apart", "spread_mean_only"),
        (r"without both it is (\S+)\.$", "spread_nothing"),
    ):
        assert float(re.search(words, first).group(1)) == pytest.approx(values[name], abs=0.005)


def test_the_class_of_the_page_trains_in_as_many_messages_as_buckets(lesson):
    buckets = lesson["tiny_buckets"]
    assert buckets["one bucket"] == 1 < buckets["buckets of half a MiB"] < buckets["one by one"]


@pytest.fixture(scope="module")
def page():
    """The names that the page's own cells define, without running the rest of the lesson."""
    cells = nbformat.read(NOTEBOOKS / "02_data_parallel.ipynb", as_version=4).cells
    names = {"torch": torch, "dist": dist}
    for first_line in ("def broadcast_model(", "class TinyDDP:", "def exchange("):
        exec(next(cell.source for cell in cells if cell.source.startswith(first_line)), names)
    return names


def ring_of_the_page(reduce_scatter, all_gather):
    """This rank's numbers after each half, by the page's functions, and what torch's all-reduce makes of them."""
    state = Accelerator()
    ours = torch.arange(12.0) * 10**state.process_index
    torchs, halves = ours.clone(), []
    dist.all_reduce(torchs)
    for half in (reduce_scatter, all_gather):
        half(ours.tensor_split(state.num_processes))
        halves.append(ours.tolist())
    return halves, torchs.tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ring_of_the_page_sums_as_torchs(page, ranks):
    for rank, ((half, whole), torchs) in enumerate(
        launch(
            ring_of_the_page, page["reduce_scatter"], page["all_gather"], num_processes=ranks, device="cpu", timeout=240
        )
    ):
        own = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
        assert half[own] == torchs[own] and half != torchs, "without the all-gather a rank has its own part alone"
        assert whole == torchs


def tiny_against_torch(tiny, bucket_bytes):
    """Largest difference of a gradient, TinyDDP against torch's DDP, over two steps, and with the wait left out."""
    state = Accelerator()
    torch.manual_seed(state.process_index)
    models = [
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(2)
    ]
    ours, theirs = tiny(models[0], bucket_bytes, reversed), DistributedDataParallel(models[1])
    models[1].load_state_dict(models[0].state_dict())
    differences, unfinished = [], 0.0
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + state.process_index))
        models[0](x).square().mean().backward()
        theirs(x).square().mean().backward()
        pairs = list(zip(models[0].parameters(), models[1].parameters(), strict=True))
        unfinished = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)
        ours.finish()
        differences.append(max(float((a.grad - b.grad).abs().max()) for a, b in pairs))
        for model in models:
            model.zero_grad()
    return differences, unfinished


@pytest.mark.parametrize("bucket_bytes", [1, 600, 2**40])
def test_the_class_of_the_page_gives_torchs_gradients(page, bucket_bytes):
    for differences, unfinished in launch(tiny_against_torch, page["TinyDDP"], bucket_bytes, device="cpu", timeout=240):
        assert unfinished > 1e-3, "before finish() a rank has its own gradient"
        assert max(differences) < 1e-7


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


def leave_a_layer_unused():
    Accelerator()
    engine = DistributedDataParallel(nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)]))
    engine.module.forward = lambda x: engine.module[0](x)
    for _ in range(2):
        engine(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("provoke", [skip_a_backward, leave_a_layer_unused])
def test_the_errors_it_quotes_are_real(provoke):
    with pytest.raises(RankError) as caught:
        launch(provoke, device="cpu", timeout=240)
    cause = caught.value.cause
    quoted = f"{type(cause).__name__}: {str(cause).partition(' (')[0].partition('. ')[0]}"
    cells = nbformat.read(NOTEBOOKS / "02_data_parallel.ipynb", as_version=4).cells
    assert quoted in " ".join(" ".join(cell.source for cell in cells if cell.cell_type == "markdown").split())


def other_shape_on_rank_1():
    DataParallel(nn.Linear(8, 3 + Accelerator().process_index))


def test_models_that_differ_are_named_before_anything_is_sent():
    with pytest.raises(ModelError, match="rank 1's model is not rank 0's: `weight` is parameter \\(4, 8\\)"):
        launch(other_shape_on_rank_1, device="cpu", timeout=240)
