"""Going on from a checkpoint is as if nothing had happened: state equal to the bit, the same rows, each once."""

import json
import os
import random
import shutil
import signal
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_lib.config import build
from course_lib.errors import CheckpointError, ConfigError, TrainingInterrupted
from course_lib.launching.launch import RankError
from course_lib.parallel.sharding import Shard
from course_lib.system.seeding import rng_state
from course_lib.training.callbacks import Callback
from course_lib.training.checkpoints import async_save, checkpoint, manifest, resuming, run_folder, sharded
from course_lib.training.checkpoints import safetensors_tree as trees
from course_lib.training.checkpoints.sharded_state import ShardedState
from course_lib.training.state import TrainState
from tests.fresh_accelerator import forget_accelerator
from tests.narrow_presets import narrowed
from tests.ranks import on_ranks
from tests.training import quick

# 22 rows in global batches of 4: six steps per epoch, the last with two rows.
BASE = quick.QUICK | {
    "dataset": "tweets",
    "max_train_samples": 22,
    "max_length": 24,
    "model": "tiny-bert",
    "training_type": "basic",
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 14,
    "learning_rate": 1e-2,
    "warmup_steps": 3,
    "logging_steps": 4,
    "eval_steps": 4,
    "keep_best": True,
    "best_metric": "loss",
    "save_steps": 3,
    "save_total_limit": None,
    "early_stopping_patience": 50,
}
OF_RANKS = {"training_type": "accelerated", "batch_size": 1, "max_steps": 9}


@pytest.fixture(scope="module", autouse=True)
def small_models():
    """The presets with one narrow layer and few words, for which one thread is enough."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with narrowed(words=300, width=16, num_hidden_layers=1):
        yield
    torch.set_num_threads(threads)


class Crash(Exception):
    """What ends a run without a word."""


class Recorder(Callback):
    """Keeps rows and random draws of each step, the whole state at each save and where the run began; may crash it."""

    def __init__(self, crash_at=None):
        self.crash_at, self.steps, self.draws, self.saved, self.begun = crash_at, {}, {}, {}, None

    def on_train_begin(self, trainer):
        self.begun = snapshot(trainer)
        rows = {tuple(ids): row for row, ids in enumerate(trainer.data.splits["train"]["input_ids"])}
        train_step = trainer.train_step

        def watched(micro_batches):
            self.steps[trainer.state.step + 1] = [
                rows.get(tuple(ids[mask.bool()].tolist()), tuple(ids.tolist()))  # a masked row is its own name
                for batch in micro_batches
                for ids, mask, label in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
                if (label != -100).any()
            ]
            return train_step(micro_batches)

        trainer.train_step = watched

    def on_step_end(self, trainer):
        self.draws[trainer.state.step] = random.random(), np.random.rand(), torch.rand(()).item()
        if trainer.state.step == self.crash_at:
            raise Crash

    def on_save(self, trainer, folder):
        self.saved[trainer.state.step] = snapshot(trainer)


def snapshot(trainer):
    """All that makes up a run, by item, on this rank; tensors as lists of their bits."""
    tree = {
        "scheduler": trainer.scheduler.state_dict(),
        "engine": trainer.stored.extra_state(),
        "random": rng_state(trainer.device),
        "state": {k: v for k, v in trainer.state.as_dict().items() if k not in ("seconds", "max_steps")},
        "rates": [group["lr"] for group in trainer.optimizer.param_groups],
        "best weights": trees.load(trainer.best_file) if trainer.state.best_step else {},
    }
    over, tree["state"]["step_in_epoch"] = divmod(trainer.state.step_in_epoch, trainer.state.steps_per_epoch)
    tree["state"]["epoch"] += over  # the end of an epoch is the beginning of the next
    if trainer.config.parallel.strategy == "ddp" and trainer.config.run.training_type != "pipeline":
        tree |= {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()["state"]}
    else:
        tree["shards"] = {name: (shard.start, shard.data) for name, shard in trainer.stored.tensors().items()}
    return dict(leaves(tree, ""))


def leaves(node, where):
    if isinstance(node, torch.Tensor):
        yield where, (str(node.dtype), node.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{where}/{key}")
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from leaves(value, f"{where}/{i}")
    else:
        yield where, repr(node)


def differing(found, wanted):
    """Names of the items of two snapshots that are not equal to the bit."""
    return [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]


def trainer_of(folder, recorder=None, **options):
    config = build(BASE | {"output_dir": str(folder)} | options)
    trainer = quick.trainer_of(config, [recorder or Recorder()])
    if config.run.training_type == "basic":
        # fp16's scaler has no use on a CPU; here it scales fp32, and doubles every second step.
        trainer.engine.scaler = trainer.stored.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return trainer


def run(folder, crash_at=None, **options):
    """A run until its end or its crash; gives what was recorded, and the end."""
    recorder = Recorder(crash_at)
    trainer = trainer_of(folder, recorder, **options)
    try:
        trainer.train()
    except Crash:
        return recorder, None
    return recorder, snapshot(trainer)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, *run(folder)


def logged(folder):
    """What a run logged, without its times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


@pytest.mark.parametrize(
    ("options", "crashes", "starts"),
    [
        ({}, (4, 7, 8, 11, 14), [0, 3, 6, 6, 9, 12]),
        ({"num_workers": 2, "task": "masked_lm", "max_steps": 9}, (5, 8), [0, 3, 6]),
    ],
    ids=["five resumes", "two, with masks drawn in two workers"],
)
def test_a_chain_of_resumes_is_the_undisturbed_run(tmp_path, undisturbed, options, crashes, starts):
    """Crashes a step or two beyond a checkpoint, in the middle of epochs and at their end."""
    wanted, end = undisturbed[1:] if not options else run(tmp_path / "through", **options)
    folder, steps, found = tmp_path / "run", {}, []
    for crash_at in (*crashes, None):
        recorder, ended = run(folder, crash_at, resume_from_checkpoint="auto", **options)
        begun = min(recorder.steps) - 1
        if begun:
            assert differing(recorder.begun, wanted.saved[begun]) == []
        steps |= recorder.steps
        found.append(begun)
        assert recorder.steps == {step: wanted.steps[step] for step in recorder.steps}
        assert recorder.draws == {step: wanted.draws[step] for step in recorder.draws}
    assert found == starts and steps == wanted.steps
    assert differing(ended, end) == []
    through = tmp_path / "through" if options else undisturbed[0]
    assert logged(folder) == logged(through)


def changed(name, change):
    """A function of a folder that changes one file of state as if an item had not been saved."""

    def drop(folder):
        tree = trees.load(folder / name)
        change(tree)
        trees.save(tree, folder / name)

    return drop


def zeros(state):
    return lambda tree: [kept[state].zero_() for kept in tree["state"].values()]


def forget(name, value):
    """A number of state.json at what a new run has."""

    def drop(folder):
        saved = json.loads((folder / "state.json").read_text())
        assert saved["state"][name] != value
        saved["state"][name] = value
        (folder / "state.json").write_text(json.dumps(saved))

    return drop


MODEL, OPTIMIZER, ENGINE, RANDOM = (f"{name}.safetensors" for name in ("model", "optimizer", "engine", "random-0"))
PYTHON, TORCH = random.Random(1).getstate(), torch.Generator().manual_seed(1).get_state()
DROPPED = {
    "weights": (changed(MODEL, lambda t: [w.zero_() for n, w in t.items() if "query" in n]), "/model"),
    "first moment": (changed(OPTIMIZER, zeros("exp_avg")), "/optimizer"),
    "second moment": (changed(OPTIMIZER, zeros("exp_avg_sq")), "/optimizer"),
    "optimizer's step": (changed(OPTIMIZER, zeros("step")), "/optimizer"),
    "schedule": (changed(ENGINE, lambda t: t["scheduler"].update(last_epoch=0)), "/scheduler"),
    "scale": (changed(ENGINE, lambda t: t["engine"]["scaler"].update(scale=8.0)), "/engine"),
    "scaler's count": (changed(ENGINE, lambda t: t["engine"]["scaler"].update(_growth_tracker=0)), "/engine"),
    "Python's stream": (changed(RANDOM, lambda t: t.update(python=PYTHON)), "/random/python"),
    "NumPy's stream": (changed(RANDOM, lambda t: t["numpy"]["state"].update(pos=0)), "/random/numpy"),
    "torch's stream": (changed(RANDOM, lambda t: t.update(torch=TORCH)), "/random/torch"),
    "best weights": (lambda folder: shutil.copy(folder / MODEL, folder / "best.safetensors"), "/best weights"),
}
PLANNED = ("max_steps", "steps_per_epoch", "seconds", "stop")  # anew, or a matter of time
STREAMED = ("stream",)  # tests/training/test_streamed.py
for item, first in TrainState().as_dict().items():
    if item not in (*PLANNED, *STREAMED):
        DROPPED[item] = forget(item, first), f"/state/{item}"


@pytest.fixture(scope="module")
def nine(undisturbed):
    return undisturbed[0] / checkpoint.name(9)


@pytest.mark.parametrize("item", [None, *DROPPED])
def test_whatever_is_not_put_back_is_noticed(tmp_path, undisturbed, nine, item):
    """Step 9 is the third of the second epoch, one after an evaluation and a logged line."""
    folder = shutil.copytree(nine, tmp_path / nine.name)
    if item:
        DROPPED[item][0](folder)
        manifest.seal(folder)
    trainer = trainer_of(tmp_path / "run", resume_from_checkpoint=str(folder))
    resuming.resume(trainer)
    found = differing(snapshot(trainer), undisturbed[1].saved[9])
    assert [name for name in found if name.startswith(DROPPED[item][1])] if item else not found


def test_without_its_best_weights_a_checkpoint_begins_the_search_anew(tmp_path, nine, capsys):
    folder = shutil.copytree(nine, tmp_path / nine.name)
    (folder / "best.safetensors").unlink()
    manifest.seal(folder)
    trainer = trainer_of(tmp_path / "run", resume_from_checkpoint=str(folder))
    trainer.train()
    assert "holds no weights of the best evaluation" in capsys.readouterr().out
    assert trainer.state.best_step > 9 and trainer.best_file.exists()


def test_a_signal_in_the_middle_of_an_accumulation_lets_the_step_finish(tmp_path, undisturbed):
    _, wanted, end = undisturbed
    trainer = trainer_of(tmp_path, recorder := Recorder(), save_steps=0)
    micro_batches, loss = [], trainer.loss

    def interrupted(*arguments):
        micro_batches.append(trainer.state.step)
        if micro_batches == [0, 0, 1, 1, 2]:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*arguments)

    trainer.loss = interrupted
    with pytest.raises(TrainingInterrupted, match="interrupted at step 3"):
        trainer.train()
    assert micro_batches == [0, 0, 1, 1, 2, 2] and list(recorder.steps) == [1, 2, 3]
    again, ended = run(tmp_path, resume_from_checkpoint="latest")
    assert differing(again.begun, wanted.saved[3]) == []
    assert recorder.steps | again.steps == wanted.steps and differing(ended, end) == []


def test_auto_begins_anew_where_nothing_is_whole_and_says_so(tmp_path, nine, capsys):
    fresh, damaged, whole = (tmp_path / name for name in ("fresh", "damaged", "whole"))
    for folder in (damaged, whole):
        shutil.copytree(nine, folder / nine.name)
    os.truncate(damaged / nine.name / "model.safetensors", 100)
    for folder, step in ((fresh, 0), (damaged, 0), (whole, 9)):
        trainer = trainer_of(folder, resume_from_checkpoint="auto")
        resuming.resume(trainer)
        assert trainer.state.step == step
        said = capsys.readouterr().out
        assert ("no whole checkpoint" in said and "beginning anew" in said) == (step == 0)
        assert ("model.safetensors has 100 bytes" in said) == (folder == damaged)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        resuming.resume(trainer_of(damaged, resume_from_checkpoint="latest"))


def test_auto_takes_a_folder_of_a_run_and_no_other(tmp_path):
    config = build(BASE | {"output_dir": str(tmp_path), "resume_from_checkpoint": "auto"})
    (tmp_path / ".config.yaml.abc").touch()  # of a run that was killed before its config stood
    run_folder.check(config)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="holds files that are no run"):
        run_folder.check(config)
    checkpoint.write(tmp_path, 3, lambda folder: (folder / "file").touch())
    run_folder.check(config)
    run_folder.claim(config)
    shutil.rmtree(tmp_path / checkpoint.name(3))
    run_folder.check(config)


def test_ranks_that_see_different_checkpoints_do_not_mix_them(tmp_path, nine):
    """Machines without a shared disk: one has a damaged copy, or lacks the newest."""

    def trainer(asked, other):
        config = build(BASE | {"output_dir": str(tmp_path / "x"), "resume_from_checkpoint": asked})
        ranks = SimpleNamespace(barrier=lambda: None, gather_objects=lambda mine: [mine, other])
        return SimpleNamespace(config=config, output_dir=nine.parent, is_main=True, ranks=ranks, say=lambda line: None)

    for asked in ("latest", "auto", str(nine)):
        with pytest.raises(CheckpointError, match="rank 1: it is damaged: bring the whole checkpoint"):
            resuming.find(trainer(asked, CheckpointError("it is damaged")))
    with pytest.raises(CheckpointError, match="rank 0 would go on from .*checkpoint-000012, and rank 1 from elsewhere"):
        resuming.find(trainer("latest", ("elsewhere", "another sum")))
    copied = "elsewhere", manifest.sum_of(nine.parent / checkpoint.name(12))
    assert resuming.find(trainer("auto", copied)) == nine.parent / checkpoint.name(12)


def test_a_rank_that_dies_meanwhile_is_no_fault_of_the_checkpoint(tmp_path, nine):
    trainer = trainer_of(tmp_path, resume_from_checkpoint=str(nine))
    gloo = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9"
    for error, told in (
        (RuntimeError(gloo), RuntimeError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (KeyError("weight"), CheckpointError),
    ):
        with mock.patch.object(trainer.stored, "read", side_effect=error), pytest.raises(told):
            resuming.resume(trainer)


SHARDED = [
    {"strategy": "ddp", "engine": "torch"},
    {"strategy": "zero1", "engine": "torch"},
    {"strategy": "zero2", "engine": "scratch"},
    {"strategy": "zero3", "engine": "scratch"},
    {"strategy": "fsdp", "engine": "torch", "async_save": True},
    {"training_type": "pipeline", "batch_size": 2, "model": "tiny-gpt2", "task": "causal_lm"},
]


def gathered(mine):
    """What each of the two ranks has."""
    found = [None, None]
    dist.all_gather_object(found, mine)
    return found


@pytest.mark.parametrize("options", SHARDED, ids=lambda options: options.get("strategy", "pipeline"))
@on_ranks(2, timeout=1600)
def test_ranks_resume_to_the_bit(tmp_path, options):
    """A chain of two resumes, each after a crash a step or two beyond a checkpoint."""

    def one(place, crash_at=None, **more):
        forget_accelerator()
        return run(tmp_path / place, crash_at, **(OF_RANKS | options | more))

    wanted, end = one("through")
    starts = []
    for crash_at in (4, 8, None):
        recorder, ended = one("run", crash_at, resume_from_checkpoint="auto")
        starts.append(min(recorder.steps) - 1)
        assert recorder.steps == {step: wanted.steps[step] for step in recorder.steps}
    assert starts == [0, 3, 6] and differing(ended, end) == []
    if "model" not in options:
        of_ranks = gathered([row for step in range(1, 7) for row in wanted.steps[step]])
        assert sorted(of_ranks[0] + of_ranks[1]) == list(range(22)), "an epoch, each row on one rank"


@on_ranks(2)
def test_a_rank_more_than_saved_has_a_stream_of_its_own(tmp_path):
    saved = tmp_path / "run" / checkpoint.name(3)
    run(tmp_path / "run", **OF_RANKS | {"max_steps": 3})
    if not dist.get_rank():
        (saved / "random-1.safetensors").unlink()
        manifest.seal(saved)
    dist.barrier()
    forget_accelerator()
    trainer = trainer_of(tmp_path / "more", **OF_RANKS, resume_from_checkpoint=str(saved))
    before = torch.get_rng_state()
    resuming.resume(trainer)
    states = [tuple(state.tolist()) for of_rank in gathered((before, torch.get_rng_state())) for state in of_rank]
    assert len(set(states)) == 4


@pytest.mark.parametrize(
    ("copy", "stored"),
    [(async_save.replace, [1.0, 2.0]), (lambda shard, data: shard, [2.0, 3.0])],
    ids=["copied", "not copied"],
)
@on_ranks(2)
def test_asynchronous_saving_never_mixes_two_steps(tmp_path, monkeypatch, copy, stored):
    """Each step's successor changes the weights before its first byte is written; the copy is what keeps them."""
    gone_on, weights = threading.Event(), torch.zeros(6)

    def late(*arguments, real=sharded.save):
        assert gone_on.wait(120)
        real(*arguments)

    monkeypatch.setattr(async_save, "replace", copy)
    monkeypatch.setattr(sharded, "save", late)
    saver = async_save.BackgroundSaver(tmp_path, None, dist.barrier)
    for step, value in enumerate(stored, 1):
        weights.fill_(step)
        saver.start(step, lambda _: None, {"model/w": Shard(torch.Size([12]), 6 * dist.get_rank(), weights)})
        weights.fill_(step + 1)
        gone_on.set()
        saver.wait()
        gone_on.clear()
        assert sharded.whole(tmp_path / checkpoint.name(step), "model/")["w"].tolist() == [value] * 12


@on_ranks(2)
def test_machines_without_a_shared_disk_keep_their_parts(tmp_path, monkeypatch):
    rank = dist.get_rank()
    monkeypatch.setenv("LOCAL_RANK", "0")
    saver = async_save.BackgroundSaver(tmp_path / f"machine {rank}", None, dist.barrier)
    shard = Shard(torch.Size([12]), 6 * rank, torch.full((6,), float(rank)))
    saver.start(1, lambda part: (part / f"rank-{rank}").touch(), {"model/w": shard})
    saver.wait()
    found = sorted(path.name for path in (tmp_path / f"machine {rank}" / checkpoint.name(1)).iterdir())
    assert found == [[manifest.MANIFEST, "rank-0", "shards"], ["rank-1", "shards"]][rank]


@pytest.mark.parametrize("options", [SHARDED[i] for i in (0, 1, 4, 5)], ids=lambda o: o.get("strategy", "pipeline"))
@on_ranks(2)
def test_machines_without_a_shared_disk_get_the_best_weights_back(tmp_path, options):
    """Which were lost after the evaluation that was the best; the main rank has their file."""
    forget_accelerator()
    trainer = trainer_of(tmp_path / f"machine {dist.get_rank()}", **OF_RANKS | options)
    stored = trainer.stored
    tensors = trainer.model.state_dict()
    if isinstance(stored, ShardedState):
        tensors = {name: shard.data for name, shard in stored.shards().items()}
    trainer.saver.save_best()
    best = dict(leaves(tensors, ""))
    for tensor in tensors.values():
        tensor.zero_()
    assert differing(dict(leaves(tensors, "")), best)
    trainer.state.best_step, trainer.state.step = 1, 2
    trainer.saver.load_best()
    assert differing(dict(leaves(tensors, "")), best) == []
    assert trainer.best_file.exists() == (dist.get_rank() == 0)


def fails_alone(folder):
    """Rank 1 fails a step after a checkpoint was begun, which the other rank knows nothing of."""
    trainer_of(folder, Recorder(crash_at=4 if dist.get_rank() else None), **OF_RANKS | SHARDED[4]).train()


def test_a_rank_that_fails_while_a_checkpoint_is_written_says_so_and_waits_for_nobody(tmp_path, ranks):
    with pytest.raises(RankError, match=r"rank 1 raised \S+Crash"):
        ranks(2, join=True, timeout=240)(fails_alone, tmp_path)
