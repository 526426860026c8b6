"""Writes grades as nbgrader's CSV, as JSON, and as HTML: a page per learner, and one for the class.

What a learner wrote is shown as text, never as markup.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from course_lib.grading.submissions import Submission
from course_lib.grading.task import Task
from course_lib.grading.verdict import Verdict
from course_lib.writing import write_text

UNSAFE = "These answers ran without a sandbox: the grades are only as trustworthy as the submissions."
BINS = 10
Grades = Mapping[str, Mapping[str, Verdict]]
"""Verdicts by learner and task."""

# nbgrader/plugins/export.py, ExportPlugin's order.
COLUMNS = (
    "assignment",
    "duedate",
    "timestamp",
    "student_id",
    "last_name",
    "first_name",
    "email",
    "raw_score",
    "late_submission_penalty",
    "score",
    "max_score",
)


def write_all(
    out: Path, grades: Grades, tasks: Mapping[str, Task], submissions: Sequence[Submission], *, isolated: bool
) -> None:
    """grades.csv, grades.json, learners/NAME.html and class.html in a folder."""
    _write_csv(out / "grades.csv", grades, tasks, submissions)
    _write_json(out / "grades.json", grades, submissions)
    notes = [] if isolated else [UNSAFE]
    problems = {submission.learner: submission.problems for submission in submissions}
    (out / "learners").mkdir(exist_ok=True)
    for learner, verdicts in grades.items():
        page = _PAGES.get_template("learner").render(
            title=learner,
            learner=learner,
            verdicts=verdicts,
            tasks=tasks,
            problems=problems[learner],
            notes=notes,
            points=sum(verdict.points for verdict in verdicts.values()),
            maximum=sum(verdict.maximum for verdict in verdicts.values()),
        )
        write_text(out / "learners" / f"{learner}.html", page)
    write_text(
        out / "class.html",
        _PAGES.get_template("class").render(
            title="The class", grades=grades, tasks=tasks, notes=notes, problems=problems, **_statistics(grades, tasks)
        ),
    )


def _write_csv(path: Path, grades: Grades, tasks: Mapping[str, Task], submissions: Sequence[Submission]) -> None:
    """One line per learner and lesson, with the columns that nbgrader exports; what is not known here is empty."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    stamps = {submission.learner: submission.stamps for submission in submissions}
    for learner, verdicts in grades.items():
        for lesson in dict.fromkeys(tasks[name].lesson for name in verdicts):
            own = [verdict for name, verdict in verdicts.items() if tasks[name].lesson == lesson]
            score, most = sum(verdict.points for verdict in own), sum(verdict.maximum for verdict in own)
            table.writerow(
                [_cell(text) for text in (lesson, "", stamps[learner].get(lesson, ""), learner, "", "", "")]
                + [score, 0, score, most]
            )
    write_text(path, out.getvalue())


def _cell(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _write_json(path: Path, grades: Grades, submissions: Sequence[Submission]) -> None:
    """Everything, by learner: points, problems of the submission, each task's verdict."""
    problems = {submission.learner: submission.problems for submission in submissions}
    data = {
        learner: {
            "points": sum(v.points for v in own.values()),
            "maximum": sum(v.maximum for v in own.values()),
            "problems": problems[learner],
            "tasks": {name: v.to_json() for name, v in own.items()},
        }
        for learner, own in grades.items()
    }
    write_text(path, json.dumps(data, indent=1) + "\n")


def _statistics(grades: Grades, tasks: Mapping[str, Task]) -> dict[str, Any]:
    """Distributions of the points, of the whole and of each task, and the properties by how many missed them."""
    whole = [
        _share(sum(v.points for v in own.values()), sum(v.maximum for v in own.values())) for own in grades.values()
    ]
    per_task = {name: [_share(own[name].points, own[name].maximum) for own in grades.values()] for name in tasks}
    missed = Counter(
        (name, prop)
        for own in grades.values()
        for name, verdict in own.items()
        for prop, score in verdict.scores.items()
        if score.said
    )
    return {
        "whole": _bins(whole),
        "per_task": {name: (sum(shares) / len(shares), _bins(shares)) for name, shares in per_task.items()},
        "missed": missed.most_common(20),
        "count": len(grades),
    }


def _share(points: int, maximum: int) -> float:
    return points / maximum if maximum else 0.0


def _bins(shares: Sequence[float]) -> list[int]:
    """Histogram of shares: how many lie in [0, 10 %), [10 %, 20 %), ..., [90 %, 100 %], and all points."""
    counts = Counter(int(share * BINS) for share in shares)
    return [counts[i] for i in range(BINS + 1)]


_BASE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0} caption{text-align:left;font-weight:600}
th,td{border-bottom:1px solid #ddd;padding:.3rem .7rem;text-align:left;vertical-align:top}
td{overflow-wrap:anywhere} .n{text-align:right} .note{background:#fff3cd;padding:.5rem 1rem}
.bars{display:flex;align-items:end;gap:3px;height:7rem} .bars div{width:3rem;text-align:center;font-size:12px}
.bars i{display:block;background:#3b6ea5}</style></head>
<body><h1>{{ title }}</h1>
{% for note in notes %}<p class="note">{{ note }}</p>{% endfor %}
{% block body %}{% endblock %}
</body></html>
"""

_BARS = """{% macro bars(counts) %}{% set most = [counts|max, 1]|max %}<div class="bars">
{% for each in counts %}<div>{{ each or "" }}<i style="height:{{ (90 * each / most)|round(1) }}px"></i>
{{ "all" if loop.last else (10 * loop.index0) ~ " %" }}</div>{% endfor %}</div>{% endmacro %}"""

_LEARNER = """{% extends "base" %}{% block body %}
<p><b>{{ points }}</b> of {{ maximum }} points</p>
{% for problem in problems %}<p class="note">{{ problem }}</p>{% endfor %}
{% for name, verdict in verdicts.items() %}
<table><caption>{{ tasks[name].title }} (<code>{{ name }}</code>): {{ verdict.points }} of {{ verdict.maximum }}
</caption><tr><th>property</th><th>points</th><th></th></tr>
{% for prop, score in verdict.scores.items() %}
<tr><td>{{ prop }}</td><td class="n">{{ score.points }} / {{ score.maximum }}</td>
<td>{{ score.said or "holds" }}</td></tr>
{% endfor %}</table>
{% endfor %}{% endblock %}
"""

_CLASS = """{% extends "base" %}{% from "bars" import bars %}{% block body %}
<p>{{ count }} learners, {{ tasks|length }} tasks. Each bar: learners by their share of the points.</p>
{{ bars(whole) }}
<h2>Properties most missed</h2>
<table><tr><th>task</th><th>property</th><th>learners</th></tr>
{% for (name, prop), number in missed %}<tr><td>{{ name }}</td><td>{{ prop }}</td>
<td class="n">{{ number }} ({{ (100 * number / count)|round|int }} %)</td></tr>{% endfor %}</table>
<h2>Tasks</h2>
{% for name, (mean, counts) in per_task.items() %}<h3>{{ tasks[name].title }} (<code>{{ name }}</code>):
{{ (100 * mean)|round|int }} % of the points on average</h3>{{ bars(counts) }}{% endfor %}
<h2>Learners</h2>
<table><tr><th>learner</th><th>points</th>{% for name in tasks %}<th>{{ name }}</th>{% endfor %}<th></th></tr>
{% for learner, own in grades.items() %}<tr><td>{{ learner }}</td>
<td class="n">{{ own.values()|sum(attribute="points") }} / {{ own.values()|sum(attribute="maximum") }}</td>
{% for name in tasks %}<td class="n">{{ own[name].points }}</td>{% endfor %}
<td>{{ problems[learner]|join("; ") }}</td></tr>{% endfor %}</table>
{% endblock %}
"""

_PAGES = jinja2.Environment(
    loader=jinja2.DictLoader({"base": _BASE, "bars": _BARS, "learner": _LEARNER, "class": _CLASS}),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)
