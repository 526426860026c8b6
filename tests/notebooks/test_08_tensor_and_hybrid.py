"""What lesson 08 claims, measured anew: exchanges, bytes, engines that agree, the grid, the order of its axes."""

import functools

import nbformat
import pytest
import torch.distributed as dist
from torch import nn

from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.lessons.tensor import grid_times
from course_lib.lessons.tensor import lab as tensor_lab
from course_lib.lessons.tensor.lab import Shape, distance
from course_lib.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.parallel.topology import RankGrid
from tests.notebooks.conftest import NOTEBOOKS, says

LAYERS, WIDTH, VOCABULARY = 4, 32, 128


@pytest.fixture(scope="module")
def lesson(run_lesson):
    return run_lesson(
        "08_tensor_and_hybrid", device="auto", world_size=2, layers=LAYERS, width=WIDTH, steps=6, vocabulary=VOCABULARY
    )


def test_the_sum_is_all_that_the_forward_needs(lesson):
    assert lesson["forward_apart_before_the_sum"] > 0.1 and lesson["forward_apart_after_the_sum"] < 1e-5


def test_an_exchange_that_is_left_out(lesson):
    assert lesson["right_pair_apart"] < 1e-5 and lesson["output_apart_without_copy"] < 1e-5
    assert lesson["wrong_without_copy"] == 1 and lesson["wrong_without_reduce"] == 4
    assert lesson["times_when_summed_twice"] == pytest.approx(2, rel=1e-5)


def test_the_pages_own_layers_train_as_one_process(lesson):
    assert lesson["losses_apart"] < 5e-6 < 1e-3 < lesson["losses_apart_when_broken"]
    assert lesson["first_loss_apart_when_broken"] == 0
    assert 1e-4 < lesson["losses_apart_when_summed_twice"] < 0.2, "twice the gradient, and hardly to be seen"
    assert lesson["broken_loss_fell_by"] > 0.05, "it looks as if it trained"
    assert lesson["replicas_drifted_when_right"] < 1e-6 < 1e-4 < lesson["replicas_drifted_by"]
    assert says(lesson, f"the loss fell by {lesson['broken_loss_fell_by']:.2f}. Compare gradients")
    assert lesson["at_work_losses_apart"] < 5e-6


def test_the_librarys_layers_differ_as_the_pages_own():
    """The same pair with the classes that the lesson shows as the library's."""
    ways = launch(pair_of_the_library, num_processes=2, timeout=240, device="cpu")[0]
    assert max(ways["right"].values()) < 1e-5
    assert {what for what, far in ways["without f"].items() if far > 1e-3} == {"gradient of X"}


def pair_of_the_library():
    ways = {}
    for name, entered in (("right", False), ("without f", True)):
        column = functools.partial(ColumnParallelLinear, entered=entered)
        ways[name] = {what: distance(*both) for what, both in tensor_lab.pair(column, RowParallelLinear).items()}
    return ways


def test_what_moves_and_what_is_held(lesson):
    hidden = Shape(LAYERS, WIDTH).hidden_bytes
    assert lesson["all_reduces_forward"] == lesson["all_reduces_backward"] == 2 * LAYERS
    assert lesson["other_collectives"] == 0 and lesson["kB_sent"] == 4 * LAYERS * hidden / 1e3
    assert lesson["tokens_where_equal"] == pytest.approx(3 * WIDTH, rel=0.05)
    assert 0.5 < lesson["parameters_held"] < 0.65
    assert lesson["gradients_apart"] < 1e-5 and lesson["sequence_gradients_apart"] < 1e-5
    assert lesson["kB_of_activations_saved"] == pytest.approx((LAYERS + 0.5) * hidden / 1e3, rel=0.1)
    assert 1 < lesson["sequence_sends"] < 1.15
    assert says(lesson, f"Sequence parallelism sends {lesson['sequence_sends']:.2f} times as much")


def test_cross_entropy_without_gathering(lesson):
    assert lesson["cross_entropy_ratio"] == pytest.approx(VOCABULARY / 6, rel=1e-6)
    assert lesson["gathered_kB"] > 10 * lesson["parallel_kB"] > 0
    assert lesson["cross_entropies_apart"] < 1e-5 and lesson["logit_gradients_apart"] < 1e-5


def test_the_engines_agree(lesson):
    assert lesson["engines_losses_apart"] < 1e-5 and lesson["engine_gradients_apart"] < 1e-5
    assert lesson["same_collectives"]


def test_attention_is_cut_by_its_heads(lesson):
    assert lesson["heads_apart"] < 1e-5 and lesson["packed_apart"] > 0.1
    assert lesson["packed_comes_out"] == "another output"


def test_the_switch_sends_more_than_megatron(lesson):
    assert lesson["all_reduces_of_the_switch"] == 7 * LAYERS + 2 and lesson["switch_loss_apart"] < 1e-5


def test_three_axes_by_hand_and_on_torchs_mesh_train_as_one_process(lesson):
    assert lesson["by_hand_apart"] < 5e-6 < 1e-3 < lesson["apart_without_average"]
    assert lesson["first_wrong_step"] == 2 and lesson["torch_apart"] < 5e-6 and lesson["same_places"]


def test_the_librarys_grid_equals_one_process(lesson):
    assert lesson["grid_loss_apart"] < 2e-6 and lesson["grid_weights_apart"] < 2e-6 and lesson["grid_norm_apart"] < 1e-4


def test_bytes_by_axis(lesson):
    hidden, microbatches = 4 * 2 * 32 * WIDTH, 4
    assert lesson["tp_kB"] == microbatches * LAYERS // 2 * 4 * hidden / 1e3
    assert lesson["pp_kB"] == microbatches * hidden / 1e3
    matrices = sum(layer.numel() for layer in whole_layer().parameters() if layer.dim() == 2)
    others = sum(layer.numel() for layer in whole_layer().parameters()) - matrices - 6 * WIDTH
    assert lesson["dp_kB"] == 4 * LAYERS // 2 * ((matrices + others) / 2 + 6 * WIDTH) / 1e3
    assert lesson["tp_kB_of_torch"] == 1.5 * lesson["tp_kB"] and lesson["dp_kB_of_torch"] == 3 * lesson["dp_kB"]
    assert {axis: lesson[f"{axis}_kB"] for axis in ("dp", "pp", "tp")} == lesson["better_kB"]


def whole_layer():
    """A layer of the page's transformer: four matrices of attention, two of the MLP, two norms."""
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.ModuleList(
        [*linears, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]
    )


def test_the_order_of_the_axes_is_worth_more_than_the_gpus(lesson):
    assert 1.5 < lesson["worst_over_best"] < 9
    assert lesson["worst_over_half_the_gpus"] > 1
    assert says(lesson, f"need {lesson['worst_over_best']:.1f} times as long")


def test_what_is_asked_and_what_is_computed():
    """Three questions at least; the two boxes that nobody measured say so; f is one thing, and axes are defined."""
    cells = nbformat.read(NOTEBOOKS / "08_tensor_and_hybrid.ipynb", as_version=4).cells
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    assert sum(text.count("ask=") for text in sources) >= 5
    computed = [text for text in sources if "grid_times" in text or "total.values()" in text]
    assert [text.count("measure(") for text in computed if "measure(" in text] == [2]
    assert all(text.count("measure(") == text.count('how="computed"') for text in computed)
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert "cannot hide" not in prose and "f(XA)" not in prose
    assert prose.index("Write $d$, $p$ and $t$") < prose.index(r"\frac{t-1}{t}")


def test_where_three_axes_pay(lesson):
    models = {"small": (24, 2048), "medium": (32, 4096), "large": (80, 8192), "huge": (96, 12288)}
    grids = grid_times.best_grids(models, (8, 64, 256), grid_times.Machines())
    assert lesson["best_on_256"] == {name: row[-1] for name, row in grids.items()}
    sizes = {
        name.split(",")[0]: [[int(size) for size in cell.split(" × ")] if "×" in cell else None for cell in row]
        for name, row in grids.items()
    }
    assert list(sizes) == list(models) and all(len(row) == 3 for row in sizes.values())
    assert sizes["small"] == [[count, 1, 1] for count in (8, 64, 256)]
    assert {name for name, row in sizes.items() if any(axes and min(axes) > 1 for axes in row)} == {"large", "huge"}
    assert all(factors[2] <= 8 for row in sizes.values() for factors in row if factors)
    assert sum(factors is None for row in sizes.values() for factors in row) == 2


def test_the_computed_time_by_hand():
    """Two layers on 2 x 2 x 2 in machines of two: tp inside, pp and dp across."""
    machines = grid_times.Machines(gpus=2, inside=100.0, across=10.0, flops=1000.0)
    training, grid = grid_times.Training(layers=2, width=10, tokens=5, rows=4), RankGrid(2, 2, 2)
    seconds = training.seconds(grid, machines)
    hidden, share = 2 * 5 * 10, 12 * 2 * 100 / 4
    once = 6 * share * 5 / 1000, 4 * 1 * 1 * hidden / 100, 2 * hidden / 10
    assert [seconds[part] for part in ("compute", "tp", "pp")] == pytest.approx([2 * value for value in once])
    assert seconds["dp"] == pytest.approx(2 * share / 10) and seconds["idle"] == pytest.approx(sum(once))
    turned = training.seconds(grid, machines, ("tp", "pp", "dp"))
    assert turned["tp"] == 10 * seconds["tp"] and turned["dp"] == seconds["dp"] / 10
    assert [machines.speed(*axes) for axes in ((2, 1), (2, 2), (4, 1), (1, 8))] == [100, 10, 20, 10]


def errors():
    dist.init_process_group("gloo")
    told = []
    for shape in (Shape(heads=3, width=48), Shape(vocabulary=257)):
        try:
            TensorParallel(shape.model())
        except ConfigError as error:
            told.append(f"ConfigError: {error}")
    return told


def test_what_goes_wrong_says_what_the_lesson_says(lesson):
    told = launch(errors, num_processes=2, timeout=240, device="cpu")[0]
    cells = nbformat.read(NOTEBOOKS / "08_tensor_and_hybrid.ipynb", as_version=4).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown").replace("\n", " ")
    headings = [part.strip("`.") for part in prose.split("**") if "Error: " in part]
    assert len(headings) == len(told) == 2
    for message, heading in zip(told, headings, strict=True):
        assert message.startswith(heading)
    assert lesson["drift_when_seeded_alike"] == 0 < 1e-4 < lesson["drift_when_seeded_by_rank"]
