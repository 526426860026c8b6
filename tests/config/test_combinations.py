"""The table of combinations: each row is told, its cure is one, and what no row names trains on real ranks."""

import re

import pytest

from course_lib.commands.explain import explained
from course_lib.config import build, combinations, option, options
from course_lib.config.axes import WHOLE_BACKWARD
from course_lib.config.combinations import PLAIN
from course_lib.config.refusals import REFUSALS
from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.actions import I
from course_lib.parallel.pipeline.fitted.search import uniform
from tools import combinations as tools

TRAINABLE = {"task": "causal_lm", "tracker": "jsonl"}


def refused(given):
    try:
        build(given)
    except ConfigError as error:
        return error
    return None


def told_by(row):
    """Runs that the row is the first to refuse, with its line."""
    for example in row.examples():
        given = TRAINABLE | example
        leaves = PLAIN | given
        leaves["engine"] = given.get("engine") or combinations.default_engine(leaves)
        if combinations.refusal(leaves) is row:
            yield given, refused(given)


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: " + ".join(row.axes)[:60])
def test_every_row_is_told_in_one_line_and_its_cure_is_one(row):
    told = list(told_by(row))
    assert told, "another row is always told before it"
    for given, error in told:
        assert error is not None and "\n" not in str(error) and "{" not in str(error)
        assert error.what.startswith(row.why.partition("{")[0])
        if error.cure:
            cured = {name: value for name, value in (given | error.cure).items() if value is not None}
            assert refused(cured) is None, (given, error.cure)
        # "use --strategy fsdp --engine torch, or …": what the first clause names is a run
        use = error.instead if error.instead.startswith("use ") else ""
        named = re.findall(r"--(\w+) (\w+)", use.split(", ")[0].split(" or --")[0])
        named = [(name, value) for name, value in named if value in option(name).choices]
        if named:
            assert refused({**given, **dict(named)}) is None, (given, error.instead)


def test_a_run_that_chooses_nothing_is_one_of_the_defaults():
    defaults = {o.name: o.default for o in options()}
    assert {name: defaults[name] for name in PLAIN} == {**PLAIN, "task": "classification"}


def test_the_page_shows_the_table_and_explain_reads_it():
    text = tools.PAGE.read_text(encoding="utf-8")
    assert text.split(tools.BEGIN)[1].split(tools.END)[0].strip() == tools.page()
    told = explained("expert_parallel_size", 4000)
    assert "zero3, fsdp (torch)" in told and "ddp, zero1, communication" not in told
    assert "sequence_parallel, context_parallel_size: expert_parallel_size is for ranks with" in told
    assert "with      " not in explained("seed", 4000)


def test_what_no_engine_has_is_refused_before_anything_else():
    with pytest.raises(ConfigError, match="engine deepspeed has no ddp: for ddp use torch, scratch"):
        build({"engine": "deepspeed"})
    with pytest.raises(ConfigError, match="offload optimizer is not in engine scratch with fsdp"):
        build({"strategy": "fsdp", "engine": "scratch", "offload": "optimizer"})  # was taken, and ignored


def test_the_schedules_that_split_the_backward_are_those_whose_tables_do():
    whole = set()
    for name in option("schedule").choices:
        if all(action.kind != I for row in uniform(name, 2, 8).rows for action in row):
            whole.add(name)
    assert whole == {*WHOLE_BACKWARD}


@pytest.mark.parametrize(
    ("given", "engine"),
    [
        ({}, "torch"),
        ({"strategy": "zero2"}, "deepspeed"),
        ({"strategy": "zero2", "tensor_parallel_size": 2}, "scratch"),
        ({"strategy": "zero3", "expert_parallel_size": 2}, "torch"),
        ({"training_type": "pipeline"}, "scratch"),
        ({"training_type": "pipeline", "strategy": "fsdp"}, "torch"),
        ({"communication": "int8"}, "scratch"),
        ({"strategy": "zero2", "context_parallel_size": 2, "task": "causal_lm"}, "deepspeed"),
    ],
)
def test_the_default_engine_is_the_first_that_has_the_layout(given, engine):
    assert build(given).parallel.chosen_engine == engine


def test_what_is_watched_does_not_change_the_engine():
    with pytest.raises(ConfigError, match="the gradients of zero2 are in flat buffers of the engine deepspeed"):
        build({"strategy": "zero2", "watch": "gradients"})
