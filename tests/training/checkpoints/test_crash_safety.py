"""Checkpoints under faults: killed, out of space or refused by the disk at every file operation of a save."""

import contextlib
import errno
import os
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch

from course_lib.errors import CheckpointError
from course_lib.parallel.sharding import Shard
from course_lib.training.checkpoints import checkpoint, manifest, safetensors_tree, sharded

WRITING = os.O_WRONLY | os.O_RDWR
CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.truncate", "os.chmod", "shutil.rmtree")


def files_of(step, attempt=0):
    """Three files that all say which step and attempt they belong to."""

    def write(folder):
        weights = torch.full((3000,), float(step))
        safetensors_tree.save({"step": step, "attempt": attempt, "weights": weights}, folder / "model.safetensors")
        (folder / "shards").mkdir()
        safetensors_tree.save({"step": step, "attempt": attempt}, folder / "shards" / "0.safetensors")
        (folder / "state.json").write_text(f"[{step}, {attempt}]")

    return write


def read(folder):
    """Step and attempt of a checkpoint; fails where its files disagree."""
    model, shard = (safetensors_tree.load(folder / name) for name in ("model.safetensors", "shards/0.safetensors"))
    whose = (model["step"], model["attempt"])
    assert (shard["step"], shard["attempt"]) == whose and (folder / "state.json").read_text() == str(list(whose))
    assert torch.equal(model["weights"], torch.full((3000,), float(whose[0])))
    return whose


def child(work):
    """Run ``work`` in a forked process; gives its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if not pid:
        code = 0
        try:
            work()
        except BaseException:  # it must not get back into pytest
            traceback.print_exc()
            code = 1
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Operations:
    """The file operations of this process while :meth:`watched`, counted, with something to happen just before one."""

    def __init__(self):
        self.at, self.count, self.act = 0, 0, None
        sys.addaudithook(self._hook)  # for good, so that there is one of these

    def _one(self):
        self.count += 1
        if self.count == self.at:
            self.act()

    def _hook(self, event, arguments):
        if self.act and (
            event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING)
        ):
            self._one()

    @contextlib.contextmanager
    def watched(self, at, act):
        """Call ``act`` before the operation of that number, from 1; flushes and safetensors' writes count too."""

        def fsync(descriptor, real=os.fsync):
            self._one()
            real(descriptor)

        def save_file(tensors, path, real=safetensors_tree.save_file, **options):
            self._one()
            real(tensors, path, **options)
            os.truncate(path, os.path.getsize(path) // 2)
            self._one()  # with half of the file written
            real(tensors, path, **options)

        self.at, self.count, self.act = at, 0, act
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            with mock.patch.object(os, "fsync", fsync), mock.patch.object(safetensors_tree, "save_file", save_file):
                yield
        finally:
            self.act = None
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


OPERATIONS = Operations()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def fill_up():
    """From now on the kernel refuses every write of this process, Python's and safetensors' alike."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def two(run):
    for step in (10, 20):
        checkpoint.write(run, step, files_of(step))


def one_more(run):
    """The usual case: a third checkpoint, of two to be kept."""
    checkpoint.write(run, 30, files_of(30))
    checkpoint.prune(run, 2)


def only_one(run):
    checkpoint.write(run, 20, files_of(20))


def the_only_one_again(run):
    """The same step once more, where there is no other checkpoint."""
    checkpoint.write(run, 20, files_of(20, attempt=1))


def in_place(run):
    """The naive way: into the very folder that holds the checkpoint."""
    folder = run / checkpoint.name(20)
    shutil.rmtree(folder)
    folder.mkdir()
    files_of(20, attempt=1)(folder)
    manifest.seal(folder)


def ending(run, save, number, act):
    """How a save ended with the fault at its operation of that number; ``through`` where it has not so many."""

    def work():
        with OPERATIONS.watched(number, act):
            save(run)

    if act is kill:
        return {-signal.SIGKILL: "killed", 0: "through"}[child(work)]
    try:
        work()
    except CheckpointError:
        return "refused"
    return "borne" if OPERATIONS.count >= number else "through"


def survivors(folder, before, save, act):
    """Save again and again, with the fault at the first file operation, at the second, … until a save comes through.

    Gives for each how the save ended, and the checkpoint that the next run finds.
    """
    before(folder / "before")
    found = []
    while not found or found[-1][0] != "through":
        run = folder / "run"
        shutil.copytree(folder / "before", run)
        ended = ending(run, save, len(found) + 1, act)
        checkpoint.tidy(run)
        try:
            found.append((ended, read(checkpoint.latest(run))))
        except CheckpointError:
            found.append((ended, None))
        assert not list(run.glob(".*")), "a left-over was not cleared"
        shutil.rmtree(run)
        assert len(found) < 200
    return found


@pytest.mark.parametrize(("before", "save", "new"), [(two, one_more, (30, 0)), (only_one, the_only_one_again, (20, 1))])
@pytest.mark.parametrize("act", [kill, fail, fill_up], ids=lambda act: act.__name__)
def test_a_fault_at_every_file_operation_leaves_a_whole_checkpoint(tmp_path, before, save, new, act):
    *faults, through = survivors(tmp_path, before, save, act)
    assert through == ("through", new)
    # What was there first stays until the new one stands, and what is said to have been saved is found.
    assert {left for _, left in faults} == {(20, 0), new}
    assert {left for ended, left in faults if ended == "borne"} <= {new}
    assert sum(ended != "borne" for ended, _ in faults) > 15
    if act is kill:
        assert [left for _, left in faults] == sorted(left for _, left in faults), "the finds change once"


def test_writing_in_place_would_lose_the_only_checkpoint(tmp_path):
    """The same kills as above: the checks there can fail."""
    assert [left for _, left in survivors(tmp_path, only_one, in_place, kill)].count(None) > 10


def test_everything_is_on_the_disk_before_it_is_named(tmp_path):
    """A machine that loses its power keeps what was flushed, so the order of flushes and renames is the proof."""
    order = []

    def fsync(descriptor, real=os.fsync):
        order.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real(descriptor)

    def replace(source, target, real=os.replace):
        order.append(("rename", Path(target)))
        real(source, target)

    with mock.patch.object(os, "fsync", fsync), mock.patch.object(os, "replace", replace):
        checkpoint.write(tmp_path, 30, files_of(30))
    writing, final = checkpoint.beside(tmp_path, 30), tmp_path / checkpoint.name(30)
    named = order.index(("rename", final))
    everything = {writing, *(writing / path.relative_to(final) for path in final.rglob("*"))}
    assert {path for what, path in order[:named] if what == "flush"} == everything and len(everything) == 6
    assert order[named + 1] == ("flush", tmp_path)
    assert order[-2:] == [("rename", tmp_path / checkpoint.LATEST), ("flush", tmp_path)]
    assert (tmp_path / checkpoint.LATEST).read_text() == "checkpoint-000030\n"


def test_left_overs_are_never_taken_for_checkpoints(tmp_path):
    two(tmp_path)
    for what in ("writing", "replaced", "deleted"):
        shutil.copytree(tmp_path / checkpoint.name(20), checkpoint.beside(tmp_path, 30, what))
    (tmp_path / ".latest.abc").touch()
    assert checkpoint.latest(tmp_path).name == checkpoint.name(20)
    shutil.rmtree(checkpoint.beside(tmp_path, 30, "replaced"))  # which would say that 30 stood before
    checkpoint.tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.name(10), checkpoint.name(20), "latest"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("name", "there", "here"), [("model/w", "6", 4), ("model/v", "no", 6)])
def test_pieces_of_another_model_are_refused(tmp_path, name, there, here):
    sharded.save({"model/w": Shard(torch.Size([6]), 0, torch.arange(6.0))}, tmp_path)
    with pytest.raises(CheckpointError, match=f"model or optimizer: {name} has {there} elements there and {here} here"):
        sharded.load({name: Shard(torch.Size([here]), 0, torch.zeros(here))}, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nothing_that_is_read_back_is_unpickled(tmp_path):
    values = torch.arange(6.0)
    safetensors_tree.save({"a": [1, (2.0, None), {"b": values}]}, tmp_path / "tree.safetensors")
    sharded.save({"model/w": Shard(values.shape, 0, values)}, tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors"}

    def work():
        def no_pickle(event, _):
            assert not event.startswith(("pickle.", "marshal.loads")), event

        sys.addaudithook(no_pickle)
        assert torch.equal(sharded.whole(tmp_path, "model/")["w"], values)
        assert torch.equal(safetensors_tree.load(tmp_path / "tree.safetensors")["a"][2]["b"], values)

    assert child(work) == 0
