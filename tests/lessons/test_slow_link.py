"""A slow link in virtual time: what an all-gather takes and what of it computation hides, to the microsecond."""

import functools

import pytest

from course_lib.launching.launch import launch
from course_lib.lessons import fsdp_lab as lab
from course_lib.lessons import slow_link
from tests.virtual_time import VirtualTime

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
LAYERS, LINK, BLOCK = 4, 0.7, 1.0


def steps():
    """Both ways on this rank: blocks take a second forwards, and as long backwards; nothing else takes any time."""
    virtual = VirtualTime()
    slow_link.time = virtual.module()
    build = functools.partial(lab.small_gpt2, LAYERS, 32)

    def timed():
        model = build()
        for block in model.transformer.h:
            block.register_forward_hook(lambda *_: virtual.sleep(BLOCK))
            block.register_full_backward_hook(lambda *_: virtual.sleep(BLOCK))
        return model

    return [lab.over_slow_link(timed, 1, LINK, prefetch, tries=1) for prefetch in (False, True)]


def test_prefetch_hides_all_gathers_but_three():
    for waiting, hiding in launch(steps, num_processes=2, timeout=100, device="cpu"):
        assert [len(waits.spans) for waits in (waiting, hiding)] == [2 * LAYERS + 1, 3]
        assert waiting.waited == pytest.approx((2 * LAYERS + 1) * LINK) and hiding.waited == pytest.approx(3 * LINK)


def disturbed_steps():
    """Three steps with prefetch, in the second of which the link is ten times as slow."""
    slow_link.time = VirtualTime().module()
    links = iter((LINK, 10 * LINK, LINK))
    slow_down = lab.OverSlowLink.slow_down
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab.OverSlowLink, "slow_down", lambda engine, link: slow_down(engine, next(links)))
        return lab.over_slow_link(functools.partial(lab.small_gpt2, LAYERS, 32), 1, LINK, True, tries=3)


def test_every_step_is_told_and_the_median_is_shown():
    for waits in launch(disturbed_steps, num_processes=2, timeout=100, device="cpu"):
        assert len(waits.of_all) == 3 and max(waits.of_all) == waits.of_all[1] > waits.waited
        assert waits.waited == sorted(waits.of_all)[1]
