"""A slow link in virtual time: what an all-gather takes and what of it computation hides, to the microsecond."""

import functools
import itertools

import pytest

from course_lib.launching.launch import launch
from course_lib.lessons import slow_link
from course_lib.lessons.fsdp import overlap as overlap_lab
from course_lib.lessons.fsdp.lab import sizes, small_gpt2
from course_lib.lessons.slow_link import Link, timeline
from tests.virtual_time import VirtualTime

LAYERS, LINK, BLOCK = 4, 0.7, 1.0


def timed_model(forward, backward):
    """A builder of a model whose blocks compute so long, in virtual time, by the link's clock too."""
    virtual = VirtualTime()
    slow_link.time = virtual.module()

    def build():
        model = small_gpt2(LAYERS, 32)
        for block in model.transformer.h:
            block.register_forward_hook(lambda *_: virtual.sleep(forward))
            block.register_full_backward_hook(lambda *_: virtual.sleep(backward))
        return model

    return build


def steps():
    """Both ways on this rank: blocks take a second forwards, and as long backwards; nothing else takes any time."""
    timed = timed_model(BLOCK, BLOCK)
    return [overlap_lab.over_slow_link(timed, 1, Link(LINK), prefetch, tries=1) for prefetch in (False, True)]


def test_prefetch_hides_all_gathers_but_three():
    for waiting, hiding in launch(steps, num_processes=2, timeout=400, device="cpu"):
        assert [len(waits.spans) for waits in (waiting, hiding)] == [2 * LAYERS + 1, 3]
        assert waiting.waited == pytest.approx((2 * LAYERS + 1) * LINK) and hiding.waited == pytest.approx(3 * LINK)


def disturbed_steps():
    """Three steps with prefetch, in the second of which the link is ten times as slow."""
    slow_link.time = VirtualTime().module()
    links = iter((LINK, 10 * LINK, LINK))
    slow_down = overlap_lab.OverSlowLink.slow_down
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_lab.OverSlowLink, "slow_down", lambda engine, *_: slow_down(engine, Link(next(links))))
        return overlap_lab.over_slow_link(functools.partial(small_gpt2, LAYERS, 32), 1, Link(LINK), True, tries=3)


def test_every_step_is_told_and_the_median_is_shown():
    for waits in launch(disturbed_steps, num_processes=2, timeout=400, device="cpu"):
        assert len(waits.of_all) == 3 and max(waits.of_all) == waits.of_all[1] > waits.waited
        assert waits.waited == sorted(waits.of_all)[1]


@pytest.mark.parametrize(("forward", "gather"), [(1.0, 0.5), (1.0, 1.0), (0.1, 1.0)])
def test_on_paper_prefetch_hides_what_a_block_is_long_enough_to_hide(forward, gather):
    without, with_it = (timeline(3, forward, gather, 0.0, prefetch) for prefetch in (False, True))
    assert without.end == pytest.approx(9 * forward + 6 * gather) and without.waited == pytest.approx(6 * gather)
    hidden = 2 * max(0.0, gather - forward) + 2 * max(0.0, gather - 2 * forward)
    assert with_it.waited == pytest.approx(2 * gather + hidden), "the first of each direction, and what sticks out"
    assert sum(what == "gather" for what, *_ in with_it.link) == 7


def messages_do_not_overlap(spans):
    return all(one[3] <= other[2] + 1e-12 for one, other in itertools.pairwise(spans))


def test_on_paper_the_link_carries_one_message_after_the_other():
    for prefetch in (False, True):
        drawn = timeline(4, 1.0, 0.8, 0.8, prefetch, root=0.3)
        assert messages_do_not_overlap(drawn.link) and messages_do_not_overlap(drawn.compute)
        assert [what for what, *_ in drawn.link].count("reduce") == 5


def real_and_paper(forward, link):
    """A step over a link in virtual time, and the same on paper, with reduce-scatters, for both ways."""
    timed = timed_model(forward, 2 * forward)
    bill = sizes(timed())
    pairs = []
    for prefetch in (False, True):
        real = overlap_lab.over_slow_link(timed, 1, link, prefetch, tries=1, reductions=True)
        gather, root = link.seconds(bill.block / 2), link.seconds(bill.root / 2)
        pairs.append((real.waited, timeline(bill.blocks, forward, gather, gather, prefetch, root).waited))
    return pairs


@pytest.mark.parametrize("forward", [0.05, 1.0, 4.0])
def test_the_engine_waits_as_long_as_on_paper(forward):
    """A slow link, one that is as quick as a block, and a quick one; the engine asks and waits in the paper's order."""
    link = Link(0.1, sizes(small_gpt2(LAYERS, 32)).block / 2 / 0.9)  # a block's gather takes 1 s
    for (waited, paper), (waited_less, paper_less) in launch(
        real_and_paper, forward, link, num_processes=2, timeout=400, device="cpu"
    ):
        assert [waited, waited_less] == pytest.approx([paper, paper_less], abs=1e-4), "the clock counts microseconds"
        assert waited_less < waited
