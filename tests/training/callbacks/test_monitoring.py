"""The monitors on real ranks: each rank's own memory, the share of communication, traces, and alerts said once."""

import json

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from course_lib.config import build
from course_lib.training.callbacks import Callback, FunctionCallback
from course_lib.training.callbacks.monitoring import CommunicationMonitor, MemoryMonitor, Profiler, monitors
from tests.ranks import on_ranks
from tests.training import quick

STEPS = {"max_steps": 8, "logging_steps": 4}
BALLAST_MIB = 400


class HoldsMore(Callback):
    """Rank 1 holds some hundred MiB that rank 0 does not, from step 4 on."""

    held = torch.empty(0)

    def on_step_end(self, trainer):
        if trainer.rank == 1 and trainer.state.step == 4:
            self.held = torch.ones(BALLAST_MIB * 2**18)


class HeldMemory(MemoryMonitor):
    """Counts what a callback holds, above a base: a process's resident memory has moods of its own."""

    def __init__(self, holder, **options):
        super().__init__(**options)
        self.holder = holder

    def memory(self, trainer):
        return 1000 + self.holder.held.nbytes / 2**20, 10_000.0


@on_ranks(2)
def test_a_rank_that_holds_more_is_seen_and_said_once(tmp_path):
    holder = HoldsMore()
    memory = HeldMemory(holder, every=2, alert=0.999, imbalance=1.2)
    quick.train(tmp_path, [holder, memory], **STEPS)
    table = pd.read_csv(tmp_path / "monitor" / "memory.csv").pivot(index="step", columns="rank", values="mib")
    apart = table[1] - table[0]
    assert apart.to_dict() == {2: 0, 4: BALLAST_MIB, 6: BALLAST_MIB, 8: BALLAST_MIB}
    (alert,) = memory.alerts
    assert alert["step"] in (4, 6) and alert["alert"].startswith("rank 1 holds")
    assert pd.read_csv(tmp_path / "monitor" / "alerts.csv")["alert"].tolist() == [alert["alert"]]


@on_ranks(2)
def test_a_threshold_is_reported_for_each_rank_once(tmp_path):
    tight = MemoryMonitor(every=4, alert=1e-4, imbalance=100.0)
    quick.train(tmp_path, [tight], **STEPS)
    assert [(each["step"], each["alert"][:12]) for each in tight.alerts] == [(4, "rank 0 holds"), (4, "rank 1 holds")]
    assert "the threshold is 0%" in tight.alerts[0]["alert"]
    own = pd.read_csv(tmp_path / "monitor" / "memory.csv")["mib"]
    assert own.min() > 50, "the process's resident memory, torch and all"


@on_ranks(2)
def test_the_share_of_communication_is_metered_on_every_rank_and_nothing_is_changed(tmp_path):
    sizes = set()
    gradients = FunctionCallback(lambda trainer: sizes.add(sum(p.nbytes for p in trainer.model.parameters())))
    plain = quick.train(tmp_path / "plain", [gradients], **STEPS)
    watched = quick.train(tmp_path / "watched", **STEPS, memory_steps=4, communication_steps=3)
    assert watched["train"]["final_loss"] == plain["train"]["final_loss"]
    table = pd.read_csv(tmp_path / "watched" / "monitor" / "communication.csv")
    assert table[["step", "rank"]].to_numpy().tolist() == [[3, 0], [3, 1], [6, 0], [6, 1]]
    assert table["communication"].between(1e-4, 1).all() and (table["exposed"] <= table["communication"]).all()
    sent = [sizes.pop() / 1e6] * 4  # an all-reduce on two ranks sends each gradient once
    assert table["mb_sent"].tolist() == pytest.approx(sent, rel=0.01)
    quick.train(tmp_path / "piped", **STEPS, communication_steps=4, training_type="pipeline")
    piped = pd.read_csv(tmp_path / "piped" / "monitor" / "communication.csv")["mb_sent"]
    assert len(piped) == 4 and piped.min() > 0


@on_ranks(2)
def test_each_rank_leaves_a_trace(tmp_path):
    quick.train(tmp_path / "traced", **STEPS, profile_steps=2, profile_wait=1)
    (trace,) = (tmp_path / "traced" / "monitor").glob(f"rank-{dist.get_rank()}.*.pt.trace.json")
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::addmm", "ProfilerStep#2", "ProfilerStep#3"} <= names and "ProfilerStep#1" not in names
    assert any("allreduce" in name or "all_reduce" in name for name in names)
    quick.train(tmp_path / "too short", [Profiler(wait=20)], **STEPS)
    assert not list((tmp_path / "too short").glob("monitor/*.json"))


def test_the_config_switches_them_on():
    assert monitors(build({})) == []
    options = {"memory_steps": 5, "memory_alert": 0.5, "imbalance_alert": 2, "communication_steps": 7}
    memory, communication, profiler = monitors(build(options | {"profile_steps": 3}))
    assert isinstance(memory, MemoryMonitor) and isinstance(profiler, Profiler)
    assert (memory.every, memory.alert, memory.imbalance) == (5, 0.5, 2)
    assert isinstance(communication, CommunicationMonitor) and communication.every == 7
