"""Every strategy by every engine through the trainer: equal to one process, and its checkpoints outlive N."""

import json
from collections import Counter

import pytest
import torch

from course_lib.errors import CheckpointError, ConfigError
from course_lib.launching.launch import launch
from course_lib.lessons import parity
from course_lib.training.checkpoints import checkpoint, formats, sharded
from tests.forked_process import import_deepspeed
from tests.fresh_accelerator import forget_accelerator

pytestmark = pytest.mark.usefixtures("two_blocks")

SHARDING = [pair for pair in parity.PAIRS if pair[0] != "ddp"]
DEEPSPEEDS = [pair for pair in SHARDING if pair[1] == "deepspeed"]
OURS_AND_TORCHS = [pair for pair in SHARDING if pair not in DEEPSPEEDS]


def rows_of(pairs):
    return {pair: parity.ROWS[pair] for pair in pairs}


def name_of(pair):
    return "-".join(pair)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The plain loop, uninterrupted, with checkpoints every third step."""
    folder = tmp_path_factory.mktemp("one")
    config = parity.task(folder, 1, training_type="basic", save_steps=3, save_total_limit=None)
    return folder, parity.trace(config)


ONE_OF_EACH_ENGINE = [("fsdp", "torch"), ("zero3", "scratch"), ("zero1", "deepspeed")]


@pytest.mark.parametrize("world_size", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 4))])
def test_the_parity_matrix(tmp_path, world_size):
    import_deepspeed()
    cells = parity.matrix(tmp_path, (world_size,), rows_of(parity.PAIRS), steps=3)
    assert Counter(cell.engine for cell in cells) == {"torch": 5, "scratch": 5, "deepspeed": 3}
    assert [cell for cell in cells if not cell.agrees] == []


def test_one_rank_is_the_same_code(tmp_path, monkeypatch):
    """One strategy of each engine; `make long` has all thirteen on one rank."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    cells = parity.matrix(tmp_path, (1,), rows_of(ONE_OF_EACH_ENGINE), steps=3)
    assert len(cells) == 3 and [cell for cell in cells if not cell.agrees] == []


def test_three_ranks_train_on_the_rows_of_one_process(tmp_path):
    """Three do not divide the global batch of eight: both take a larger one."""
    cells = parity.matrix(tmp_path, (3,), rows_of([("zero1", "scratch")]), steps=3)
    assert len(cells) == 1 and cells[0].agrees


def apart(folder):
    """Two ranks whose gradients never meet."""
    from course_lib.training.engines.accelerate_ddp import AccelerateDDP

    AccelerateDDP.accumulating = lambda self, last: self.accelerator.no_sync(self.wrapped)
    found = parity.trace(parity.task(folder, 2))
    return found


def test_without_the_exchange_the_matrix_would_notice(tmp_path, one_process):
    found = launch(apart, tmp_path, num_processes=2, timeout=400)[0]
    cell = parity.compare(found, one_process[1], "ddp", "none", 2)
    assert not cell.agrees and cell.weight > 100 * parity.WEIGHT_TOLERANCE and cell.loss > 100 * parity.LOSS_TOLERANCE


def between_micro_batches(folder, pairs):
    """Bytes of gradients that a rank keeps when a micro-batch is done and another is to come, by pair: as trained, and
    where gradients travel with the last alone."""
    from course_lib.training.engines.from_scratch import Scratch, ScratchGathered
    from course_lib.training.engines.with_torch import TorchFSDP

    kept = {}
    for kind in (Scratch, TorchFSDP):

        def backward(self, loss, last, original=kind.backward):
            original(self, loss, last)
            if not last:
                held.append(sum(shard.numel() * shard.element_size() for shard in self.wrapped.resident()["gradients"]))

        kind.backward = backward
    for way in ("as trained", "with the last alone"):
        if way == "with the last alone":
            ScratchGathered.accumulating = TorchFSDP.accumulating = lambda self, last: self.wrapped.no_sync()
        for pair in pairs:
            forget_accelerator()
            held = []
            parity.trace(parity.task(folder / way / name_of(pair), 2, strategy=pair[0], engine=pair[1], max_steps=1))
            kept[way, pair] = max(held)
    return kept


def test_what_shards_gradients_keeps_no_whole_ones_between_micro_batches(tmp_path):
    """A plan counts a share of them, and smaller micro-batches are what one takes to save memory."""
    pairs = [("fsdp", "torch"), ("zero2", "torch"), ("fsdp", "scratch"), ("zero3", "scratch")]
    kept = launch(between_micro_batches, tmp_path, pairs, num_processes=2, timeout=400)[0]
    for pair in pairs:
        assert kept["with the last alone", pair] == pytest.approx(2 * kept["as trained", pair], rel=0.03) != 0, pair


def run_pairs(folder, world_size, pairs, **options):
    """Several pairs in the same ranks; gives each one's losses."""
    found = {}
    for pair in pairs:
        forget_accelerator()
        own = {key: value(pair) if callable(value) else value for key, value in options.items()}
        config = parity.task(folder / name_of(pair), world_size, strategy=pair[0], engine=pair[1], **own)
        found[pair] = parity.trace(config).losses
    return found


def saved_then_resumed(tmp_path, pairs, steps, others):
    first, again = tmp_path / "first", tmp_path / "again"
    launch(
        run_pairs, first, 2, pairs, save_steps=3, save_total_limit=None, max_steps=steps, num_processes=2, timeout=800
    )
    found = {}
    for ranks in others:
        for pair, losses in launch(
            run_pairs,
            again / str(ranks),
            ranks,
            pairs,
            num_processes=ranks,
            timeout=800,
            max_steps=steps,
            resume_from_checkpoint=Resume(first),
        )[0].items():
            found[pair, ranks] = losses
    return found


class Resume:
    """The pair's own checkpoint of step 3."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, pair):
        return str(self.folder / name_of(pair) / checkpoint.name(3))


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
    wanted = parity.trace(parity.task(tmp_path / "one", 1, training_type="basic", max_steps=5))
    found = saved_then_resumed(tmp_path, pairs, steps=5, others=others)
    assert len(found) == len(others) * len(pairs) and len(SHARDING) == 11
    for losses in found.values():
        assert losses == pytest.approx(wanted.losses[3:], abs=parity.LOSS_TOLERANCE) and len(losses) == 2


def test_a_run_goes_on_with_another_strategy_and_engine(tmp_path, one_process):
    """Whole to shards, shards to other shards, shards to whole."""
    folder, wanted = one_process
    path = [("zero1", "torch", 2), ("zero3", "deepspeed", 2), ("fsdp", "scratch", 4), ("zero2", "scratch", 2)]
    last = folder / checkpoint.name(3)
    for i, (strategy, engine, ranks) in enumerate(path):
        losses = launch(
            run_pairs,
            tmp_path / str(i),
            ranks,
            [(strategy, engine)],
            num_processes=ranks,
            timeout=400,
            resume_from_checkpoint=str(last),
            save_steps=1,
            save_total_limit=None,
        )[0]
        assert losses[strategy, engine] == pytest.approx(wanted.losses[3 + i :], abs=parity.LOSS_TOLERANCE)
        last = tmp_path / str(i) / f"{strategy}-{engine}" / checkpoint.name(4 + i)
    config = parity.task(tmp_path / "basic", 1, training_type="basic", resume_from_checkpoint=str(last))
    found = parity.trace(config)
    assert found.losses == pytest.approx(wanted.losses[7:], abs=parity.LOSS_TOLERANCE)
    largest = max((found.weights[name] - wanted.weights[name]).abs().max() for name in wanted.weights)
    assert largest <= parity.WEIGHT_TOLERANCE


def slow_saves(folder, async_save):
    """Train; a save in the background waits until training has taken the next step, which no save in the step could.

    Gives the steps at which a checkpoint stood, as training saw it.
    """
    import threading

    from course_lib.training.callbacks import Callback

    real, went_on = sharded.save, threading.Event()

    def slow(shards, where, *args, **kwargs):
        if async_save and "000004" in str(where):
            assert went_on.wait(320), "training waits for the save"
        real(shards, where, *args, **kwargs)

    sharded.save = slow
    seen = []

    class Look(Callback):
        def on_step_end(self, trainer):
            seen.append([int(path.name[-6:]) for path in checkpoint.in_order(folder)])
            if trainer.state.step == 5:
                went_on.set()

    parity._Keep.on_step_end = Look.on_step_end
    config = parity.task(folder, 2, strategy="fsdp", engine="torch", save_steps=4, async_save=async_save)
    return parity.trace(config).losses, seen


def test_asynchronous_saving_overlaps_training_and_stores_the_same(tmp_path, one_process):
    runs = {
        mode: launch(slow_saves, tmp_path / str(mode), mode, num_processes=2, timeout=400)[0] for mode in (False, True)
    }
    assert runs[True][0] == runs[False][0]
    assert runs[False][1][4] == [4], "a blocking save stands before the next step"
    assert runs[True][1][4] == [], "training went on before the save was done"
    stored_by = [
        {name: sharded.whole(tmp_path / str(mode) / checkpoint.name(step), "") for step in (4, 8) for name in [step]}
        for mode in (False, True)
    ]
    assert len(stored_by[0][4]) == len(stored_by[0][8]) > 40
    for step in (4, 8):
        assert stored_by[0][step].keys() == stored_by[1][step].keys()
        assert all(torch.equal(stored_by[0][step][name], stored_by[1][step][name]) for name in stored_by[0][step])
    assert not torch.equal(
        stored_by[0][4]["model/transformer.wte.weight"], stored_by[0][8]["model/transformer.wte.weight"]
    )
    assert not [path for path in (tmp_path / "True").iterdir() if path.name.endswith(".writing")]


def test_a_checkpoint_of_another_model_is_refused(tmp_path, one_process):
    with pytest.raises(CheckpointError, match="saved with model tiny-gpt2, and this run has tiny-llama: give --model"):
        launch(
            run_pairs,
            tmp_path,
            1,
            [("zero1", "torch")],
            num_processes=1,
            timeout=240,
            model="tiny-llama",
            resume_from_checkpoint=str(one_process[0] / checkpoint.name(3)),
        )


def refusals(folder):
    """What only the machine can say no to."""
    from course_lib.training.engines import build_engine

    said = []
    for options in (
        {"strategy": "fsdp", "engine": "accelerate"},
        {"strategy": "zero2", "offload": "optimizer"},
        {"strategy": "fsdp", "engine": "torch", "offload": "parameters"},
    ):
        with pytest.raises(ConfigError) as error:
            build_engine(parity.task(folder, 1, **options))
        said.append(str(error.value))
    return said


def test_what_this_machine_cannot_do_is_refused_with_the_reason(tmp_path):
    plugin, optimizer, parameters = refusals(tmp_path)
    assert "Accelerate's FSDP plugin does not know CPU processes" in plugin and "--engine torch" in plugin
    assert optimizer == parameters == "offload moves state off a GPU, and this run is on the CPU: use --offload none"


def test_a_checkpoint_in_pieces_holds_no_pickle(tmp_path):
    launch(run_pairs, tmp_path, 2, [("fsdp", "torch")], num_processes=2, timeout=400, max_steps=1, save_steps=1)
    folder = tmp_path / "fsdp-torch" / checkpoint.name(1)
    assert formats.is_sharded(folder)
    files = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert files == {".safetensors", ".json", ".yaml"}
    sizes = sharded.sizes(folder, "optimizer/")
    assert json.loads((folder / "state.json").read_text())["engine"] == "torch"
    assert {name.rsplit("/", 1)[1] for name in sizes} == {"exp_avg", "exp_avg_sq", "step"}
