"""What lesson 13 claims, measured anew with its default decisions; and what its rubric says of bad ones."""

import dataclasses
import json
import math

import pytest

from course_lib.cloud.job import Job, accelerators, estimate
from course_lib.config import flatten
from course_lib.errors import ConfigError
from course_lib.lessons.capstone import decisions, rehearsal
from course_lib.lessons.capstone import rubric as judged
from course_lib.lessons.capstone.rehearsal import Broken, Resumed, Tracked
from course_lib.tracking.base import RunInfo
from course_lib.tracking.jsonl import JsonLinesTracker
from tests.narrow_presets import narrow_presets  # noqa: F401
from tests.notebooks.conftest import says, stored

RENTED = {"model": "gpt2-xl", "dataset": "dair-ai/emotion", "max_length": 64, "learning_rate": 1e-5, "save_steps": 50}
DECISIONS = {
    "dataset": "tweets",
    "recipe": {"task": "classification", "learning_rate": 5e-4, "max_length": 32},
    "model": "tiny-bert",
    "strategy": "fsdp",
    "world_size": 2,
    "device": "cpu",
    "global_batch": 16,
    "steps": 16,
    "save_steps": 5,
    "kill_step": 13,
    "other": {"strategy": "ddp"},
    "seeds": [1, 2],
    "rows": 16_000,
    "rented": RENTED,
    "instance_type": "ml.g5.12xlarge",
    "instance_count": 1,
    "hours": 0.6,
    "budget": 5.0,
}


@pytest.fixture(scope="module")
def lesson(run_lesson, tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    return run_lesson(
        "13_capstone",
        output_dir=str(folder),
        model="tiny-bert",
        steps=10,
        save_steps=3,
        kill_step=8,
        other={"strategy": "ddp"},
    ) | {"folder": folder}


@pytest.fixture(scope="module")
def shown():
    """What the committed notebook shows, which was run with its own decisions."""
    return stored("13_capstone")


def test_the_plan_was_met_where_formulas_know_better_than_guesses(lesson):
    parameters = lesson["states_MiB"] * 2**20 / 8  # 16 bytes by 2 ranks
    assert lesson["sent_MB"] * 1e6 == pytest.approx(3 * 4 * parameters / 2, rel=judged.CLOSE)
    assert lesson["fits"] and lesson["layout"] == "FSDP"
    assert 0 < lesson["hours_planned"] < lesson["hours_at_worst"] <= 0.6


def test_the_yardstick_is_a_constant_that_knows_the_class_shares(lesson, shown):
    """Counted from the rows themselves: 655, 597 and 1,783 in training, 48, 44 and 108 of the 200 that are scored."""
    train, scored = (655, 597, 1783), (48, 44, 108)
    shares = [math.log((count + 1) / (sum(train) + 3)) for count in train]
    constant = -sum(n * share for n, share in zip(scored, shares, strict=True)) / 200
    for values, learned in ((lesson, "that it has learned anything"), (shown, "it has")):
        assert values["constant_loss"] == pytest.approx(constant, abs=1e-6)
        assert values["learned"] == (values["test_loss"] < values["loss_high"] < constant) == (values is shown)
        assert says(
            values,
            f"test loss is {values['test_loss']:.3f}, {values['loss_high']:.3f} at the upper end of "
            f"its interval, a constant's {constant:.3f}: {learned}",
        )
    assert lesson["test_loss"] < math.log(3), "a tiny model from scratch beats guessing only"
    assert shown["macro_f1_low"] > lesson["majority_macro_f1"] > 0


def test_it_was_killed_and_came_back_to_the_bit(lesson):
    assert lesson["checkpoint_left"] == "checkpoint-000006" and lesson["steps_lost"] == 2
    assert lesson["not_resumed_because"] == ""


def test_arms_that_differ_in_the_strategy_alone_learn_the_same_and_others_have_something_to_decide(lesson, shown):
    assert sorted(lesson["fields_that_differ"]) == ["seed", "strategy"]
    assert abs(lesson["gap"]) < judged.ROUNDING < lesson["spread_over_seeds"]
    assert says(lesson, "differ by rounding alone") and lesson["which_loss_is_lower"] == "the two are not told apart"
    assert sorted(shown["fields_that_differ"]) == ["learning_rate", "seed", "strategy"]
    assert min(abs(shown["gap"]), shown["error_of_the_gap"]) > judged.ROUNDING and says(shown, "standard errors of")


def test_the_page_says_what_the_notebook_recorded(lesson, shown):
    assert len(judged.CRITERIA) == shown["criteria_met"] and shown["not_met"] == {}
    (reason,) = lesson["not_met"].values()
    assert lesson["criteria_met"] == len(judged.CRITERIA) - 1 and "constant" in reason
    assert lesson["dollars_at_most"] == pytest.approx(7.09 * 0.6)
    written = (lesson["folder"] / judged.REPORT).read_text(encoding="utf-8")
    assert written.count("- [x] ") == lesson["criteria_met"] and "rank 1 was killed by SIGKILL" in written
    kept = json.loads((lesson["folder"] / judged.EVIDENCE).read_text(encoding="utf-8"))
    assert kept["project"]["seeds"] == [1, 2] and len(kept["runs"]) == 4


def record(first, last):
    return [(step, 1.0) for step in range(first, last + 1)]


def evidence(project, **changed):
    """What a project like the lesson's leaves, with a real plan and an invented run; and what is changed of it."""
    plan = decisions.plan_rented(project)
    job = None
    if plan.layout:
        config = decisions.rented_config(project, plan)
        gpus = accelerators(project.instance_type)
        priced = estimate(Job(config, project.instance_type, project.instance_count, gpus, max_hours=project.hours))
        job = judged.JobSubmission("slurm", "job.sbatch", priced.job, config.output.save_steps)
    runs = [
        Tracked(arm, seed, 256, 0.9 + seed / 100, 1.0, 70.0, 16.0, 9.0, 0.3)
        for seed in (1, 2)
        for arm in ("chosen", "other")
    ]
    good = {
        "rented": plan,
        "here": decisions.Here(16.0, 10.0, 300.0, 1.03, 3, 0.23),
        "runs": runs,
        "differing": ["strategy", "seed"],
        "broken": Broken("rank 1 was killed by SIGKILL", True, 13, "checkpoint-000010", 3, {1: 1.1}),
        "resumed": Resumed("", 1000, 0, record(1, 16)),
        "submitted": job,
    }
    return judged.Evidence(**good | changed)


def runs_with(arm="both", **changed):
    return [
        dataclasses.replace(run, **changed) if arm in ("both", run.arm) else run
        for run in evidence(decisions.Project.of(DECISIONS)).runs
    ]


LOST = Broken("rank 1 was killed by SIGKILL", True, 3, None, 3, {1: 1.1})
ALIVE = Broken("nothing: there is no step 99", False, 16, "checkpoint-000015", 1, {1: 1.1})
NOTHING_TO_SEND = {"fits", "ends_in_time", "bounded", "interruption_is_cheap"}
BAD = [  # decisions, what they leave, the criteria that fail, and a word of the reason
    ({"strategy": "ddp"}, dict, NOTHING_TO_SEND, "gpt2-xl does not fit on 4 x A10G"),
    ({"hours": 0.4}, dict, {"ends_in_time"}, "give it more hours"),
    ({}, lambda: {"runs": runs_with("chosen", states=13.0)}, {"states_predicted"}, "off by +23.1%"),
    ({}, lambda: {"runs": runs_with("chosen", sent=12.0)}, {"bytes_predicted"}, "off by -16.7%"),
    ({}, lambda: {"runs": runs_with("chosen", loss=1.05)}, {"learned"}, "no better than a constant"),
    ({}, lambda: {"runs": runs_with("chosen", loss_high=1.04)}, {"learned"}, "the 95 % interval over the scored rows"),
    ({}, lambda: {"runs": runs_with("chosen", macro_f1_low=0.2)}, {"learned"}, "may be as low as 0.20"),
    (
        {"kill_step": 3},
        lambda: {"broken": LOST, "resumed": Resumed("no whole checkpoint in broken")},
        {"survived", "exact"},
        "before the first checkpoint at step 5",
    ),
    ({"kill_step": 99}, lambda: {"broken": ALIVE}, {"survived", "exact"}, "there is no step 99"),
    ({}, lambda: {"resumed": Resumed("", 1000, 4, record(1, 16))}, {"exact"}, "deterministic"),
    ({}, lambda: {"resumed": Resumed("", 1000, 0, record(2, 16))}, {"exact"}, "misses steps"),
    ({}, lambda: {"resumed": Resumed("", 1000, 0, record(1, 13) + record(11, 16))}, {"exact"}, "or has one twice"),
    ({}, lambda: {"runs": runs_with("other", seed=7)}, {"fair", "error_known"}, "other seeds: [1, 2] and [7, 7]"),
    ({}, lambda: {"runs": runs_with("other", samples=512)}, {"fair"}, "[256, 256] and [512, 512] rows"),
    ({}, lambda: {"differing": ["strategy", "seed", "weight_decay"]}, {"fair"}, "differ in weight_decay too"),
    ({}, lambda: {"runs": runs_with()[:2]}, {"error_known"}, "two different seeds"),
    ({"budget": 3.0}, dict, {"bounded"}, "lower the hours"),
    ({"rented": RENTED | {"save_steps": 0}}, dict, {"interruption_is_cheap"}, "save_steps is 0"),
    ({"rented": RENTED | {"save_steps": 5000}}, dict, {"interruption_is_cheap"}, "save more often"),
]


def failed(project, proof):
    lines = {check.__name__: line for check, line in zip(judged.CRITERIA, judged.rubric(project, proof), strict=True)}
    return {name: line for name, line in lines.items() if not line.passed}


def test_good_evidence_passes():
    project = decisions.Project.of(DECISIONS)
    assert failed(project, evidence(project)) == {}


def test_every_criterion_is_failed_by_some_bad_decision():
    assert set().union(*(names for _, _, names, _ in BAD)) == {each.__name__ for each in judged.CRITERIA}


@pytest.mark.parametrize(("decided", "left", "names", "reason"), BAD)
def test_bad_decisions_fail_their_criteria_and_no_others(decided, left, names, reason):
    project = decisions.Project.of(DECISIONS | decided)
    shown = evidence(project, **left())
    lines = failed(project, shown)
    assert lines.keys() == names and any(reason in line.why for line in lines.values()), lines
    page = judged.report(project, shown)
    assert page.count("- [ ] ") == len(names) and reason in page


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({"chosen": (1.0, 1.1), "other": (1.0 + 1e-6, 1.1)}, "differ by rounding alone"),
        ({"chosen": (1.0, 1.1), "other": (1.02, 1.22)}, "0.07 nats apart, less than two standard errors of 0.05"),
        ({"chosen": (1.0, 1.2), "other": (1.05, 1.26)}, "the chosen arm's loss is 0.055 nats lower, more than two"),
        ({"chosen": (1.0, 1.2), "other": (0.95, 1.14)}, "the other arm's loss is 0.055 nats lower, more than two"),
        ({"chosen": (1.0,), "other": (1.2,)}, "without a second seed that has no standard error"),
    ],
)
def test_the_arms_are_compared_seed_by_seed(losses, said):
    """Far apart over seeds and close within each: the seeds' spread is no part of the difference's error."""
    runs = [
        Tracked(arm, seed, 256, loss, loss + 0.1, 70.0, 16.0, 9.0)
        for arm, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    assert said in judged.conclusion(runs) and "luck" not in judged.conclusion(runs)


@pytest.mark.parametrize("strategy", list(decisions.LAYOUTS))
def test_what_a_gpu_holds_at_least_is_less_than_what_the_planner_needs(strategy):
    rented = RENTED | {"model": "facebook/opt-1.3b"}
    project = decisions.Project.of(DECISIONS | {"strategy": strategy, "rented": rented})
    parameters = decisions.models.load("facebook/opt-1.3b", head=False).parameters
    least = decisions.states_at_least(project, parameters, 4)
    per_parameter = {"ddp": 16, "zero1": 4 + 12 / 4, "zero2": 2 + 14 / 4, "zero3": 16 / 4, "fsdp": 16 / 4}
    assert least == pytest.approx(per_parameter[strategy] * parameters)
    needed = decisions.plan_rented(project).needed
    assert (needed is None) == (strategy == "ddp") and (needed is None or least < needed)


def test_seeds_that_were_changed_are_found_in_what_the_trackers_kept(tmp_path):
    """The lesson's own way from tracked runs to the verdict, with the seed of one arm changed behind its back."""
    project = decisions.Project.of(DECISIONS | {"other": {"strategy": "ddp", "seed": 7}})
    configs = project.arms(tmp_path)
    assert [config.run.seed for config in configs] == [1, 7, 2, 7]
    for config in configs:
        name, kept = config.output_dir.name, config.output_dir / "tracking"
        tracker = JsonLinesTracker(RunInfo(name, name, "project", None, kept))
        tracker.start()
        tracker.store_init_configuration(flatten(config) | {"world_size": 2})
        for step in range(1, 17):
            tracker.log({"train/loss": 1.0, "train/seconds": step / 10, "train/samples_per_second": 160.0}, step)
        scores = {"test/loss": 1.0, "test/loss_high": 1.01, "test/macro_f1_low": 0.3}
        tracker.log({"capstone/states": 16.0, "capstone/sent": 9.0} | scores, 16)
        tracker.finish()
    runs, differing = rehearsal.read_back(tmp_path)
    assert differing == ["strategy", "seed"] and [run.samples for run in runs] == [256] * 4
    lines = failed(project, evidence(project, runs=runs, differing=differing))
    assert lines.keys() == {"fair", "error_known"} and "[1, 2] and [7, 7]" in lines["fair"].why


def test_the_job_is_the_rehearsed_run_but_for_what_was_declared():
    project = decisions.Project.of(DECISIONS)
    there = decisions.rented_config(project, decisions.plan_rented(project))
    here = flatten(project.config(there.output_dir))
    changed = {name for name, value in flatten(there).items() if value != here[name]}
    layout = {"batch_size", "torch_compile", "mixed_precision"}
    scale = {"max_steps", "max_eval_samples", "logging_steps", "device", "overwrite_output_dir"}
    assert changed == layout | scale | project.rented.keys()
    assert there.run.batch_size * there.run.gradient_accumulation_steps * 4 == project.global_batch


def test_an_arm_with_another_batch_sees_as_many_rows(tmp_path):
    configs = decisions.Project.of(DECISIONS | {"other": {"batch_size": 4}}).arms(tmp_path)
    assert [(config.run.batch_size, config.run.max_steps) for config in configs] == [(8, 16), (4, 32)] * 2
    accumulating = DECISIONS["recipe"] | {"gradient_accumulation_steps": 2}
    for config in decisions.Project.of(DECISIONS | {"recipe": accumulating}).arms(tmp_path):
        assert decisions.rows_of_a_step(config, 2) == 16 and config.run.max_steps == 16


@pytest.mark.parametrize(
    ("decided", "says"),
    [
        ({"strategy": "fdsp"}, "fsdp"),
        ({"global_batch": 15}, "global_batch 15 on 2 ranks"),
        ({"world_size": 1}, "two ranks or more"),
        ({"rented": {}}, "names no model"),
        ({"steps": 4}, "a run of 4 steps"),
        ({"other": {"batch_size": 80}}, "a run of 2 steps"),
        ({"other": {"strategi": "ddp"}}, "strategy"),
        ({"budget": None}, "no decision about budget"),
    ],
)
def test_impossible_decisions_are_refused_in_a_line(decided, says, tmp_path):
    made = {name: value for name, value in (DECISIONS | decided).items() if value is not None}
    with pytest.raises(ConfigError, match=says):
        decisions.Project.of(made).arms(tmp_path)
