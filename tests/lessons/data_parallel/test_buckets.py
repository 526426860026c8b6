"""Buckets over a slow link: on paper by hand, and the engine in virtual time, to the microsecond."""

import pytest

from course_lib.launching.launch import launch
from course_lib.lessons import slow_link
from course_lib.lessons.data_parallel import buckets as bucket_lab
from course_lib.lessons.data_parallel.buckets import Sent, on_paper
from course_lib.lessons.slow_link import Link
from tests.virtual_time import VirtualTime

LAYERS, WIDTH, BLOCK = 4, 64, 1.0
WAYS = {"one per parameter": 1, "a few": 150_000, "one": 2**40}


def test_a_bucket_leaves_when_it_is_full_and_the_one_before_it_has_arrived():
    link = Link(0.5, 10.0)
    assert on_paper([Sent(1.0, 10), Sent(4.0, 20)], 4.0, link) == 4.0 + 2.5, "the link waits for the second"
    assert on_paper([Sent(1.0, 40), Sent(2.0, 20)], 4.0, link) == 1.0 + 4.5 + 2.5, "the second waits for the link"
    assert on_paper([Sent(1.0, 10)], 4.0, link) == 4.0, "all hidden"


def backwards():
    """Each block's backward takes a second, and nothing else any time."""
    virtual = VirtualTime()
    slow_link.time = bucket_lab.time = virtual.module()
    gpt2 = bucket_lab.gpt2

    def timed(*shape):
        model = gpt2(*shape)
        for block in model.transformer.h:
            block.register_full_backward_hook(lambda *_: virtual.sleep(BLOCK))
        return model

    bucket_lab.gpt2 = timed
    return bucket_lab.buckets_over_link(WAYS, LAYERS, WIDTH, 4, tries=1)


def test_the_engine_takes_as_long_as_on_paper_and_a_few_buckets_win():
    for ran in launch(backwards, num_processes=2, timeout=400, device="cpu"):
        assert [ran[name].backward for name in WAYS] == pytest.approx([LAYERS * BLOCK] * 3)
        link = ran["one"].link
        assert link.latency == pytest.approx(bucket_lab.LATENCY * LAYERS * BLOCK)
        assert link.seconds(ran["one"].buckets[0].size) == pytest.approx((0.8 + 0.02) * LAYERS)
        for run in ran.values():
            assert run.link == link and run.steps == pytest.approx([run.on_paper], abs=1e-3)
            assert sum(bucket.size for bucket in run.buckets) == ran["one"].buckets[0].size
        assert ran["one"].seconds == pytest.approx(1.82 * LAYERS, abs=1e-3)
        assert len(ran["one per parameter"].buckets) == 12 * LAYERS + 4
        assert ran["a few"].seconds < 0.8 * min(ran["one"].seconds, ran["one per parameter"].seconds)
