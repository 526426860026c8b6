"""What a lesson's cells show and leave for its test."""

from pathlib import Path

import nbformat
import pytest
from IPython.display import Code

from course_lib.lessons import notebook


@pytest.fixture
def shown(monkeypatch):
    """What the cells display, in order."""
    outputs: list = []
    monkeypatch.setattr(notebook, "display", lambda data, **_: outputs.append(data))
    return outputs


@pytest.mark.parametrize(
    ("predicted", "measured", "comparison"),
    [(4, 3, "0.75 of the prediction"), (0, 0, "as predicted"), (0, 2e-7, "2e-07 above it"), (0, -3.6, "3.6 below it")],
)
def test_a_measurement_stands_beside_its_prediction(shown, predicted, measured, comparison):
    notebook.predict("loss", predicted, "nats", because="so")
    notebook.measure("loss", measured, "nats")
    data = shown[-1]
    assert data[notebook.MIME] == {"name": "loss", "value": measured, "predicted": predicted, "how": "measured"}
    assert comparison in data["text/plain"] and comparison in data["text/html"]


def test_what_was_not_predicted_is_not_measured():
    with pytest.raises(KeyError, match="never"):
        notebook.measure("never", 1)


def test_records_are_read_back_by_name(shown, tmp_path):
    notebook.record("ranks", [1, 2])
    notebook.record("right", True)
    cells = [
        nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", data)]) for data in (*shown, shown[0])
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells[:2]), tmp_path / "lesson.ipynb")
    assert notebook.recorded(tmp_path / "lesson.ipynb") == {"ranks": [1, 2], "right": True}
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "twice.ipynb")
    with pytest.raises(ValueError, match="ranks twice"):
        notebook.recorded(tmp_path / "twice.ipynb")


def test_source_is_the_real_one_with_its_docstring_and_a_link():
    code = notebook.source(notebook.takeaway)
    assert isinstance(code, Code) and code.data.startswith("def takeaway") and '"""Box' in code.data
    assert '"""' not in notebook.source(notebook.takeaway, doc=False).data
    lines = Path(notebook.__file__).read_text(encoding="utf-8").splitlines()
    assert lines[code.first - 1].startswith("def takeaway") and "Takeaway" in lines[code.last - 1]
    assert f"href='../course_lib/lessons/notebook.py#L{code.first}-L{code.last}'" in code._repr_html_()
