"""The capstone's rubric: what was asked, whether the recorded evidence meets it, and the report to hand in."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from course_lib.lessons.capstone.decisions import Here, Project, Rented, planner_error
from course_lib.lessons.capstone.rehearsal import Broken, Resumed, Tracked, gap_and_error, table
from course_lib.tracking.sweeps import shown
from course_lib.writing import write_text

CLOSE = 0.15
"""Largest relative error of a prediction by formula."""
ROUNDING = 1e-4
"""Nats by which losses of the same updates may differ, made in other orders: the sums round differently."""
AT_RISK = 0.1
"""Share of the budget that one interruption may cost."""
REPORT, EVIDENCE = "report.md", "evidence.json"
GIB, MIB, MB = 2**30, 2**20, 1e6


@dataclass(frozen=True)
class JobSubmission:
    """The job for the rented machines, ready to be sent.

    Attributes:
        launcher: that it is for.
        file: in the project's folder with its script or its request.
        dollars: that it can cost at most, at list price.
        save_steps: optimizer steps between two of its checkpoints; 0: none.
    """

    launcher: str
    file: str
    dollars: float
    save_steps: int


@dataclass(frozen=True)
class Evidence:
    """Evidence that a project left.

    Attributes:
        rented: the plan for the rented machines.
        here: the plan for the ranks of this machine.
        runs: the compared ones, the undisturbed one among them.
        differing: fields of the config in which those differ.
        broken: the run that was killed.
        resumed: the same, gone on.
        submitted: None where no plan fits.
    """

    rented: Rented
    here: Here
    runs: Sequence[Tracked]
    differing: Sequence[str]
    broken: Broken
    resumed: Resumed
    submitted: JobSubmission | None


@dataclass(frozen=True)
class Criterion:
    """One line of the rubric.

    Attributes:
        asked: what the project has to show.
        passed: whether the evidence shows it.
        number: what decided.
        why: what was found; where it was not passed, what to change.
    """

    asked: str
    passed: bool
    number: str
    why: str


Verdict = tuple[bool, str, str]
"""Whether it is passed, the number that decided, and what was found or what to change."""
Judge = Callable[[Project, Evidence], Verdict]
CRITERIA: list[Callable[[Project, Evidence], Criterion]] = []
"""Every criterion, in the order of the project."""


def criterion(asked: str) -> Callable[[Judge], Callable[[Project, Evidence], Criterion]]:
    """Add a criterion: what is asked, and below it the function that judges."""

    def add(judge: Judge) -> Callable[[Project, Evidence], Criterion]:
        @functools.wraps(judge)
        def check(project: Project, evidence: Evidence) -> Criterion:
            return Criterion(asked, *judge(project, evidence))

        CRITERIA.append(check)
        return check

    return add


@criterion("The plan fits the rented machines")
def fits(project: Project, evidence: Evidence) -> Verdict:
    """Some layout of the project's strategy fits."""
    plan = evidence.rented
    if plan.needed is None or plan.capacity is None:
        return False, "no layout", plan.why
    return True, f"{plan.needed / GIB:.1f} of {plan.capacity / GIB:.1f} GiB", plan.why.rstrip(".")


@criterion("The run ends within its hours")
def ends_in_time(project: Project, evidence: Evidence) -> Verdict:
    """The planned hours, with the planner's known error, are within those after which the job is stopped."""
    plan = evidence.rented
    if plan.hours is None or plan.late is None:
        return False, "no plan", "nothing fits, so there is no time to plan"
    passed = plan.late <= project.hours
    said = "there is room for that" if passed else "give it more hours, fewer epochs, or faster machines"
    return (
        passed,
        f"{plan.hours:.2g} h planned, {plan.late:.2g} h at worst, of {project.hours:g} h",
        f"the planner is off by up to {planner_error():.1%} in nine of ten published runs; {said}",
    )


@criterion("Model states of a rank were predicted")
def states_predicted(project: Project, evidence: Evidence) -> Verdict:
    """The formula for model states came within :data:`CLOSE` of the meter."""
    return _predicted(chosen(evidence)[0].states, evidence.here.states, MIB, "MiB")


@criterion("Bytes that a rank sends were predicted")
def bytes_predicted(project: Project, evidence: Evidence) -> Verdict:
    """The formula for bytes sent came within :data:`CLOSE` of the meter."""
    return _predicted(chosen(evidence)[0].sent, evidence.here.sent, MB, "MB per step")


def _predicted(measured: float, planned: float, unit: float, name: str) -> Verdict:
    error = planned / measured - 1 if measured else math.inf
    passed = abs(error) <= CLOSE
    return (
        passed,
        f"{planned / unit:.4g} {name} predicted, {measured / unit:.4g} measured",
        f"off by {error:+z.1%}, and {CLOSE:.0%} is close"
        + ("" if passed else ": what does this engine do that the formula does not know?"),
    )


@criterion("Every run of your choice learned something")
def learned(project: Project, evidence: Evidence) -> Verdict:
    """Every chosen run beats what knows only how frequent the classes are, in loss and macro-F1, by their intervals."""
    runs, here = chosen(evidence), evidence.here
    worst = max(runs, key=lambda run: run.loss_high)
    number = (
        f"test loss {worst.loss:.3f} nats, {worst.loss_high:.3f} at the upper end of its interval, "
        f"{here.constant:.3f} for a constant"
    )
    scores = [run.macro_f1_low for run in runs if run.macro_f1_low is not None]
    if worst.loss >= here.constant:
        why = "no better than a constant that knows how frequent the answers are"
    elif worst.loss_high >= here.constant:
        why = "not told apart from a constant: the 95 % interval over the scored rows reaches it"
    elif here.majority_macro_f1 is not None and min(scores) <= here.majority_macro_f1:
        why = (
            f"macro-F1 may be as low as {min(scores):.2f}, and always answering the commonest class has "
            f"{here.majority_macro_f1:.2f}"
        )
    else:
        return True, number, "better than knowing only how frequent the answers are, by more than the rows' chance"
    return False, number, f"{why}: train for more steps, or change the learning rate or the model"


@criterion("A rank was killed, and a whole checkpoint was left")
def survived(project: Project, evidence: Evidence) -> Verdict:
    """A rank died by SIGKILL in the middle of the run, after a whole checkpoint."""
    broken = evidence.broken
    if not broken.killed:
        why = f"{broken.how}; choose one that the run has"
    elif broken.checkpoint is None:
        first = f"before the first checkpoint at step {project.save_steps}"
        why = f"{broken.how} at step {broken.step}, {first}; save more often"
    else:
        why = f"{broken.how}, and {broken.checkpoint} was left whole"
    return broken.killed and bool(broken.checkpoint), f"{broken.lost} of {broken.step} steps lost", why


@criterion("The resumed run ends with the undisturbed run's weights")
def exact(project: Project, evidence: Evidence) -> Verdict:
    """The resumed run has each step once, and ends with the undisturbed run's bytes."""
    resumed = evidence.resumed
    if resumed.problem:
        return False, "not resumed", resumed.problem
    if not evidence.broken.killed:
        return False, "not interrupted", "nothing was killed, so nothing was resumed"
    complete = [step for step, _ in resumed.record] == list(range(1, project.steps + 1))
    return (
        complete and resumed.differing == 0,
        f"{resumed.differing:,} of {resumed.bytes:,} bytes differ",
        ("each step was done once" if complete else "its record misses steps, or has one twice")
        + ("" if not resumed.differing else "; something is not in the checkpoint, or not deterministic"),
    )


@criterion("The comparison is fair")
def fair(project: Project, evidence: Evidence) -> Verdict:
    """Both arms have the same seeds and rows, and differ in what was declared alone."""
    seeds, samples = _by_arm(evidence.runs, "seed"), _by_arm(evidence.runs, "samples")
    declared = {*project.other, "seed", "max_steps"}
    problems = []
    if sorted(seeds["chosen"]) != sorted(seeds["other"]):
        problems.append(f"the arms have other seeds: {seeds['chosen']} and {seeds['other']}")
    if abs(sum(samples["chosen"]) - sum(samples["other"])) > len(seeds["chosen"]) * project.global_batch:
        problems.append(f"they saw {samples['chosen']} and {samples['other']} rows")
    if undeclared := [name for name in evidence.differing if name not in declared]:
        problems.append(f"they differ in {', '.join(undeclared)} too")
    return (
        not problems,
        f"seeds {seeds['chosen']} and {seeds['other']}",
        "; ".join(problems) or f"same seeds, same rows; only {', '.join(project.other)} differs",
    )


@criterion("The difference of the losses has a standard error")
def error_known(project: Project, evidence: Evidence) -> Verdict:
    """Each arm has two different seeds, so that the difference has a standard error."""
    fewest = min(len(set(seeds)) for seeds in _by_arm(evidence.runs, "seed").values())
    why = conclusion(evidence.runs) if fewest >= 2 else "run each arm with two different seeds or more"
    return fewest >= 2, f"different seeds per arm: {fewest}", why


@criterion("The job cannot cost more than the budget")
def bounded(project: Project, evidence: Evidence) -> Verdict:
    """The job's limit of hours bounds its bill within the budget."""
    job = evidence.submitted
    if job is None:
        return False, "no job", "nothing fits, so nothing is sent"
    passed = job.dollars <= project.budget
    return (
        passed,
        f"${job.dollars:,.2f} at most, of ${project.budget:,.2f}",
        f"{project.instance_count} x {project.instance_type} for {project.hours:g} hours"
        + ("" if passed else ": lower the hours, the instances, or the expectations"),
    )


@criterion(f"An interruption costs no more than {AT_RISK:.0%} of the budget")
def interruption_is_cheap(project: Project, evidence: Evidence) -> Verdict:
    """Rule: what lies between two checkpoints costs no more than :data:`AT_RISK` of the budget."""
    job = evidence.submitted
    if job is None or evidence.rented.step_seconds is None:
        return False, "no job", "nothing fits, so nothing is sent"
    if not job.save_steps:
        return False, "no checkpoints", 'save_steps is 0: give `rented` a "save_steps"'
    hours = job.save_steps * evidence.rented.step_seconds * (1 + planner_error()) / 3600
    dollars = hours * job.dollars / project.hours
    passed = dollars <= AT_RISK * project.budget
    why = f"{job.save_steps} steps lie between two checkpoints" + ("" if passed else ": save more often")
    return passed, f"${dollars:,.2f} at most", why


def rubric(project: Project, evidence: Evidence) -> list[Criterion]:
    """Judge a project by the evidence that it left."""
    return [check(project, evidence) for check in CRITERIA]


def chosen(evidence: Evidence) -> list[Tracked]:
    """The runs of the arm that the project chose."""
    return [run for run in evidence.runs if run.arm == "chosen"]


def _by_arm(runs: Sequence[Tracked], name: str) -> dict[str, list[int]]:
    return {arm: [getattr(run, name) for run in runs if run.arm == arm] for arm in ("chosen", "other")}


def conclusion(runs: Sequence[Tracked]) -> str:
    """Conclusion that the compared runs allow, in a sentence or two."""
    arms, (gap, error) = table(runs), gap_and_error(runs)
    ratio = arms.loc["other"] / arms.loc["chosen"]
    if abs(gap) <= ROUNDING and not error > ROUNDING:
        said = f"with the same seed the losses differ by rounding alone ({abs(gap):.1g} nats)"
    elif math.isnan(error):
        said = f"the losses are {abs(gap):.2g} nats apart, and without a second seed that has no standard error"
    elif abs(gap) <= 2 * error:
        said = f"the losses are {abs(gap):.2g} nats apart, less than two standard errors of {error:.2g}"
    else:
        said = (
            f"the {'other' if gap < 0 else 'chosen'} arm's loss is {abs(gap):.2g} nats lower, more than two "
            f"standard errors of {error:.2g}"
        )
    return (
        f"{said}; the other arm holds {ratio['states_MiB']:.2f} times the model states, sends "
        f"{ratio['sent_MB']:.2f} times the bytes per step, and is {ratio['samples_per_second']:.2f} times as fast "
        "here"
    )


def write_report(folder: Path, project: Project, evidence: Evidence) -> Path:
    """Write the page to hand in, and the evidence beside it as JSON."""
    write_text(folder / EVIDENCE, json.dumps({"project": asdict(project), **asdict(evidence)}, indent=1) + "\n")
    write_text(folder / REPORT, report(project, evidence))
    return folder / REPORT


def report(project: Project, evidence: Evidence) -> str:
    """The page, as Markdown."""
    lines = rubric(project, evidence)
    run, here, broken, job = chosen(evidence)[0], evidence.here, evidence.broken, evidence.submitted
    ended = evidence.resumed.problem or f"{evidence.resumed.differing:,} bytes of the final weights differ"
    sections = {
        "Decisions": _listed(asdict(project)),
        "Planned and measured here": [
            f"- model states of a rank: {here.states / MIB:.2f} MiB planned, {run.states / MIB:.2f} measured",
            f"- sent by a rank in a step: {here.sent / MB:.2f} MB planned, {run.sent / MB:.2f} measured",
            f"- rows per second: {here.samples_per_second:.0f} planned for a CPU that nobody measured, "
            f"{run.samples_per_second:.0f} measured",
        ],
        "Broken and resumed": [
            f"{broken.how}. Newest whole checkpoint: {broken.checkpoint or 'none'}; "
            f"{broken.lost} of {broken.step} steps lost. {ended}."
        ],
        "Compared": [f"The other arm is {shown(project.other)}: {conclusion(evidence.runs)}."],
        "Submitted": [
            f"{evidence.rented.layout} by {job.launcher}, in {job.file}." if job else "Nothing: no plan fits."
        ],
        "In my own words": [
            "What surprised me:",
            "",
            "What I would do with twice the budget:",
            "",
            "Which number here I trust least, and why:",
        ],
    }
    met = sum(line.passed for line in lines)
    page = [
        f"# {project.model} on {project.dataset}, for {project.rented['model']} on {project.instance_count} x "
        f"{project.instance_type}",
        "",
        f"{met} of {len(lines)} criteria are met.",
        "",
    ]
    page += [f"- [{'x' if line.passed else ' '}] **{line.asked}**: {line.number}; {line.why}." for line in lines]
    for heading, body in sections.items():
        page += ["", f"## {heading}", "", *body]
    return "\n".join(page) + "\n"


def _listed(values: Mapping[str, object]) -> list[str]:
    return [f"- {name}: {shown(value) if isinstance(value, Mapping) else value}" for name, value in values.items()]
