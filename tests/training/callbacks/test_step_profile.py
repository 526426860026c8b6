"""``profile`` on real ranks: one trace on one clock, a table that adds up, and the same training to the bit."""

import gzip
import json
from unittest import mock

import pytest
import torch

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.metering.step_spans import EXPOSED, HOST
from course_lib.metering.storages import local_tensors
from course_lib.training import run as runs
from course_lib.training.callbacks import Callback
from course_lib.training.callbacks.monitoring import Profiler, monitors
from course_lib.training.callbacks.step_profile import NUMBERS, TABLE, TRACE, StepProfile
from course_lib.training.engines.base import StepEngine
from tests.training.callbacks import quick

QUICK = quick.QUICK | {"max_steps": 7, "logging_steps": 1}
PROFILE = QUICK | {"profile": True}


class Seen(Callback):
    """Losses of all steps, and the weights at the end."""

    def on_train_begin(self, trainer):
        self.losses = []

    def on_log(self, trainer, line):
        self.losses += [line["loss"]] if "loss" in line else []

    def on_train_end(self, trainer):
        self.weights = torch.cat(
            [part.detach().flatten() for p in trainer.model.parameters() for part in local_tensors(p)]
        )


def train_all(folder: str) -> dict:
    """Runs one after another; gives the losses and weights of each."""
    kept = {}

    def train(name, **options):
        seen = Seen()
        with mock.patch.object(StepEngine, "close", lambda engine: engine.ranks.barrier()):
            runs.train(build(QUICK | {"output_dir": f"{folder}/{name}"} | options), [seen])
        kept[name] = seen.losses, seen.weights

    train("plain")
    train("profiled", profile=True)
    train("cut", max_steps=7, num_epochs=4, save_steps=7)
    train(
        "resumed",
        max_steps=14,
        num_epochs=4,
        profile=True,
        profile_steps=2,
        profile_warmup=2,
        resume_from_checkpoint="auto",
        output_dir=f"{folder}/cut",
    )
    train("fsdp", profile=True, strategy="fsdp", gradient_accumulation_steps=2, num_epochs=4)
    train("pipeline", profile=True, training_type="pipeline", num_epochs=4)
    train("too short", profile=True, num_epochs=0.25, max_steps=None)
    return kept


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled")
    return folder, launch(train_all, str(folder), num_processes=2, timeout=600)


def read(folder):
    monitor = folder / "monitor"
    with gzip.open(monitor / TRACE) as file:
        return json.load(file)["traceEvents"], json.loads((monitor / NUMBERS).read_text())


def test_the_training_is_the_same_to_the_bit(trained):
    for kept in trained[1]:
        assert kept["plain"][0] == kept["profiled"][0] and len(kept["plain"][0]) == 7
        assert torch.equal(kept["plain"][1], kept["profiled"][1])


def test_every_rank_is_in_the_trace_on_one_clock(trained):
    for name, phases in (
        ("profiled", ["data", "forward", "backward", "optimizer"] * 3),
        ("fsdp", ["data", *["forward", "backward"] * 2, "optimizer"] * 3),
        ("pipeline", ["data", "pipeline", "optimizer"] * 3),
    ):
        events, _ = read(trained[0] / name)
        spans = [event for event in events if event["ph"] == "X"]
        calls = []
        for rank in (0, 1):
            own = sorted((event for event in spans if event["pid"] == rank), key=lambda event: event["ts"])
            assert [event["name"] for event in own if event["cat"] == "phase"] == phases
            assert [event["name"] for event in own if event["cat"] == "step"] == ["step 4", "step 5", "step 6"]
            assert sum(event["name"] == "aten::addmm" for event in own) >= 3 * 2
            calls.append([event for event in own if event["cat"] == "collective"])
        both = [
            [
                call
                for call in own
                if call["args"]["ranks"] == [0, 1] and call["name"] in ("all_reduce", "all_gather", "reduce_scatter")
            ]
            for own in calls
        ]
        assert len(both[0]) == len(both[1]) >= 3
        for one, other in zip(*both, strict=True):  # no rank leaves one before all have come
            assert one["args"] == other["args"]
            assert max(one["ts"], other["ts"]) <= min(one["ts"] + one["dur"], other["ts"] + other["dur"])


def test_the_table_adds_up_to_the_steps_and_counts_what_was_trained(trained):
    for name in ("profiled", "fsdp", "pipeline"):
        _, numbers = read(trained[0] / name)
        assert numbers["steps"] == [4, 5, 6] and [rank["rank"] for rank in numbers["ranks"]] == [0, 1]
        for rank in numbers["ranks"]:
            rows = rank["rows"]
            assert sum(row["seconds"] for row in rows) == pytest.approx(rank["seconds"], rel=1e-6)
            assert sum(row["share"] for row in rows) == pytest.approx(1)
            assert rank["hidden"] <= rank["under_way"] <= rank["seconds"]
            groups = {(row["phase"], row["group"]): row for row in rows}
            assert groups["optimizer", "update"]["bytes"] > 0 and ("data", HOST) in groups
            phases = ("pipeline",) if name == "pipeline" else ("forward", "backward")
            products = [groups[phase, "matrix products"] for phase in phases]
            assert all(row["flops"] > 0 and row["floor"] > 0 and row["bound"] for row in products)
            assert sum(row["bytes"] for row in rows if row["group"] == EXPOSED) > 0
        text = (trained[0] / name / "monitor" / TABLE).read_text()
        assert "| whole step" in text and "clocks agree to" in text


def test_a_resumed_run_names_its_own_steps(trained):
    _, numbers = read(trained[0] / "cut")
    assert numbers["steps"] == [12, 13] and not (trained[0] / "too short" / "monitor" / TRACE).exists()


def test_the_config_switches_it_on_or_says_what_is_missing():
    (profile,) = monitors(build(PROFILE))
    assert isinstance(profile, StepProfile) and (profile.wait, profile.warmup, profile.active) == (2, 1, 3)
    (profile,) = monitors(build(PROFILE | {"profile_steps": 1, "profile_wait": 3, "profile_warmup": 0}))
    assert (profile.wait, profile.warmup, profile.active) == (3, 0, 1)
    (old,) = monitors(build(QUICK | {"profile_steps": 1}))
    assert isinstance(old, Profiler)
    for options, cure in (
        ({"torch_compile": True}, {"profile": None, "profile_steps": "3"}),
        ({"profile_wait": 1}, {"profile_wait": "2"}),
        ({"max_steps": 5}, {"max_steps": "6"}),
    ):
        with pytest.raises(ConfigError) as refused:
            build(PROFILE | options)
        assert refused.value.cure == cure
