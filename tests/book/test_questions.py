"""The lessons' questions on their pages: each is asked, and what was found is not in sight before its answer."""

import json
import re
from html import unescape
from pathlib import Path

import nbformat
import pytest

from book import course_contents, questions
from book.stored_questions import QUESTION, RECORD, questions_of
from course_lib.grading.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))


def stored(path):
    return nbformat.read(path, as_version=4).cells


def text_of(output):
    """What a page shows of an output, without its marks."""
    shown = [output.get("text", "")] + [
        content
        for kind, content in output.get("data", {}).items()
        if kind in ("text/html", "text/plain", "image/svg+xml")
    ]
    return unescape(re.sub(r"<style.*?</style>|<[^>]*>", "", "\n".join(shown), flags=re.DOTALL)).strip()


def in_sight(cells):
    """What a page shows where no question is answered: texts of cells in their order, by what questions.js hides."""
    for cell in cells:
        if cell.cell_type == "markdown":
            yield re.sub(r"<div class='waits'.*?</div>", "", cell.source, flags=re.DOTALL)
            continue
        outputs = cell.get("outputs", [])
        texts = [output.get("data", {}).get("text/html", "") for output in outputs]
        marks = [mark for html in texts for mark in re.findall(r"class='waits-mark'[^>]*data-hides='(\w+)'", html)]
        if "cell" in marks:
            continue
        if "hide-input" not in cell.metadata.get("tags", []):
            yield cell.source
        for output, html in zip(outputs, texts, strict=True):
            if "class='question'" in html:
                yield unescape(re.sub(r"<[^>]*>", "", html.partition("<details")[0]))
            elif not marks and "class='waits'" not in html:
                yield text_of(output)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_each_question_has_its_form_and_hides_what_was_found(path):
    asked, before = (
        questions_of(stored(path)),
        "\n".join(text_of(output) for cell in stored(path) for output in cell.get("outputs", [])),
    )
    page = questions.ask(stored(path))
    after = "\n".join(in_sight(page))
    forms = [
        json.loads(unescape(data))
        for cell in page
        for output in cell.get("outputs", [])
        for data in re.findall(r"data-question='([^']*)'", output.get("data", {}).get("text/html", ""))
    ]
    assert [form["name"] for form in forms] == list(asked) and len(forms) == len({form["id"] for form in forms}) > 3
    lines = {
        output.data[RECORD]["name"]: text_of({"data": {"text/html": output.data["text/html"]}})
        for cell in stored(path)
        for output in cell.get("outputs", [])
        if output.get("data", {}).get(RECORD, {}).get("name") in asked
    }
    for question in asked.values():
        assert question.ask.replace("`", "") in after
        assert bool(question.choices) == bool(question.right) and set(question.right) <= set(question.choices)
        assert question.found and lines[question.name] in before, question.name
        assert lines[question.name] not in after, question.name
        assert f'predict("{question.name}"' not in after


def cell(source, *outputs):
    return nbformat.v4.new_code_cell(
        source, outputs=[nbformat.v4.new_output("display_data", data=data) for data in outputs]
    )


def asks(name):
    return {
        QUESTION: {"name": name},
        "text/html": "<div style='a'><b>Your prediction.</b> How many?</div><details>"
        "<summary>The author</summary><div style='a'><b>Predicted</b> it: <b>2 units</b></div></details>",
    }


def finds(name, value):
    return {
        RECORD: {"name": name, "value": value, "predicted": 2, "how": "measured"},
        "text/html": f"<div style='a'><b>Measured</b> it: <b>{value} units</b> <span style='b'>(…)</span></div>",
    }


def text(source):
    return nbformat.v4.new_markdown_cell(source)


def test_what_waits_is_what_is_about_the_finding():
    """Outputs between, the measuring cell's, what follows with the first text, and takeaways, up to a heading."""
    predict = 'x = 1\npredict("a", 2,\n        ask="How many?")\ny = 2'
    html = {"text/html": "<b>Takeaway.</b> 3 it is"}
    page = questions.ask(
        [
            cell(predict, {"text/plain": "x is 1"}, asks("a")),
            cell("listing", {questions.LISTING: {}, "text/html": "listed"}),
            cell("between", {"text/plain": "about 3"}),
            cell("measure", {"text/plain": "it took 9 s"}, finds("a", 3)),
            cell("figure", {"text/plain": "a figure of 3"}),
            text("So 3.\n\n## Next\n\nOther things."),
            cell("other", {"text/plain": "no more of it"}),
            cell("last", html),
        ]
    )
    assert [one.source for one in page[:2]] == ["x = 1\ny = 2", 'predict("a", 2,\n        ask="How many?")']
    assert list(in_sight(page)) == [
        "x = 1\ny = 2",
        "x is 1",
        "Your prediction. How many?",
        "listing",
        "listed",
        "between",
        "measure",
        "\n\n## Next\n\nOther things.",
        "other",
        "no more of it",
        "last",
        "Takeaway. 3 it is",
    ]
    both = cell("both", {"text/plain": "x"}, html)
    page = questions.ask([cell("", asks("a")), cell("measure", finds("a", 3)), text("So 3."), text("On."), both])
    assert [seen for seen in in_sight(page) if seen] == ["Your prediction. How many?", "measure", "On.", "both", "x"]


def test_a_question_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="the question a is not stored as predict"):
        questions.ask([cell("", {QUESTION: {"name": "a"}, "text/html": "else"})])


def test_the_list_of_the_course_is_whole():
    contents = course_contents.contents()
    assert {each["lesson"] for each in contents["lessons"]} == {path.stem for path in LESSONS}
    assert {each["name"]: (each["lesson"], each["points"], each["title"]) for each in contents["exercises"]} == {
        task.name: (task.lesson, sum(task.points.values()), task.title) for task in TASKS.values()
    }
