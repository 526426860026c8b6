"""A learner's answer: kept, shown beside the result, refused once that is seen; and what a page without widgets has."""

import json
import os
import re

import ipywidgets
import nbformat
import papermill
import pytest

from course_lib import learner_files
from course_lib.errors import DataError
from course_lib.lessons import boxes, notebook, questions, widget_display
from tools.notebooks import without_widgets


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """The file that answers of lesson 02 are kept in."""
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path / "my_answers.json"))
    monkeypatch.setenv("COURSE_LESSON", "02_data_parallel")
    return tmp_path / "my_answers.json"


@pytest.fixture
def shown(monkeypatch):
    """What the cells display, in order, before a live page."""
    outputs: list = []
    monkeypatch.setattr(notebook, "display", lambda data, **_: outputs.append(data))
    monkeypatch.setattr(learner_files, "is_live", lambda: True)
    return outputs


def asked(name="ring", **options):
    """The widgets of a question just asked."""
    notebook.predict(name, 2.0, "MB", because="two halves", ask="How many bytes?", **options)
    return notebook._predictions[name].question


def test_the_button_keeps_an_answer_until_its_result_is_seen(answers, shown):
    question = asked()
    assert shown[-1][widget_display.VIEW]["model_id"] == question.widget.model_id
    question.field.value = "a lot"
    question.button.click()
    assert "write a number" in question.status.value and not answers.exists()
    for text, value in (("3", 3.0), ("3/2", 1.5)):
        question.field.value = text
        question.button.click()
        assert json.loads(answers.read_text())["02_data_parallel"]["ring"]["value"] == value
    assert "kept: 1.5 MB" in question.status.value
    assert not question.field.continuous_update, "a click would overtake the last of many changes"
    question.field.value = "7"
    assert "not kept yet" in question.status.value and "1.5" not in question.status.value

    again = asked()
    assert again.field.value == "1.5" and not again.field.disabled and "You: <b>1.5 MB</b>" in shown[-1]["text/html"]
    notebook.measure("ring", 1.6, "MB")
    assert (
        shown[-1]["text/plain"]
        == "ring: you: 1.5, the author: 2, measured: 1.6 MB (1.07 of your answer; 0.80 of the prediction)"
    )
    assert "you: 1.5, 1.07 of your answer; the author: 2, 0.80 of the prediction" in shown[-1]["text/html"]
    entry = json.loads(answers.read_text())["02_data_parallel"]["ring"]
    assert (entry["value"], entry["measured"], entry["close"]) == (1.5, 1.6, True)

    again.field.value = "1.6"
    again.button.click()
    assert "the result is shown already" in again.status.value
    later = asked()
    assert later.field.disabled and later.button.disabled and "found: 1.6 MB" in later.status.value
    later.keep()
    assert "your answer stays" in later.status.value
    notebook.measure("ring", 9.0)
    assert json.loads(answers.read_text())["02_data_parallel"]["ring"] == entry, "the first result is the one it met"


def test_choices_by_label(answers, shown):
    choices = {"the same": 1.0, "twice": 2.0}
    question = asked("sent", choices=choices)
    assert isinstance(question.field, ipywidgets.RadioButtons) and question.field.value is None
    question.button.click()
    assert "choose one first" in question.status.value
    question.field.value = "the same"
    question.button.click()
    assert "the same · twice" in shown[-1]["text/html"]
    notebook.measure("sent", 1.2)
    assert "you: the same, the author: twice, measured: 1.2" in shown[-1]["text/plain"]
    assert json.loads(answers.read_text())["02_data_parallel"]["sent"]["close"] is True, "1 is the nearest choice"
    assert isinstance(asked("many", choices=range(9)).field, ipywidgets.Dropdown)


def test_without_a_lessons_name_an_answer_is_refused_and_says_why(answers, shown, monkeypatch):
    monkeypatch.delenv("COURSE_LESSON")
    question = asked()
    question.field.value = "1"
    question.button.click()
    assert "COURSE_LESSON" in question.status.value and not answers.exists()


@pytest.mark.parametrize("content", ['{"02_data_parallel": {"ring"', "[1]", '{"02_data_parallel": {"ring": 3}}'])
def test_a_damaged_file_is_kept_aside_and_told_in_one_line(answers, shown, capsys, content):
    answers.write_text(content)
    question = asked()
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "damaged" in said and "my_answers.damaged-1.json" in said
    question.field.value = "1"
    question.button.click()
    assert json.loads(answers.read_text())["02_data_parallel"]["ring"]["value"] == 1.0
    assert (answers.parent / "my_answers.damaged-1.json").read_text() == content
    answers.write_text("{")
    question.button.click()
    assert (answers.parent / "my_answers.damaged-1.json").read_text() == content
    assert (answers.parent / "my_answers.damaged-2.json").read_text() == "{"


def test_a_file_that_cannot_be_written_is_one_line(answers, shown, monkeypatch):
    monkeypatch.setenv("COURSE_ANSWERS", str(answers.parent / "no" / "such.json"))
    question = asked()
    question.field.value = "1"
    question.button.click()
    assert "cannot write" in question.status.value and "No such file" in question.status.value
    with pytest.raises(DataError, match="cannot write"):
        learner_files.answers_file().change(lambda content: None)


def test_the_lesson_is_the_notebooks_own_name(tmp_path, monkeypatch):
    for variable in ("COURSE_ANSWERS", "COURSE_LESSON"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "06_fsdp.ipynb"))
    assert learner_files.lesson_name() == "06_fsdp"
    assert learner_files.answers_file().path == tmp_path / "my_answers.json"


@pytest.mark.parametrize(
    ("text", "value"), [("1,000", 1000), ("0,5", 0.5), ("3/4", 0.75), ("1e9", 1e9), ("40 %", 0.4), ("1,234.5", 1234.5)]
)
def test_numbers_as_people_write_them(text, value):
    assert questions.parsed(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "many", "nan", "inf", "1/0", "3 MB", "1/2/3"])
def test_what_is_no_number(text):
    with pytest.raises(ValueError):
        questions.parsed(text)


@pytest.mark.parametrize(
    ("answer", "value", "choices", "close"),
    [
        (1.1, 1.0, (), True),
        (1.11, 1.0, (), False),
        (-1.0, 1.0, (), False),
        (0.0, 1e-8, (), True),
        (0.0, 0.01, (), False),
        (4.0, 2.6, (1.0, 2.0, 4.0), False),
        (True, True, (True, False), True),
        (True, False, (True, False), False),
        ("rank 1", "rank 1", ("rank 0", "rank 1"), True),
        (2.0, 2.2, (1.0, 2.0, "none of them"), True),
        ("none of them", 2.0, (1.0, 2.0, "none of them"), False),
    ],
)
def test_what_is_close(answer, value, choices, close):
    assert boxes.is_close(answer, value, choices) is close


def test_a_record_is_on_the_page_only_where_asked(shown):
    notebook.record("off_by", 0.5, "nats")
    notebook.record("apart", 0.5, "nats", show="apart at the end")
    assert shown[0]["text/plain"] == shown[0]["text/html"] == "" and shown[0][notebook.MIME]["value"] == 0.5
    assert shown[1]["text/plain"] == "apart at the end: 0.5 nats" and "text/html" not in shown[1]


def test_the_stored_copy_has_no_widgets():
    output = nbformat.v4.new_output("display_data", {widget_display.VIEW: {}, "image/png": "", "text/plain": "x"})
    without_widgets(output, "lesson")
    assert set(output.data) == {"image/png", "text/plain"}
    bare = nbformat.v4.new_output("display_data", {widget_display.VIEW: {}, "text/plain": "VBox(children=(Dropdown("})
    with pytest.raises(SystemExit, match="without a picture"):
        without_widgets(bare, "lesson")


def test_a_headless_run_has_the_question_and_the_authors_answer_folded(tmp_path):
    cells = (
        "from course_lib.lessons.notebook import measure, predict",
        "predict('ring', 2.0, 'MB', ask='How many bytes?', because='two halves');",
        "measure('ring', 2.2, 'MB');",
    )
    path = tmp_path / "02_data_parallel.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells]), path)
    papermill.execute_notebook(str(path), str(path), cwd=str(tmp_path), kernel_name="python3", progress_bar=False)
    done = nbformat.read(path, as_version=4)
    (question,), (result,) = (cell.outputs for cell in done.cells[1:])
    page = question.data["text/html"]
    assert "How many bytes?" in page.partition("<details>")[0] and "2 MB" not in page.partition("<details>")[0]
    assert re.search(r"<details>.*2 MB.*two halves.*</details>", page)
    assert "(predicted 2; 1.10 of the prediction)" in result.data["text/html"]
    everything = path.read_text(encoding="utf-8")
    assert "children=" not in json.dumps([cell.outputs for cell in done.cells]) and "widget-view" not in everything
    assert notebook.recorded(path) == {"ring": 2.2} and os.listdir(tmp_path) == [path.name]
