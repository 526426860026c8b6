"""Lesson 18's experiment: link times by hand, and every way trained on real ranks, its messages counted."""

import math

import pytest

from course_lib.errors import LaunchError
from course_lib.launching.netns import in_own_network
from course_lib.lessons.communication import lab
from course_lib.lessons.slow_link import Link

STEPS, EVERY = 12, 6


def test_a_step_ends_when_its_messages_have_arrived_one_after_the_other():
    link = Link(latency=1.0, rate=10.0)
    assert lab.step_ends([[20], [], [10, 30]], link, compute=2.0) == [5.0, 7.0, 15.0]


@pytest.fixture(scope="module")
def runs():
    methods = [name for name in lab.METHODS if not name.startswith("hierarchical")]
    return lab.trainings(methods, 2, 200, steps=STEPS, sync_every=EVERY, seed=0, width=16, evaluate_every=EVERY)


def test_every_way_learns_and_sends_what_it_should(runs):
    elements = runs["all-reduce"].parameters
    for name, run in runs.items():
        assert sorted(run.losses) == [EVERY, STEPS] and len(run.messages) == len(run.cpu_seconds) == STEPS
        assert run.losses[STEPS] < math.log(256) and run.parameters == elements, name
    sent = {name: [sum(sizes) for sizes in run.messages] for name, run in runs.items()}
    assert sent["all-reduce"] == [4 * elements] * STEPS
    for name in ("LocalSGD", "DiLoCo"):
        assert sent[name] == [0, 0, 0, 0, 0, 4 * elements] * 2
    per_step = {name: run.bytes_per_step for name, run in runs.items()}
    assert per_step["DiLoCo, int4"] < per_step["DiLoCo"] / 7 and per_step["int4"] < per_step["int8"] / 1.8
    assert per_step["top-k, 1 %"] == pytest.approx(8 * elements / 100, rel=0.01)
    # Ways that differ differ: error feedback counts from the second step on, and the others change the step.
    assert len({run.losses[STEPS] for run in runs.values()}) == len(runs)


def test_seconds_and_the_first_step_below_a_loss(runs):
    run = runs["DiLoCo"]
    slow, fast = (run.seconds(Link(0.0, rate), compute=0.1)[-1] for rate in (1e5, 1e9))
    assert fast == pytest.approx(0.1 * STEPS, rel=1e-3)
    assert slow == pytest.approx(0.1 * STEPS + 2 * 4 * run.parameters / 1e5)
    assert run.first_below(run.losses[STEPS]) == STEPS and run.first_below(0.0) is None


def test_the_kernel_slows_the_ranks_network_down_or_says_why_not():
    options = {"steps": 1, "sync_every": 1, "seed": 0, "width": 16, "evaluate_every": 1}
    try:
        assert "tbf" in in_own_network(lab.limit_rate, 2e6) and "16Mbit" in in_own_network(lab.limit_rate, 2e6)
        run = lab.over_a_slow_network(1e6, ["all-reduce"], 2, 100, **options)["all-reduce"]
    except LaunchError as error:
        assert "tc" in str(error) or "network" in str(error)
        return
    assert sum(run.messages[0]) == 4 * run.parameters
