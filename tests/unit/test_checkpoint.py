"""Checkpoints and state files: nothing pickled, nothing half-written, damage found and named."""

import random
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

from course_lib.errors import CheckpointError
from course_lib.training import checkpoint, tensorfile


def test_state_comes_back_as_it_was(tmp_path):
    shared = torch.randn(4, 3)
    state = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": shared}, 1: {"exp_avg": shared.T}},
             "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "fused": True, "maximize": None}],
             "random": random.getstate(), "empty": {}, "none": None, "bf16": torch.randn(3).bfloat16()}
    tensorfile.save(state, tmp_path / "state.safetensors")
    back = tensorfile.load(tmp_path / "state.safetensors")
    assert back["random"] == state["random"] and back["param_groups"] == state["param_groups"]
    assert list(back["state"]) == [0, 1] and back["empty"] == {} and back["none"] is None
    assert torch.equal(back["state"][1]["exp_avg"], shared.T) and torch.equal(back["bf16"], state["bf16"])


def test_what_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(TypeError, match="ndarray at /a/1"):
        tensorfile.save({"a": [1, np.zeros(2)]}, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def files_of(step):
    def write(folder):
        tensorfile.save({"step": step, "weights": torch.full((1000,), float(step))}, folder / "model.safetensors")
        (folder / "state.json").write_text(f'{{"step": {step}}}')
    return write


@pytest.fixture
def run(tmp_path):
    for step in (10, 20, 30):
        checkpoint.write(tmp_path, step, files_of(step))
    return tmp_path


def test_latest_is_the_newest_whole_one(run):
    assert checkpoint.latest(run).name == "checkpoint-000030"
    assert [folder.name for folder in checkpoint.in_order(run)] == [checkpoint.name(s) for s in (10, 20, 30)]


def test_every_single_damage_is_found_and_named(run):
    folder = checkpoint.latest(run)
    draw = random.Random(0)
    for name in ("model.safetensors", "state.json", "manifest.json"):
        path = folder / name
        whole = path.read_bytes()
        damaged = [whole[: draw.randrange(len(whole))] for _ in range(10)]
        for _ in range(40):
            bit = draw.randrange(len(whole) * 8)
            damaged.append(whole[: bit // 8] + bytes([whole[bit // 8] ^ (1 << bit % 8)]) + whole[bit // 8 + 1 :])
        for content in damaged:
            path.write_bytes(content)
            with pytest.raises(CheckpointError) as error:
                checkpoint.verify(folder)
            assert str(folder) in str(error.value) and "\n" not in str(error.value)
            said = []
            assert checkpoint.latest(run, said.append).name == "checkpoint-000020" and len(said) == 1
        path.write_bytes(whole)
        checkpoint.verify(folder)


def test_a_missing_file_is_named(run):
    (run / "checkpoint-000030" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks state\.json"):
        checkpoint.verify(run / "checkpoint-000030")


def test_no_whole_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        checkpoint.latest(tmp_path / "nothing")


def test_pruning_keeps_the_newest(run):
    checkpoint.prune(run, 2)
    assert [folder.name for folder in checkpoint.in_order(run)] == [checkpoint.name(s) for s in (20, 30)]
    checkpoint.prune(run, None)
    assert len(checkpoint.in_order(run)) == 2


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


@pytest.mark.parametrize("limit", [100, 3000, 5000])
def test_a_disk_that_fills_up_at_any_file(run, limit):
    """A real failing write: the process may make no file longer than the limit."""
    code = f"""
import resource, sys, pathlib, torch
from course_lib.training import checkpoint, tensorfile
from course_lib.errors import CheckpointError
def files(folder):
    tensorfile.save({{"weights": torch.zeros(1000)}}, folder / "a.safetensors")
    (folder / "b.json").write_text("x" * 4900)
    (folder / "c.json").write_text("x" * 5100)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    checkpoint.write(pathlib.Path({str(run)!r}), 40, files)
except CheckpointError as error:
    print(error); sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert "could not save" in done.stdout and "File too large" in done.stdout
    assert {path.name for path in run.iterdir()} == {checkpoint.name(s) for s in (10, 20, 30)}
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != limit
