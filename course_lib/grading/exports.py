"""Grades as other programs read them: nbgrader's CSV, JUnit's XML, JSON, Gradescope's results.json."""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from course_lib.grading.submissions import Submission
from course_lib.grading.task import Task
from course_lib.grading.verdict import Verdict
from course_lib.writing import write_text

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
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def by_lesson(tasks: Mapping[str, Task], verdicts: Mapping[str, Verdict]) -> dict[str, list[Verdict]]:
    """A learner's verdicts by the lesson of their tasks."""
    lessons: dict[str, list[Verdict]] = {}
    for name, verdict in verdicts.items():
        lessons.setdefault(tasks[name].lesson, []).append(verdict)
    return lessons


def write_csv(path: Path, grades: Grades, tasks: Mapping[str, Task], submissions: Sequence[Submission]) -> None:
    """One line per learner and lesson, with the columns that nbgrader exports; what is not known here is empty."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    stamps = {submission.learner: submission.stamps for submission in submissions}
    for learner, verdicts in grades.items():
        for lesson, own in by_lesson(tasks, verdicts).items():
            score, most = sum(verdict.points for verdict in own), sum(verdict.maximum for verdict in own)
            table.writerow(
                [_cell(text) for text in (lesson, "", stamps[learner].get(lesson, ""), learner, "", "", "")]
                + [score, 0, score, most]
            )
    write_text(path, out.getvalue())


def _cell(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def write_json(path: Path, grades: Grades, submissions: Sequence[Submission]) -> None:
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


def write_junit(path: Path, grades: Grades) -> None:
    """One suite per learner, one case per property."""
    root = ElementTree.Element("testsuites", name="course grade")
    for learner, verdicts in grades.items():
        scores = [score for verdict in verdicts.values() for score in verdict.scores.values()]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=learner,
            tests=str(len(scores)),
            errors="0",
            failures=str(sum(bool(score.said) for score in scores)),
            time=str(round(sum(v.seconds for v in verdicts.values()), 3)),
        )
        for name, verdict in verdicts.items():
            for prop, score in verdict.scores.items():
                case = ElementTree.SubElement(suite, "testcase", classname=name, name=prop)
                if score.said:
                    ElementTree.SubElement(case, "failure", message=_NO_XML.sub("?", score.said))
    ElementTree.indent(root)
    write_text(path, ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n")


def write_gradescope(folder: Path, grades: Grades, tasks: Mapping[str, Task]) -> None:
    """LEARNER.json in the form of Gradescope's results.json, one test per property.

    Source: https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format
    """
    folder.mkdir(exist_ok=True)
    for learner, verdicts in grades.items():
        tests = [
            {
                "name": f"{tasks[name].title}: {prop}",
                "score": score.points,
                "max_score": score.maximum,
                "status": "failed" if score.said else "passed",
                "output": score.said,
                "output_format": "text",
            }
            for name, verdict in verdicts.items()
            for prop, score in verdict.scores.items()
        ]
        data = {
            "score": sum(verdict.points for verdict in verdicts.values()),
            "execution_time": round(sum(verdict.seconds for verdict in verdicts.values())),
            "tests": tests,
        }
        write_text(folder / f"{learner}.json", json.dumps(data, indent=1) + "\n")
