"""Every lesson at world sizes 3 and 4: what it claims and predicts holds, or it says which sizes it takes."""

import nbformat
import papermill
import pytest

from course_lib.lessons.notebook import MIME
from tests.notebooks.conftest import NOTEBOOKS, execute
from tests.notebooks.test_all_lessons import LESSONS

pytestmark = pytest.mark.long

REFUSED = {
    ("03_accelerate", 3): "world_size 3: take one of world_sizes, [1, 2, 4]",
    ("08_tensor_and_hybrid", 3): "the number of attention heads is 4, which 3 tensor-parallel ranks cannot share "
    "evenly: take a world_size of 2 or 4",
    ("13_capstone", 3): "global_batch 16 on 3 ranks: take two ranks or more, and a multiple of them",
}
"""Where the ranks cannot share what the lesson shares."""


EXACT = 5e-4
"""Difference from a prediction, as a share of it or in its unit, up to which it came out exactly: parameters are padded
to a multiple of the ranks, so more ranks hold a few bytes more."""
BY_SIZE: dict[str, set[str]] = {"06_fsdp": {"rows_where_prefetch_gains_most"}, "12_sagemaker": {"losses_differ_by"}}
"""By lesson, what is predicted exactly for two ranks alone, and says so, or was measured in seconds."""


def measured(path):
    """Predicted and found value of each box of a run notebook, by name: those that are numbers."""
    outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])]
    entries = [output.get("data", {}).get(MIME, {}) for output in outputs]
    numbers = [entry for entry in entries if isinstance(entry.get("predicted"), (int, float))]
    return {entry["name"]: (entry["predicted"], entry["value"]) for entry in numbers}


def comes_out(pair):
    predicted, found = pair
    return abs(found - predicted) <= EXACT * max(1, abs(predicted))


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("name", LESSONS)
def test_its_numbers_hold_or_it_says_why_not(name, world_size, tmp_path):
    if (name, world_size) not in REFUSED:
        assert execute(name, tmp_path, world_size=world_size)["takeaways"]
        exact = {box for box, pair in measured(NOTEBOOKS / f"{name}.ipynb").items() if comes_out(pair)}
        now = measured(tmp_path / f"{name}.ipynb")
        assert {box: now[box] for box in exact - BY_SIZE.get(name, set()) if not comes_out(now[box])} == {}
        return
    with pytest.raises(papermill.PapermillExecutionError) as error:
        execute(name, tmp_path, world_size=world_size)
    assert REFUSED[name, world_size] in error.value.evalue and error.value.exec_count <= 6
