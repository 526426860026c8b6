"""What lesson 06 claims, measured anew: peaks, waits, bytes, broken engines, dtypes, engines that agree, pieces."""

import functools

import nbformat
import pytest
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard

from course_lib.launching.launch import launch
from course_lib.lessons import fsdp_lab as lab
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.torch_engines.fsdp import shard_with_torch
from tests.notebooks.conftest import NOTEBOOKS, says

pytestmark = pytest.mark.timeout(300)

LAYERS, WIDTH = 4, 64


@pytest.fixture(scope="module")
def lesson(run_lesson):
    return run_lesson("06_fsdp", device="auto", world_size=2, layers=LAYERS, width=WIDTH, steps=6, micro_batches=8)


@pytest.fixture(scope="module")
def megabytes():
    return {name: size / 1e6 for name, size in vars(lab.sizes(lab.small_gpt2(LAYERS, WIDTH))).items()}


def test_what_is_there_and_when(lesson, megabytes):
    root, block = megabytes["root"], megabytes["block"]
    half = (root + LAYERS * block) / 2
    assert lesson["at_rest"] == pytest.approx(half, rel=1e-3)
    peaks = [lesson[f"peak_{way}"] for way in ("no_prefetch", "prefetch", "no_reshard")]
    assert peaks == pytest.approx([half + root + blocks * block for blocks in (1, 2, LAYERS)], rel=1e-3)
    assert lesson["prefetch_costs_blocks"] == 1 and lesson["same_losses_three_ways"]


def test_it_says_how_many_gathers_were_waited_for(lesson):
    """tests/lessons/test_slow_link.py counts them in virtual time; here a gather may be late, or a block slow."""
    assert {name: sorted(waits)[2] for name, waits in lesson["waits_of_all_steps"].items()} == {
        "without prefetch": lesson["waits_no_prefetch"], "with prefetch": lesson["waits_prefetch"]}
    assert 0 < lesson["waits_no_prefetch"] <= 2 * LAYERS + 1 and 0 < lesson["waits_prefetch"] <= 2 * LAYERS + 1
    assert says(lesson, "block of memory and took the waits from ")


def test_what_moves(lesson):
    assert lesson["sent_prefetch"] / lesson["sent_ddp"] == pytest.approx(1.5, rel=0.05)
    assert lesson["sent_prefetch"] < 1.5 * lesson["sent_ddp"], "the root is gathered once"
    assert lesson["sent_fsdp_and_root"] == pytest.approx(1, rel=1e-3)
    assert lesson["sent_no_reshard"] == pytest.approx(lesson["sent_ddp"], rel=1e-3)
    assert (lesson["gathers_fsdp"], lesson["reduce_scatters_fsdp"]) == (2 * LAYERS + 1, LAYERS + 1)


def test_the_broken_engines(lesson):
    assert lesson["first_step_that_differs"] == 2
    assert lesson["right_differs_by"] < 5e-6 < 1e-2 < lesson["broken_differs_by"]
    assert lesson["broken_loss_fell_by"] > 0.1, "it looks as if it trained"
    assert lesson["losses_when_freed_too_early"] == ["nan", "nan"]


def test_two_dtypes_and_two_bills(lesson, megabytes):
    assert lesson["gathered_in_bf16"] == lesson["reduced_with_bf16_sums"] == 0.5
    assert lesson["reduced_with_fp32_sums"] == 1
    in_flight = lesson["peak_prefetch"] - lesson["at_rest"]
    assert lesson["peak_in_bf16"] == pytest.approx(lesson["at_rest"] + in_flight / 2, rel=1e-3)
    assert 2**-11 < lesson["rounding_error"] < 2**-8
    assert lesson["rounding_error_summed"] > 1.2 * lesson["rounding_error"]
    assert lesson["activations_checkpointed"] < lesson["activations_plain"] / 4
    assert lesson["parameters_checkpointed"] == lesson["peak_prefetch"]
    assert lesson["checkpointing_changes_losses_by"] < 1e-6


def test_the_engines_agree(lesson):
    assert lesson["engines_differ_by"] < 5e-6 and lesson["same_collectives"]
    assert lesson["peak_torch"] == pytest.approx(lesson["peak_no_prefetch"], rel=1e-3)
    assert lesson["buffers_torch_more_by"] == pytest.approx(1, abs=0.05)
    assert lesson["parameters_missing_on_a_rank_when_flat"] == 11
    assert lesson["at_rest_hsdp_2x2"] == pytest.approx(2 * lesson["at_rest_fsdp_on_4"], rel=1e-3)
    assert lesson["hsdp_differs_by"] < 5e-6


def test_the_checkpoint(lesson):
    assert lesson["loss_before_reading"] - lesson["loss_after_reading"] > 0.1
    assert lesson["loss_after_reading"] == pytest.approx(lesson["loss_saved"], abs=5e-6)


def test_the_papers_row(lesson):
    states, published = lesson["states_7.5B"], lesson["states_7.5B_published"]
    assert len(states) == 4 and states == pytest.approx(published, abs=0.006)
    assert states["256"] < lesson["in_flight_7.5B"] < states["64"]


def errors():
    """The messages that the lesson quotes, and the losses of an optimizer made before ``fully_shard``."""
    build = functools.partial(lab.small_gpt2, 2, 32)
    Accelerator()
    told = []
    model = build()
    engine = FullyShardedDataParallel(model, torch.optim.AdamW(model.parameters()))
    sharded = build()
    shard_with_torch(sharded, torch.optim.AdamW(sharded.parameters()))
    other = build()
    for attempt in (engine.state_dict, lambda: sharded.get_input_embeddings()(torch.zeros(1, 4, dtype=torch.long)),
                    lambda: FullyShardedDataParallel(other, torch.optim.Adafactor(other.parameters()))):
        try:
            attempt()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    stale = torch.optim.AdamW(other.parameters(), lr=0.1)
    for module in (*other.transformer.h, other):
        fully_shard(module)
    losses = []
    for _ in range(2):
        loss = lab.batch_loss(other, 0)
        loss.backward()
        stale.step()
        stale.zero_grad()
        losses.append(loss.item())
    return told, losses


def test_what_goes_wrong_says_what_the_lesson_says():
    told, losses = launch(errors, timeout=60, device="cpu")[0]
    assert len(told) == 3 and losses[0] == losses[1]
    cells = nbformat.read(NOTEBOOKS / "06_fsdp.ipynb", as_version=4).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    headings = [part.strip("`.") for part in prose.split("**") if "Error: " in part]
    assert len(headings) == 3
    for message, heading in zip(told, headings, strict=True):
        assert message.startswith(heading)
