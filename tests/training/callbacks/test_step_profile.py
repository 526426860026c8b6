"""``profile`` on real ranks: one trace on one clock, a table that adds up, and the same training to the bit."""

import gzip
import json

import pytest
import torch

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.metering.step_spans import EXPOSED, HOST
from course_lib.training.callbacks import Callback
from course_lib.training.callbacks.monitoring import Profiler, monitors
from course_lib.training.callbacks.step_profile import NUMBERS, TABLE, TRACE, StepProfile
from tests.ranks import on_ranks
from tests.training import quick

STEPS = {"max_steps": 7, "logging_steps": 1}


class Seen(Callback):
    """Losses of all steps, and the weights at the end."""

    def on_train_begin(self, trainer):
        self.losses = []

    def on_log(self, trainer, line):
        self.losses += [line["loss"]] if "loss" in line else []

    def on_train_end(self, trainer):
        self.weights = [parameter.detach() for parameter in trainer.model.parameters()]


@on_ranks(2)
def test_the_training_is_the_same_to_the_bit(tmp_path):
    plain, profiled = Seen(), Seen()
    quick.train(tmp_path / "plain", [plain], **STEPS)
    quick.train(tmp_path / "profiled", [profiled], **STEPS, profile=True)
    assert profiled.losses == plain.losses and len(plain.losses) == 7
    torch.testing.assert_close(profiled.weights, plain.weights, rtol=0, atol=0)


def check_trace(events, phases):
    """Every rank is in it, on one clock."""
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    both = []
    for rank in (0, 1):
        own = [event for event in spans if event["pid"] == rank]
        assert [event["name"] for event in own if event["cat"] == "phase"] == phases * 3
        assert [event["name"] for event in own if event["cat"] == "step"] == ["step 4", "step 5", "step 6"]
        assert sum(event["name"] == "aten::addmm" for event in own) >= 3 * 2
        calls = [event for event in own if event["cat"] == "collective" and event["args"]["ranks"] == [0, 1]]
        both.append([call for call in calls if call["name"] in ("all_reduce", "all_gather", "reduce_scatter")])
    assert len(both[0]) >= 3
    for one, other in zip(*both, strict=True):  # no rank leaves one before all have come
        assert one["args"] == other["args"]
        assert max(one["ts"], other["ts"]) <= min(one["ts"] + one["dur"], other["ts"] + other["dur"])


def check_table(numbers, phases):
    """It adds up to the steps, and counts what was trained."""
    assert numbers["steps"] == [4, 5, 6] and [rank["rank"] for rank in numbers["ranks"]] == [0, 1]
    for rank in numbers["ranks"]:
        rows = rank["rows"]
        assert sum(row["seconds"] for row in rows) == pytest.approx(rank["seconds"], rel=1e-6)
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert rank["hidden"] <= rank["under_way"] <= rank["seconds"]
        groups = {(row["phase"], row["group"]): row for row in rows}
        assert groups["optimizer", "update"]["bytes"] > 0 and ("data", HOST) in groups
        for phase in {*phases} - {"data", "optimizer"}:
            products = groups[phase, "matrix products"]
            assert products["flops"] > 0 and products["floor"] > 0 and products["bound"], phase
        assert sum(row["bytes"] for row in rows if row["group"] == EXPOSED) > 0


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        ({}, ["data", "forward", "backward", "optimizer"]),
        (
            {"strategy": "fsdp", "gradient_accumulation_steps": 2, "num_epochs": 4},
            ["data", *["forward", "backward"] * 2, "optimizer"],
        ),
        ({"training_type": "pipeline", "num_epochs": 4}, ["data", "pipeline", "optimizer"]),
    ],
    ids=["ddp", "fsdp", "pipeline"],
)
def test_every_rank_is_in_the_trace_and_the_table_adds_up_to_the_steps(tmp_path, ranks, options, phases):
    ranks(2)(quick.train, tmp_path, **STEPS, profile=True, **options)
    monitor = tmp_path / "monitor"
    with gzip.open(monitor / TRACE) as file:
        check_trace(json.load(file)["traceEvents"], phases)
    check_table(json.loads((monitor / NUMBERS).read_text()), phases)
    table = (monitor / TABLE).read_text()
    assert "| whole step" in table and "clocks agree to" in table


@on_ranks(2)
def test_a_resumed_run_names_its_own_steps_and_one_that_is_too_short_has_none(tmp_path):
    quick.train(tmp_path / "cut", **STEPS, num_epochs=4, save_steps=7)
    more = {"max_steps": 14, "num_epochs": 4, "resume_from_checkpoint": "auto"}
    quick.train(tmp_path / "cut", **more, profile=True, profile_steps=2, profile_warmup=2)
    assert json.loads((tmp_path / "cut" / "monitor" / NUMBERS).read_text())["steps"] == [12, 13]
    quick.train(tmp_path / "short", profile=True, num_epochs=0.25)
    assert not (tmp_path / "short" / "monitor" / TRACE).exists()


def test_the_config_switches_it_on_or_says_what_is_missing():
    (profile,) = monitors(build({"profile": True}))
    assert isinstance(profile, StepProfile) and (profile.wait, profile.warmup, profile.active) == (2, 1, 3)
    (profile,) = monitors(build({"profile": True, "profile_steps": 1, "profile_wait": 3, "profile_warmup": 0}))
    assert (profile.wait, profile.warmup, profile.active) == (3, 0, 1)
    (old,) = monitors(build({"profile_steps": 1}))
    assert isinstance(old, Profiler)
    for options, cure in (
        ({"torch_compile": True}, {"profile": None, "profile_steps": "3"}),
        ({"profile_wait": 1}, {"profile_wait": "2"}),
        ({"max_steps": 5}, {"max_steps": "6"}),
    ):
        with pytest.raises(ConfigError) as refused:
            build({"profile": True} | options)
        assert refused.value.cure == cure
