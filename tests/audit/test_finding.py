"""What was wrong in other projects, found and named: parameter, kind, factor, axis."""

import functools

import pytest

from course_lib.audit import Layout, audit
from tests.audit import upstream
from tests.long_cases import some

FIRST = {(told.kind, told.axes): told for told in reversed(upstream.TOLD)}
"""Of each kind of mistake along each axis the first: `make test` has these."""


@pytest.mark.parametrize("told", some(upstream.TOLD, *FIRST.values()), ids=lambda told: told.where.replace(" ", ""))
def test_it_is_named(told):
    (verdict,) = audit(told.make, [told.layout], timeout=240).verdicts
    found = {finding.name: (finding.kind, finding.axes) for finding in verdict.wrong}
    expected = dict.fromkeys(told.names, (told.kind, told.axes))
    assert found == expected | {name: found.get(name) for name in told.follows}
    if told.factor:
        factors = {finding.name: finding.factor for finding in verdict.wrong}
        assert factors == pytest.approx(dict.fromkeys(told.names, told.factor), rel=1e-9)


RIGHT = [
    (upstream.mixture, Layout(dp=2, ep=3)),
    (upstream.mixture, Layout(ep=2)),
    (upstream.in_context, Layout(dp=2, cp=4)),
    (functools.partial(upstream.tied_ends, summed=True), Layout(pp=2, dp=2)),
    (functools.partial(upstream.second_use_left_out, left_out=False), Layout(dp=2)),
    (upstream.accumulating, Layout(dp=2)),
    (functools.partial(upstream.sequence_parallel_norm, summed=True), Layout(tp=2)),
]


@pytest.mark.parametrize(("make", "layout"), RIGHT)
def test_the_same_trainings_without_the_mistakes_raise_no_alarm(make, layout):
    (verdict,) = audit(make, [layout], timeout=240).verdicts
    assert [finding.sentence for finding in verdict.wrong] == []
