"""What lesson 08 claims, measured anew: exchanges, bytes, engines that agree, the grid, the order of its axes."""

import functools

import pytest

from course_lib.errors import ConfigError
from course_lib.lessons.tensor import grid_times
from course_lib.lessons.tensor import lab as tensor_lab
from course_lib.lessons.tensor.lab import Shape, distance
from course_lib.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.parallel.topology import RankGrid
from tests.notebooks.conftest import assert_quoted, says
from tests.ranks import on_ranks

LAYERS, WIDTH, VOCABULARY = 4, 32, 128


PARAMETERS = {"device": "auto", "world_size": 2, "layers": LAYERS, "width": WIDTH, "steps": 6, "vocabulary": VOCABULARY}


def test_the_sum_is_all_that_the_forward_needs(lesson):
    assert lesson["forward_apart_before_the_sum"] > 0.1 and lesson["forward_apart_after_the_sum"] < 1e-5
    assert lesson["right_pair_apart"] < 1e-5
    assert says(lesson, f"the loss fell by {lesson['broken_loss_fell_by']:.2f}. Compare gradients")
    assert lesson["at_work_losses_apart"] < 5e-6


def pair_apart(entered):
    column = functools.partial(ColumnParallelLinear, entered=entered)
    return {what: distance(*both) for what, both in tensor_lab.pair(column, RowParallelLinear).items()}


def test_the_librarys_layers_differ_as_the_pages_own(ranks):
    """The same pair with the classes that the lesson shows as the library's."""
    right, without_f = (ranks(2)(pair_apart, entered)[0] for entered in (False, True))
    assert max(right.values()) < 1e-5
    assert {what for what, far in without_f.items() if far > 1e-3} == {"gradient of X"}


def test_what_moves_and_what_is_held(lesson):
    hidden = Shape(LAYERS, WIDTH).hidden_bytes
    assert lesson["kB_sent"] == 4 * LAYERS * hidden / 1e3
    assert lesson["gradients_apart"] < 1e-5 and lesson["sequence_gradients_apart"] < 1e-5
    assert lesson["kB_of_activations_saved"] == pytest.approx((LAYERS + 0.5) * hidden / 1e3, rel=0.1)
    assert says(lesson, f"Sequence parallelism sends {lesson['sequence_sends']:.2f} times as much")
    assert lesson["cross_entropy_ratio"] == pytest.approx(VOCABULARY / 6, rel=1e-6) and lesson["parallel_kB"] > 0


def test_the_engines_agree(lesson):
    assert lesson["engines_losses_apart"] < 1e-5 and lesson["engine_gradients_apart"] < 1e-5
    assert lesson["same_collectives"] and lesson["packed_comes_out"] == "another output"


def test_the_librarys_grid_equals_one_process(lesson):
    assert lesson["same_places"]
    assert lesson["grid_loss_apart"] < 2e-6 and lesson["grid_weights_apart"] < 2e-6 and lesson["grid_norm_apart"] < 1e-4


def test_bytes_by_axis(lesson):
    hidden, microbatches = 4 * 2 * 32 * WIDTH, 4
    assert lesson["tp_kB"] == microbatches * LAYERS // 2 * 4 * hidden / 1e3
    assert lesson["pp_kB"] == microbatches * hidden / 1e3
    cut, whole = (4 + 8) * WIDTH**2 + (3 + 4) * WIDTH, (1 + 1 + 2 * 2) * WIDTH  # matrices and biases, norms
    assert lesson["dp_kB"] == 4 * LAYERS // 2 * (cut / 2 + whole) / 1e3
    assert {axis: lesson[f"{axis}_kB"] for axis in ("dp", "pp", "tp")} == lesson["better_kB"]
    assert lesson["worst_over_best"] < 9
    assert says(lesson, f"need {lesson['worst_over_best']:.1f} times as long")


def test_where_three_axes_pay(lesson):
    models = {"small": (24, 2048), "medium": (32, 4096), "large": (80, 8192), "huge": (96, 12288)}
    grids = grid_times.best_grids(models, (8, 64, 256), grid_times.Machines())
    assert lesson["best_on_256"] == {name: row[-1] for name, row in grids.items()}
    sizes = {
        name.split(",")[0]: [[int(size) for size in cell.split(" × ")] if "×" in cell else None for cell in row]
        for name, row in grids.items()
    }
    assert sizes["small"] == [[count, 1, 1] for count in (8, 64, 256)]
    assert {name for name, row in sizes.items() if any(axes and min(axes) > 1 for axes in row)} == {"large", "huge"}


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


@on_ranks(2)
def test_what_goes_wrong_says_what_the_lesson_says():
    for shape in (Shape(heads=3, width=48), Shape(vocabulary=257)):
        with pytest.raises(ConfigError) as caught:
            TensorParallel(shape.model())
        assert_quoted("08_tensor_and_hybrid", f"ConfigError: {caught.value}")


def test_ranks_drift_apart_where_dropout_is_seeded_by_rank(lesson):
    assert lesson["drift_when_seeded_alike"] == 0 < 1e-4 < lesson["drift_when_seeded_by_rank"]
