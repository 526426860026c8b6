"""Every strategy by every engine through the trainer: equal to one process, and its checkpoints outlive N."""

import json
import threading
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from course_lib.errors import CheckpointError, ConfigError
from course_lib.lessons import parity
from course_lib.training.checkpoints import checkpoint, formats, sharded
from course_lib.training.engines import build_engine
from course_lib.training.engines.accelerate_ddp import AccelerateDDP
from course_lib.training.engines.from_scratch import ScratchGathered
from course_lib.training.engines.with_torch import TorchFSDP
from tests.forked_process import import_deepspeed
from tests.training.engines.layouts import alone, apart, goes_on, on, runs, saved

pytestmark = pytest.mark.usefixtures("two_blocks")

ONE_OF_EACH_ENGINE = [("fsdp", "torch"), ("zero3", "scratch"), ("zero1", "deepspeed")]
DEEPSPEEDS = [pair for pair in parity.PAIRS if pair[1] == "deepspeed"]
OURS_AND_TORCHS = [pair for pair in parity.PAIRS if pair[0] != "ddp" and pair not in DEEPSPEEDS]


@pytest.fixture(scope="module")
def one_process(folder):
    """The plain loop, uninterrupted, with checkpoints every third step."""
    return alone(folder / "one", save_steps=3, save_total_limit=None)


@pytest.mark.parametrize(
    ("world_size", "pairs"),
    [
        pytest.param(2, parity.PAIRS, id="two"),
        pytest.param(1, ONE_OF_EACH_ENGINE, id="one, some"),
        pytest.param(3, [("zero1", "scratch")], id="three, which do not divide the batch of eight: a larger one"),
        pytest.param(1, parity.PAIRS, id="one", marks=pytest.mark.long),
        pytest.param(4, parity.PAIRS, id="four", marks=pytest.mark.long),
    ],
)
def test_the_parity_matrix(tmp_path, world_size, pairs):
    import_deepspeed()
    cells = parity.matrix(tmp_path, (world_size,), {pair: parity.ROWS[pair] for pair in pairs}, steps=3)
    assert sorted((cell.strategy, cell.engine) for cell in cells) == sorted(pairs)
    assert [cell for cell in cells if not cell.agrees] == []


def test_without_the_exchange_the_matrix_would_notice(tmp_path, one_process):
    """Two ranks whose gradients never meet."""

    def never(engine, last):
        return engine.accelerator.no_sync(engine.wrapped)

    with mock.patch.object(AccelerateDDP, "accumulating", never):
        cell = apart(on(2, tmp_path, {"ddp": {}})["ddp"], one_process)
    assert cell.weight > 100 * parity.WEIGHT_TOLERANCE and cell.loss > 100 * parity.LOSS_TOLERANCE


def between_micro_batches(folder, kind, options):
    """Bytes of gradients that a rank keeps when a micro-batch is done and another is to come."""
    kept, backward = [], kind.backward

    def noted(engine, loss, last):
        backward(engine, loss, last)
        if not last:
            kept.append(sum(shard.nbytes for shard in engine.wrapped.resident()["gradients"]))

    with mock.patch.object(kind, "backward", noted):
        runs(folder, {"x": options}, max_steps=1)
    return max(kept)


@pytest.mark.parametrize(
    ("kind", "pair"),
    [
        (TorchFSDP, ("fsdp", "torch")),
        (TorchFSDP, ("zero2", "torch")),
        (ScratchGathered, ("fsdp", "scratch")),
        (ScratchGathered, ("zero3", "scratch")),
    ],
)
def test_what_shards_gradients_keeps_no_whole_ones_between_micro_batches(tmp_path, ranks, kind, pair):
    """A plan counts a share of them, and smaller micro-batches are what one takes to save memory."""
    as_trained = ranks(2)(between_micro_batches, tmp_path, kind, parity.ROWS[pair])[0]
    with mock.patch.object(kind, "accumulating", lambda engine, last: engine.wrapped.no_sync()):
        with_the_last_alone = ranks(2)(between_micro_batches, tmp_path, kind, parity.ROWS[pair])[0]
    assert with_the_last_alone == pytest.approx(2 * as_trained, rel=0.03) != 0


@pytest.mark.parametrize(
    ("pairs", "others"),
    [
        pytest.param(ONE_OF_EACH_ENGINE[:2], (4,), id="some"),
        pytest.param(OURS_AND_TORCHS, (1, 4), id="torch and scratch", marks=pytest.mark.long),
        pytest.param(DEEPSPEEDS, (1, 4), id="deepspeed", marks=pytest.mark.long),
    ],
)
def test_saved_by_two_ranks_resumed_by_one_and_by_four(tmp_path, pairs, others):
    import_deepspeed()
    cases = {"-".join(pair): parity.ROWS[pair] for pair in pairs}
    wanted = alone(tmp_path / "one", max_steps=5)
    on(2, tmp_path, cases, save_steps=3, save_total_limit=None, max_steps=5)
    for name, options in cases.items():
        cases[name] = options | {"resume_from_checkpoint": saved(tmp_path, name, 3)}
    for ranks in others:
        for found in on(ranks, tmp_path / str(ranks), cases, max_steps=5).values():
            goes_on(found, wanted, 3)


def test_a_run_goes_on_with_another_strategy_and_engine(folder, tmp_path, one_process):
    """Whole to shards, shards to other shards, shards to whole."""
    path = [("zero1", "torch", 2), ("zero3", "deepspeed", 2), ("fsdp", "scratch", 4), ("zero2", "scratch", 2)]
    last = saved(folder, "one", 3)
    for step, (strategy, engine, ranks) in enumerate(path, start=3):
        case = {str(step): parity.ROWS[strategy, engine] | {"resume_from_checkpoint": last}}
        found = on(ranks, tmp_path, case, save_steps=1, save_total_limit=None)[str(step)]
        goes_on(found, one_process, step)
        last = saved(tmp_path, str(step), step + 1)
    goes_on(alone(tmp_path / "basic", resume_from_checkpoint=last), one_process, 7)


def slow_saves(folder, async_save):
    """Train; a save in the background waits until training has taken the next step, which no save in the step could.

    Gives the losses, and the steps at which a checkpoint stood, as training saw it after each step.
    """
    real, went_on, seen = sharded.save, threading.Event(), []

    def slow(shards, where, *args, **kwargs):
        if async_save and "000004" in str(where):
            assert went_on.wait(320), "training waits for the save"
        real(shards, where, *args, **kwargs)

    def look(callback, trainer):
        seen.append([int(path.name[-6:]) for path in checkpoint.in_order(folder)])
        if trainer.state.step == 5:
            went_on.set()

    config = parity.task(folder, 2, strategy="fsdp", engine="torch", save_steps=4, async_save=async_save)
    with mock.patch.object(sharded, "save", slow), mock.patch.object(parity._Keep, "on_step_end", look):
        return parity.trace(config).losses, seen


def test_asynchronous_saving_overlaps_training_and_stores_the_same(tmp_path, ranks):
    (blocking, stood), (losses, stood_later) = (
        ranks(2)(slow_saves, tmp_path / str(mode), mode)[0] for mode in (False, True)
    )
    assert losses == blocking
    assert stood[4] == [4], "a blocking save stands before the next step"
    assert stood_later[4] == [], "training went on before the save was done"
    stored, stored_later = (
        {step: sharded.whole(tmp_path / mode / checkpoint.name(step), "") for step in (4, 8)}
        for mode in ("False", "True")
    )
    assert_close(stored_later, stored, rtol=0, atol=0)
    weight = "model/transformer.wte.weight"
    assert not torch.equal(stored[4][weight], stored[8][weight])
    assert not list((tmp_path / "True").glob("*.writing"))


def test_a_checkpoint_of_another_model_is_refused(folder, tmp_path, one_process):
    other = {"strategy": "zero1", "model": "tiny-llama", "resume_from_checkpoint": saved(folder, "one", 3)}
    with pytest.raises(CheckpointError, match="saved with model tiny-gpt2, and this run has tiny-llama: give --model"):
        on(1, tmp_path, {"x": other})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strategy": "fsdp", "engine": "accelerate"}, "FSDP plugin does not know CPU processes.*--engine torch"),
        ({"strategy": "zero2", "offload": "optimizer"}, "off a GPU, and this run is on the CPU: use --offload none"),
        ({"strategy": "fsdp", "engine": "torch", "offload": "parameters"}, "off a GPU, and this run is on the CPU"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_with_the_reason(tmp_path, options, told):
    with pytest.raises(ConfigError, match=told):
        build_engine(parity.task(tmp_path, 1, **options))


def test_a_checkpoint_in_pieces_holds_no_pickle(tmp_path):
    on(2, tmp_path, {"x": parity.ROWS["fsdp", "torch"]}, max_steps=1, save_steps=1)
    folder = tmp_path / "x" / checkpoint.name(1)
    assert formats.is_sharded(folder)
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".safetensors", ".json", ".yaml"}
    assert json.loads((folder / "state.json").read_text())["engine"] == "torch"
    sizes = sharded.sizes(folder, "optimizer/")
    assert {name.rsplit("/", 1)[1] for name in sizes} == {"exp_avg", "exp_avg_sq", "step"}
