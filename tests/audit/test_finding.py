"""What was wrong in other projects, found and named: parameter, kind, factor, axis."""

import pytest

from course_lib.audit import Layout, audit
from tests.audit import upstream
from tests.long_cases import some

FIRST = {(told.kind, told.axes): told for told in reversed(upstream.TOLD)}
"""Of each kind of mistake along each axis the first: `make test` has these."""


@pytest.mark.parametrize("told", some(upstream.TOLD, *FIRST.values()), ids=lambda told: told.where.replace(" ", ""))
def test_it_is_named(told):
    (verdict,) = audit(told.make, [told.layout], timeout=240).verdicts
    wrong = {finding.name: finding for finding in verdict.wrong}
    assert set(wrong) == told.names | told.follows, [finding.sentence for finding in verdict.wrong]
    for finding in (wrong[name] for name in told.names):
        assert (finding.kind, finding.axes) == (told.kind, told.axes), finding.sentence
        assert finding.factor == (pytest.approx(told.factor, rel=1e-9) if told.factor else finding.factor)


def test_the_same_trainings_without_the_mistakes_raise_no_alarm():
    for make, layout in (
        (upstream.mixture, Layout(dp=2, ep=3)),
        (upstream.mixture, Layout(ep=2)),
        (upstream.in_context, Layout(dp=2, cp=4)),
        (upstream.tensor_parallel, Layout(dp=2, tp=3)),
        (lambda layout: upstream.tied_ends(layout, summed=True), Layout(pp=2, dp=2)),
        (lambda layout: upstream.second_use_left_out(layout, False), Layout(dp=2)),
        (upstream.Accumulating(keeps_last=False), Layout(dp=2)),
        (lambda layout: upstream.sequence_parallel_norm(layout, summed=True), Layout(tp=2)),
    ):
        (verdict,) = audit(make, [layout], timeout=240).verdicts
        assert not verdict.wrong, [finding.sentence for finding in verdict.wrong]
