"""The monitors on real ranks: each rank's own memory, the share of communication, traces, and alerts said once."""

import json
from unittest import mock

import pandas as pd
import pytest
import torch

from course_lib.config import build
from course_lib.launching.launch import launch
from course_lib.training import run as runs
from course_lib.training.callbacks import Callback
from course_lib.training.callbacks.monitoring import (
    CommunicationMonitor,
    MemoryMonitor,
    Profiler,
    monitors,
)
from course_lib.training.engines.base import StepEngine
from tests.training.callbacks import quick

QUICK = quick.QUICK | {"max_steps": 8, "logging_steps": 4}
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


class GradientBytes(Callback):
    """Adds up what an all-reduce of all gradients carries."""

    def on_train_end(self, trainer):
        self.bytes = sum(parameter.nbytes for parameter in trainer.model.parameters())


def train_all(folder: str) -> dict:
    """Runs one after another on two ranks; gives what each rank's monitors kept."""
    found = {}

    def train(name, callbacks=(), **options):
        with mock.patch.object(StepEngine, "close", lambda engine: engine.ranks.barrier()):
            summary = runs.train(build(QUICK | {"output_dir": f"{folder}/{name}"} | options), callbacks)
        return summary["train"]["final_loss"]

    sizes = GradientBytes()
    found["plain"] = train("plain", [sizes])
    found["gradient bytes"] = sizes.bytes
    holder = HoldsMore()
    memory = HeldMemory(holder, every=2, alert=0.999, imbalance=1.2)
    found["held"] = train("held", [holder, memory])
    found["alerts"] = memory.alerts
    tight = MemoryMonitor(every=4, alert=1e-4, imbalance=100.0)
    found["tight loss"] = train("tight", [tight])
    found["tight"] = tight.alerts
    found["all"] = train("all", memory_steps=4, communication_steps=3, profile_steps=2, profile_wait=1)
    train("pipeline", communication_steps=4, training_type="pipeline")
    train("too short", [Profiler(wait=20)])
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitored")
    return folder, launch(train_all, str(folder), num_processes=2, timeout=600)


def test_a_rank_that_holds_more_is_seen_and_said_once(trained):
    folder, (first, second) = trained
    table = pd.read_csv(folder / "held" / "monitor" / "memory.csv").pivot(index="step", columns="rank", values="mib")
    assert list(table.index) == [2, 4, 6, 8]
    apart = table[1] - table[0]
    assert apart.tolist() == [0, BALLAST_MIB, BALLAST_MIB, BALLAST_MIB]
    assert first["alerts"] == second["alerts"] and len(first["alerts"]) == 1
    assert first["alerts"][0]["step"] in (4, 6) and first["alerts"][0]["alert"].startswith("rank 1 holds")
    assert pd.read_csv(folder / "held" / "monitor" / "alerts.csv")["alert"].tolist() == [first["alerts"][0]["alert"]]


def test_a_threshold_is_reported_for_each_rank_once(trained):
    alerts = trained[1][0]["tight"]
    assert [each["alert"][:12] for each in alerts] == ["rank 0 holds", "rank 1 holds"]
    own = pd.read_csv(trained[0] / "all" / "monitor" / "memory.csv")["mib"]
    assert (own > 50).all(), "without a plant it is the process's resident memory, torch and all"
    assert all(each["step"] == 4 and "the threshold is 0%" in each["alert"] for each in alerts)


def test_the_share_of_communication_is_metered_on_every_rank_and_nothing_is_changed(trained):
    folder, (first, _) = trained
    table = pd.read_csv(folder / "all" / "monitor" / "communication.csv")
    assert table[["step", "rank"]].to_numpy().tolist() == [[3, 0], [3, 1], [6, 0], [6, 1]]
    assert table["communication"].between(1e-4, 1).all() and (table["exposed"] <= table["communication"]).all()
    assert table["mb_sent"].tolist() == pytest.approx([first["gradient bytes"] / 1e6] * 4, rel=0.01), (
        "an all-reduce on two ranks sends each gradient once"
    )
    assert first["all"] == first["plain"] == first["held"], "watching leaves the training as it is"
    piped = pd.read_csv(folder / "pipeline" / "monitor" / "communication.csv")
    assert len(piped) == 4 and (piped["mb_sent"] > 0).all()


def test_each_rank_leaves_a_trace(trained):
    folder = trained[0]
    for rank in (0, 1):
        (trace,) = (folder / "all" / "monitor").glob(f"rank-{rank}.*.pt.trace.json")
        names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
        assert {"aten::addmm", "ProfilerStep#2", "ProfilerStep#3"} <= names and "ProfilerStep#1" not in names
        assert any("allreduce" in name or "all_reduce" in name for name in names)
    assert not list((folder / "too short").glob("monitor/*.json"))


def test_the_config_switches_them_on():
    assert monitors(build(QUICK)) == []
    memory, communication, profiler = monitors(
        build(
            {"memory_steps": 5, "memory_alert": 0.5, "imbalance_alert": 2, "communication_steps": 7, "profile_steps": 3}
        )
    )
    assert isinstance(memory, MemoryMonitor) and isinstance(profiler, Profiler)
    assert (memory.every, memory.alert, memory.imbalance) == (5, 0.5, 2)
    assert isinstance(communication, CommunicationMonitor) and communication.every == 7
