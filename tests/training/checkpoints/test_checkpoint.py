"""Checkpoints and state files: nothing pickled, nothing half-written, damage found and named."""

import os
import random
import shutil

import numpy as np
import pytest
import torch

from course_lib.errors import CheckpointError
from course_lib.training.checkpoints import checkpoint, manifest, safetensors_tree


def test_state_comes_back_as_it_was(tmp_path):
    shared = torch.randn(4, 3)
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": shared}, 1: {"exp_avg": shared.T}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "fused": True, "maximize": None}],
        "random": random.getstate(),
        "empty": {},
        "none": None,
        "bf16": torch.randn(3).bfloat16(),
    }
    safetensors_tree.save(state, tmp_path / "state.safetensors")
    back = safetensors_tree.load(tmp_path / "state.safetensors")
    assert back["random"] == state["random"] and back["param_groups"] == state["param_groups"]
    assert list(back["state"]) == [0, 1] and back["empty"] == {} and back["none"] is None
    assert torch.equal(back["state"][1]["exp_avg"], shared.T) and torch.equal(back["bf16"], state["bf16"])


def test_what_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(TypeError, match="ndarray at /a/1"):
        safetensors_tree.save({"a": [1, np.zeros(2)]}, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def files_of(step):
    def write(folder):
        safetensors_tree.save({"step": step, "weights": torch.full((1000,), float(step))}, folder / "model.safetensors")
        (folder / "state.json").write_text(f'{{"step": {step}}}')

    return write


@pytest.fixture
def run(tmp_path):
    for step in (10, 20, 30):
        checkpoint.write(tmp_path, step, files_of(step))
    return tmp_path


def steps_of(run):
    return [int(folder.name[-6:]) for folder in checkpoint.in_order(run)]


def flip(path, bit=3000):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_every_single_damage_is_found_and_named(run, name):
    folder, draw, path = run / checkpoint.name(30), random.Random(0), run / checkpoint.name(30) / name
    whole = path.read_bytes()

    def check():
        with pytest.raises(CheckpointError, match=f"{folder}.*{name}"):
            manifest.verify(folder)
        said = []
        assert checkpoint.latest(run, said.append).name == "checkpoint-000020" and len(said) == 1
        path.write_bytes(whole)

    for _ in range(17):
        path.write_bytes(whole[: draw.randrange(len(whole))])
        check()
    for _ in range(67):
        flip(path, draw.randrange(len(whole) * 8))
        check()
    path.unlink()
    check()
    manifest.verify(folder)
    assert checkpoint.latest(run) == folder


def test_pruning_keeps_the_newest(run):
    checkpoint.prune(run, 2)
    assert steps_of(run) == [20, 30]
    checkpoint.prune(run, None)
    assert steps_of(run) == [20, 30]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "model.safetensors"),
        lambda folder: (folder / "state.json").unlink(),
        lambda folder: (folder / manifest.MANIFEST).unlink(),
    ],
    ids=["bit", "file missing", "manifest missing"],
)
def test_pruning_never_deletes_the_last_good_one(run, damage):
    damage(run / checkpoint.name(30))
    checkpoint.prune(run, 1)
    assert steps_of(run) == [20, 30] and checkpoint.latest(run).name == checkpoint.name(20)
    damage(run / checkpoint.name(20))
    checkpoint.prune(run, 1)
    assert steps_of(run) == [20, 30]
    checkpoint.write(run, 40, files_of(40))
    checkpoint.prune(run, 1)
    assert steps_of(run) == [40]


def test_pruning_reads_no_file_again_that_nobody_wrote_to(run, monkeypatch):
    read = []

    def file_digest(file, algorithm, real=manifest.hashlib.file_digest):
        read.append(file.name)
        return real(file, algorithm)

    monkeypatch.setattr(manifest.hashlib, "file_digest", file_digest)
    checkpoint.prune(run, 2)
    assert read == []
    os.utime(run / checkpoint.name(30) / "state.json")
    checkpoint.prune(run, 2)
    assert read == [str(run / checkpoint.name(30) / "state.json")]


def test_after_going_back_the_newest_is_the_one_written_last(run):
    """As after ``--resume_from_checkpoint checkpoint-000020``: that of step 30 belongs to what was given up."""
    checkpoint.write(run, 25, files_of(25))
    assert checkpoint.latest(run).name == checkpoint.name(25) == (run / checkpoint.LATEST).read_text().strip()
    checkpoint.prune(run, 1)
    assert steps_of(run) == [25]


def test_a_checkpoint_that_was_not_yet_named_is_found(run):
    """Killed between the last two renames."""
    for named in ("checkpoint-000020", "checkpoint-000999"):
        (run / checkpoint.LATEST).write_text(f"{named}\n")
        assert checkpoint.latest(run).name == checkpoint.name(30)
    (run / checkpoint.LATEST).unlink()
    assert checkpoint.latest(run).name == checkpoint.name(30)


def test_a_copied_checkpoint_is_whole(run, tmp_path):
    """Times of files change where they are copied; what counts is what they hold."""
    copy = tmp_path / "elsewhere" / checkpoint.name(30)
    shutil.copytree(run / checkpoint.name(30), copy, copy_function=shutil.copyfile)
    manifest.verify(copy)
    flip(copy / "state.json", 3)
    with pytest.raises(CheckpointError, match=r"contents of state\.json have changed"):
        manifest.verify(copy, trust_untouched=True)


def test_a_file_that_cannot_be_read_is_named_and_the_one_before_is_used(run, monkeypatch):
    def file_digest(file, algorithm, real=manifest.hashlib.file_digest):
        if "000030" in file.name:
            raise OSError(5, "Input/output error")
        return real(file, algorithm)

    monkeypatch.setattr(manifest.hashlib, "file_digest", file_digest)
    said = []
    assert checkpoint.latest(run, said.append).name == checkpoint.name(20)
    told = "checkpoint-000030 is damaged: model.safetensors cannot be read (Input/output error); trying the one before"
    assert len(said) == 1 and told in said[0]


def test_what_cannot_be_deleted_is_named(run, monkeypatch):
    def rmtree(path, *_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", rmtree)
    with pytest.raises(CheckpointError, match=r"could not delete .*checkpoint-000010 \(Permission denied\)"):
        checkpoint.prune(run, 2)


def test_a_failed_write_leaves_what_was_there(run):
    before = sorted(run.rglob("*"))

    def fails(folder):
        files_of(40)(folder)
        raise OSError(28, "No space left on device")

    told = r"checkpoint-000040 \(No space left on device\).*untouched: free some space"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.write(run, 40, fails)
    assert sorted(run.rglob("*")) == before
    assert checkpoint.latest(run).name == "checkpoint-000030"
