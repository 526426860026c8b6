"""Every lesson at world sizes 3 and 4: it runs to its end, or says in its first cells which sizes it takes."""

import papermill
import pytest

from tests.notebooks.conftest import execute
from tests.notebooks.test_all_lessons import LESSONS

pytestmark = pytest.mark.long

REFUSED = {
    ("03_accelerate", 3): "world_size 3: take one of world_sizes, [1, 2, 4]",
    ("08_tensor_and_hybrid", 3): "the number of attention heads is 4, which 3 tensor-parallel ranks cannot share "
                                 "evenly: take a world_size of 2 or 4",
    ("13_capstone", 3): "global_batch 16 on 3 ranks: take two ranks or more, and a multiple of them",
}
"""Where the ranks cannot share what the lesson shares."""


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("name", LESSONS)
def test_it_runs_or_says_why_not(name, world_size, tmp_path):
    if (name, world_size) not in REFUSED:
        assert execute(name, tmp_path, world_size=world_size)["takeaways"]
        return
    with pytest.raises(papermill.PapermillExecutionError) as error:
        execute(name, tmp_path, world_size=world_size)
    assert REFUSED[name, world_size] in error.value.evalue and error.value.exec_count <= 6
