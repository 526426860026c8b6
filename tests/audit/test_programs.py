"""Trainings drawn at random: no alarm over right ones, and a planted mistake is caught, with no wrong claim."""

import pytest

from course_lib.audit import audit
from course_lib.errors import CourseError
from tests.audit.programs import EVERY, drawn, planted

FEW, MANY = 10, 200
OWN = ("not averaged", "not summed")
KINDS = {
    "other reduction": ["factor"],
    "left out": OWN,
    "sign": ["sign"],
    "one rank": [*OWN, "rank"],
    "swapped": ["another's"],
    "part lost": ["shard"],
    "missing": ["missing"],
    "weighed alike": ["weighed alike"],
    "transposed": ["transposed"],
    "exchanged": ["another rank's"],
    "tp sum missing": OWN,
    "batch left out": ["batch left out"],
}
"""By planted mistake, what it may be called."""


def right_ones(seeds):
    """What is wrong with the verdicts on right programs; what draws in a function is refused."""
    alarms = []
    for seed in seeds:
        program = drawn(seed)
        try:
            audited = audit(program, [program.layout], timeout=240)
        except CourseError as error:
            if program.dropout != "function" or "the step draws at random" not in str(error):
                alarms.append((seed, program, str(error)))
            continue
        if not audited.clean or program.dropout == "function" or bool(audited.notes) != (program.dropout == "module"):
            (verdict,) = audited.verdicts
            alarms.append((seed, program, verdict.told, verdict.losses_apart, verdict.weights))
    return alarms


def wrong_claims(program, verdict):
    """Sentences that name another parameter or axis than the planted one."""
    names, said = planted(program), []
    axes = set(program.layout.used)
    if program.fault in (*EVERY, "one rank"):
        axes -= {"tp"}
    elif program.fault in ("left out", "tp sum missing"):
        axes = {program.axis}
    for finding in verdict.wrong:
        if finding.kind == "unrelated":
            continue
        if (
            finding.kind not in KINDS[program.fault]
            or (names is not None and finding.name not in names)
            or (finding.axes and not axes & set(finding.axes))
        ):
            said.append(finding.sentence)
    return said


def faulty_ones(seeds):
    """Seeds whose mistake is not seen, and claims that are wrong."""
    missed, wrong = [], []
    for seed in seeds:
        program = drawn(seed, list(KINDS)[seed % len(KINDS)])
        (verdict,) = audit(program, [program.layout], timeout=240).verdicts
        names = planted(program)
        if not verdict.wrong or (names is not None and not names & {finding.name for finding in verdict.wrong}):
            missed.append((seed, program))
        wrong += [(seed, program, sentence) for sentence in wrong_claims(program, verdict)]
    return missed, wrong


def test_no_alarm_over_right_programs():
    assert not right_ones(range(FEW))


def test_a_planted_mistake_is_caught_and_nothing_else_is_claimed():
    missed, wrong = faulty_ones(range(len(KINDS)))
    assert not missed and not wrong


@pytest.mark.long
def test_no_alarm_over_two_hundred_right_programs():
    assert not right_ones(range(1000, 1000 + MANY))


@pytest.mark.long
def test_of_two_hundred_mistakes_nearly_all_are_caught_and_none_is_told_wrong():
    missed, wrong = faulty_ones(range(1000, 1000 + MANY))
    assert not wrong and len(missed) <= 10, missed
