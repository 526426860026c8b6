"""The hang lab: every fault looks as it is said to, its tool names the culprit, and its cure works, on real ranks."""

import math
import os
import re
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist

from course_lib.launching.launch import RanksHung, launch
from course_lib.lessons.faults import elastic, lab, numerical_faults
from course_lib.lessons.faults.tools import TORCH_RECORDER, WATCHDOG, Tool
from course_lib.training.cpu_kernels import keep_freed_memory
from tests.long_cases import some
from tests.virtual_time import VirtualTime

RANKS = 3
WAITING = "was still waiting"
LEFT_WAITING = r"Timed out waiting 1000ms|Connection (closed|reset)|was still waiting"
NO_KEY = r"keys: \S+/1$|was still waiting"
LOOKS = {
    "mismatched collectives": [LEFT_WAITING] * 3,
    "skipped step": [LEFT_WAITING, r"returned \[0\.0, 3\.0, 7\.0\]", LEFT_WAITING],
    "different shapes": [r"."] * 3,  # it depends on which message comes first
    "different dtypes": [r"returned 256\.00", r"returned \d{10}", r"returned 256\.00"],
    "shorter data loader": [LEFT_WAITING, "returned 3", LEFT_WAITING],
    "dead rank": [LEFT_WAITING, "was killed by SIGKILL", LEFT_WAITING],
    "stopped rank": [LEFT_WAITING, WAITING, LEFT_WAITING],
    "wrong port": [NO_KEY, r"was still waiting|trying to connect to \(127\.0\.0\.1, 1\)", NO_KEY],
    "wrong address": [NO_KEY, r"was still waiting|trying to connect to \(192\.0\.2\.1", NO_KEY],
    "deadlocked pipeline": [r"was still in `send`, called at scenarios\.py:\d+"] * 3,
    "straggler": [r"returned"] * 3,
    "NaN on one rank": [r"returned \[\d\.\d+, \d\.\d+, nan, nan\]"] * 3,
    "diverging parameters": [r"returned"] * 3,
    "out of memory": [WAITING, r"can't allocate memory: you tried to allocate 536870912 bytes", WAITING],
    "full disk": [r"raised RuntimeError: .*unexpected pos", WAITING, WAITING],
}
CURED = {
    "mismatched collectives": 3.0,
    "skipped step": [0.0, 3.0, 4.0, 9.0],
    "different shapes": 14.0,
    "different dtypes": 384.0,
    "shorter data loader": 3,
    "dead rank": 2,  # the second start does the two steps that were left
    "stopped rank": [0.0, 3.0, 6.0, 9.0],
    "wrong port": 3,
    "wrong address": 3,
    "out of memory": 3.0,
}


def check_shapes(broken, fixed):
    assert broken.values != (CURED["different shapes"],) * RANKS


def check_pipeline(broken, fixed):
    assert isinstance(broken.error, RanksHung) and not broken.reporters, "nobody says anything"
    assert fixed.values == ([1.0], [0.0, 2.0], [1.0])


def check_straggler(broken, fixed):
    """Its steps are no slower than anybody's, and it waits least; dealt out, all compute alike. In virtual time."""
    for rank, steps in enumerate(broken.values):
        assert steps == [pytest.approx((0.06, 0) if rank == 1 else (0.006, 0.054))] * 8, rank
    assert [step for steps in fixed.values for step in steps] == [pytest.approx((0.024, 0))] * 8 * RANKS


def check_nan(broken, fixed):
    losses = fixed.values[0]
    assert fixed.values == (losses,) * RANKS and len(losses) == 3 and all(map(math.isfinite, losses))
    assert losses[:2] == broken.values[0][:2], "up to the hole they are the same run"


def check_diverging(broken, fixed):
    weights = [value["weight"] for value in broken.values]
    losses = broken.values[0]["losses"]
    assert weights[0] == weights[2] != weights[1] and losses[0] > losses[-1], "and yet the loss falls"
    assert fixed.values == (fixed.values[0],) * RANKS


def check_disk(broken, fixed):
    assert fixed.values[0].startswith("step-1.pt holds 4; step 2 was not saved")
    assert fixed.values == (fixed.values[0],) * RANKS


CHECKS = {
    "different shapes": check_shapes,
    "deadlocked pipeline": check_pipeline,
    "straggler": check_straggler,
    "NaN on one rank": check_nan,
    "diverging parameters": check_diverging,
    "full disk": check_disk,
}


@pytest.fixture(scope="module", params=some(LOOKS, "skipped step", "dead rank", "straggler", "full disk"))
def trial(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "straggler":
            virtual = VirtualTime()
            patch.setattr(numerical_faults, "time", virtual.module())
            patch.setattr(numerical_faults, "dist", virtual.distributed())
        return request.param, lab.trial(lab.SCENARIOS[request.param], RANKS)


def test_broken_inspected_fixed(trial):
    name, trial = trial
    broken, fixed = trial.broken, trial.fixed
    for said, look in zip(broken.said, LOOKS[name], strict=True):
        assert re.search(look, said.splitlines()[0]), said
    assert trial.named == lab.SCENARIOS[name].culprits
    assert fixed.error is None and not fixed.reports and None not in fixed.values
    assert fixed.starts == (2 if name == "dead rank" else 1)
    if name in CURED:
        assert fixed.values == (CURED[name],) * RANKS != broken.values
    CHECKS.get(name, lambda *outcomes: None)(broken, fixed)


def test_of_two_ranks_each_is_the_others_only_suspect():
    scenario = lab.SCENARIOS["different dtypes"]
    assert scenario.tool.named(lab.run(scenario, 2, "inspected")) == {0, 1}


def test_torchs_recorder_and_the_watchdogs_agree():
    scenario = lab.SCENARIOS["shorter data loader"]
    watched, recorded = (lab.run(scenario, RANKS, "inspected", tool) for tool in (WATCHDOG, TORCH_RECORDER))
    assert WATCHDOG.named(watched) == TORCH_RECORDER.named(recorded) == {1}
    assert [state.sequence for state in watched.reports[0].states] == [4, 3, 4]
    assert [entries[-1]["collective_seq_id"] for entries in recorded.records] == [4, 3, 4]
    assert TORCH_RECORDER.named(lab.run(scenario, RANKS, "fixed")) == set(), "where nobody records"


def killed_while_it_writes(folder):
    """After 8 bytes of the next file that rank 1 writes, the system kills it; rank 0 has written its own."""
    if dist.get_rank() == 1:
        while not (folder / "rank0.json").exists():
            time.sleep(0.01)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))
    return "longer than eight bytes"


@pytest.mark.parametrize("tool", [Tool("none", lambda outcome: set()), TORCH_RECORDER], ids=["its end", "its records"])
def test_a_rank_that_is_killed_while_it_writes_leaves_nothing(tool):
    scenario = lab.Scenario("half a file", "error", "", "", tool, "", killed_while_it_writes, killed_while_it_writes)
    outcome = lab.run(scenario, 2, "inspected")
    assert outcome.values == ("longer than eight bytes", None) and outcome.records[1] == []
    assert outcome.said[1] == "was killed by SIGXFSZ"


def test_an_error_file_that_is_half_there_says_nothing(tmp_path):
    for rank, written in enumerate(('{"message": {"message": "whole"}}', '{"message": {"mess', "")):
        os.makedirs(tmp_path / str(rank))
        (tmp_path / str(rank) / "error.json").write_text(written)
    assert elastic._messages(tmp_path) == {0: {"message": "whole"}}


def many_threads(threads):
    """The cured run where torch computes with so many threads, each of which needs a stack and a heap."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    return numerical_faults.micro_batches(None)


def test_threads_that_start_take_nothing_from_the_room():
    assert launch(many_threads, 48, num_processes=2, device="cpu", timeout=240) == [2.0, 2.0]


def room_for_small_blocks(monkeypatch):
    """Bytes that Python gets in small blocks while malloc's large ones are taken."""
    taken = []
    monkeypatch.setattr(
        numerical_faults, "_kept_by_malloc", lambda size: [taken.extend(bytearray(1000) for _ in range(100_000))]
    )
    with numerical_faults._room_for(2**28):
        return sum(map(len, taken))


def test_python_has_room_while_the_large_blocks_are_taken(monkeypatch):
    assert launch(room_for_small_blocks, monkeypatch, num_processes=1, device="cpu", timeout=240) == [100_000_000]


def room_beside_freed_memory():
    """Whether 512 MiB are refused and 64 given where 256 are left, after malloc kept a GiB of what was freed.

    Returns:
        Bytes that were given of 64 MiB in the block, and of 512 MiB after it.
    """
    keep_freed_memory()
    del [torch.empty(2**30, dtype=torch.uint8)][:]
    with numerical_faults._room_for(2**28):
        given = torch.empty(2**26, dtype=torch.uint8).nbytes
        with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate 536870912 bytes"):
            torch.empty(2**29, dtype=torch.uint8)
    return given, torch.empty(2**29, dtype=torch.uint8).nbytes


def test_freed_memory_that_a_process_has_kept_is_no_room():
    assert launch(room_beside_freed_memory, num_processes=1, device="cpu", timeout=240) == [(2**26, 2**29)]
