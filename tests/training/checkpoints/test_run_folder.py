"""A run that is alive keeps its folder to itself, until it ends, however it ends."""

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.training.checkpoints import run_folder


def hold(folder, ready):
    with run_folder.held(folder):
        ready.set()
        signal.pause()


@pytest.fixture
def holder(tmp_path):
    """Another process that trains in the folder."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "run", ready), daemon=True)
    process.start()
    assert ready.wait(120)
    yield process
    process.kill()
    process.join()


@pytest.mark.parametrize(
    "asked",
    [{}, {"overwrite_output_dir": True}, {"resume_from_checkpoint": "auto"}],
    ids=["begin", "overwrite", "go on"],
)
def test_a_live_run_is_named_and_nothing_of_it_is_touched(tmp_path, holder, asked):
    kept = tmp_path / "run" / "config.yaml"
    kept.write_text("kept")
    config = build({"output_dir": str(tmp_path / "run")} | asked)
    with pytest.raises(ConfigError, match=rf"belongs to a run that is alive \(process {holder.pid} on .*, since"):
        run_folder.check(config)
    with pytest.raises(ConfigError, match="is alive"), run_folder.held(tmp_path / "run"):
        pass
    assert kept.read_text() == "kept"


def test_a_run_that_was_killed_holds_nothing(tmp_path, holder):
    (tmp_path / "run" / "config.yaml").write_text("kept")
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    run_folder.check(build({"output_dir": str(tmp_path / "run"), "overwrite_output_dir": True}))
    with run_folder.held(tmp_path / "run"):
        pass


def test_workers_that_outlive_a_run_do_not_hold_its_folder(tmp_path):
    """Forked processes inherit the open file; a lock of flock(2) would stay with them."""
    context = multiprocessing.get_context("fork")
    with run_folder.held(tmp_path / "run"):
        worker = context.Process(target=signal.pause, daemon=True)
        worker.start()
    try:
        taken = context.Process(target=run_folder.refuse_live, args=(tmp_path / "run",))
        taken.start()
        taken.join()
        assert taken.exitcode == 0
    finally:
        worker.kill()


def test_a_folder_with_a_run_says_first_how_to_go_on(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match="already holds a run: go on with --resume_from_checkpoint auto"):
        run_folder.check(build({"output_dir": str(tmp_path)}))


def test_runs_that_look_at_the_same_moment_do_not_take_each_others_file(tmp_path):
    config = build({"output_dir": str(tmp_path / "run")})
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: run_folder.check(config), range(400)))
    assert not any(tmp_path.iterdir())


def test_a_read_only_file_system_is_no_lack_of_rights(tmp_path, monkeypatch):
    config = build({"output_dir": str(tmp_path / "run")})
    monkeypatch.setattr(run_folder, "_writable", lambda folder: False)
    with pytest.raises(ConfigError, match=f"no permission in {tmp_path}"):
        run_folder.check(config)
    mounted = os.statvfs(tmp_path)
    read_only = os.statvfs_result([*mounted[:8], mounted.f_flag | os.ST_RDONLY, mounted.f_namemax])
    monkeypatch.setattr(os, "statvfs", lambda folder: read_only)
    with pytest.raises(ConfigError, match=f"{tmp_path} is on a read-only file system"):
        run_folder.check(config)
