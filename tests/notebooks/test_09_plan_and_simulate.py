"""What lesson 09 claims: the formula, the simulation and real ranks agree, and the search says what it did."""

import pytest

from course_lib.lessons.planning import figures
from course_lib.lessons.planning import lab as planning_lab
from course_lib.planning import activations, cost, hardware, margins, memory, models, strategy
from course_lib.planning.plan import RECIPES, Plan
from tests.notebooks.conftest import defined, says

MODEL, GPU, GPUS = "llama-1b", "H100", 64


PARAMETERS = {"device": "auto", "model": MODEL, "gpu": GPU, "gpus": GPUS, "sequence_length": 512, "world_size": 2}
"""With a model of one billion parameters in the place of 8: the same cells, in less time."""


def test_an_8b_in_the_head(lesson):
    model = models.load(MODEL)
    parameters, a_byte_each = model.parameters, 512 * model.hidden * model.layers / 2**30
    assert lesson["billions"] == parameters / 1e9
    assert lesson["states"] == pytest.approx(16 * parameters / 2**30, rel=1e-6)
    assert lesson["states_of_a_rank"] == pytest.approx(lesson["states"] / GPUS, rel=0.01)
    assert lesson["activations"] > 3 * lesson["activations_recomputed"] > 0 < lesson["logits"]
    assert lesson["gpus_for_states"] == 1
    assert says(lesson, f"would have said {34 / lesson['activations'] * a_byte_each:.0%} of the activations")


def test_recipes_are_shown_not_a_sentence_about_all_of_them(lesson):
    assert lesson["recipes"] == {name: recipe.total for name, recipe in RECIPES.items()}
    assert lesson["leanest_recipe"] == min(recipe.total for recipe in RECIPES.values())


def test_the_formula_on_the_page_is_the_librarys(lesson):
    """Term by term for a block, as a whole for a rank; and for GPT's block the terms are the paper's 34."""
    model, sums = models.load(MODEL), lesson["block_terms"]
    for name, compiled in (("this model", False), ("this model, compiled", True)):
        assert sums[name] * model.hidden == pytest.approx(activations.of_block(model, 1, 1, flash=True, fused=compiled))
    assert sums["GPT, by the paper"] == 34 < sums["this model, compiled"] < sums["this model"]


@pytest.mark.parametrize("name", ["gpt2", "facebook/opt-2.7b", "llama-8b", "mistralai/Mixtral-8x7B-v0.1"])
def test_the_formula_on_the_page_holds_for_every_kind_of_block(name):
    page = defined("09_plan_and_simulate", "def kept_by_a_block", "def memory_of_a_rank")
    model = models.load(name)
    for ranks, rows, compiled in ((2, 1, False), (64, 1, False), (8, 4, True)):
        plan = Plan(512, engine="fsdp", stage=3, data=ranks, micro_batch=rows, compiled=compiled)
        library, yours = memory.estimate(model, plan), page["memory_of_a_rank"](model, ranks, rows, 512, compiled)
        if model.experts % ranks and model.experts > 1:  # as the page says, the library's is more
            assert yours["parameters"] < 0.2 * library.parameters
        else:
            assert yours == pytest.approx({kind: getattr(library, kind) for kind in yours})


def test_the_sliders_begin_at_the_plan_and_agree_with_it(lesson):
    """Same model, GPUs, batch, accumulation and compiler on both sides: the same GiB, and the same verdict."""
    best = strategy.search(models.load(MODEL), hardware.cluster(GPU, 8), 512).best
    assert f"on 8 x {GPU}, compiled: fits. {best.memory.total / 2**30:.1f} GiB per rank" in lesson["explorer"]


@pytest.mark.parametrize("name", ["gpt2", "facebook/opt-13b", "llama-8b"])
@pytest.mark.parametrize("gpu", ["H100", "A10G"])
def test_the_seconds_on_the_page_are_the_librarys(name, gpu):
    """For gated blocks and others, where the host is late and where ranks wait."""
    page = defined("09_plan_and_simulate", "def seconds_of_a_step")
    layout = {"engine": "fsdp", "stage": 3, "compiled": True, "loss": "chunked", "head": "gathered"}
    for ranks, rows, accumulation in ((8, 1, 1), (64, 4, 2), (512, 1, 1)):
        plan = Plan(512, data=ranks, micro_batch=rows, accumulation=accumulation, **layout)
        cluster = hardware.cluster(gpu, ranks)
        yours = page["seconds_of_a_step"](models.load(name), plan, cluster)
        assert sum(yours.values()) == pytest.approx(cost.estimate(models.load(name), plan, cluster).step)


def test_what_the_sliders_draw_is_the_limit_that_is_applied():
    model, chip = models.load("llama-8b"), hardware.accelerator("H100")
    for compiled in (True, False):
        said, figure = figures.memory_view(model, chip, "FSDP", 8, 4, 1, 2048, False, compiled)
        words = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert words[7:] == [f"usable {figures.usable_bytes(chip) / 2**30:.1f}", f"H100 {chip.memory / 2**30:.1f}"]
        assert ("does not fit" in said) is not compiled


def test_the_simulation_agrees_with_the_formula(lesson):
    model = models.load(MODEL)
    root = model.parameters - model.layers * model.layer  # gathered once: it stays from forward to backward
    assert lesson["sent"] == pytest.approx(63 / 64 * (8 * model.parameters - 2 * root) / 2**30, rel=1e-3)
    assert lesson["collectives"] >= 3 * 16, "two gathers and a reduction of every block"


def test_the_search_and_its_maps(lesson):
    result = strategy.search(models.load(MODEL), hardware.cluster(GPU, GPUS), 512)
    assert lesson["layouts"] == result.considered and lesson["mfu"] == result.best.cost.mfu
    assert 0 < lesson["fits"] <= lesson["layouts"]
    of_each = {strategy.family(candidate.plan): candidate for candidate in result.best_of_each()}
    assert of_each["FSDP"].plan.compiled and not of_each["ZeRO-3"].plan.compiled, "they are not equal for that"
    assert of_each["FSDP"].cost.tokens_per_second > of_each["ZeRO-3"].cost.tokens_per_second
    assert 4 <= lesson["cells_with_nothing"] < 25
    without = 49 - lesson["rule_agrees"] - lesson["rule_fits"]
    assert says(lesson, f"agree {lesson['rule_agrees']} times. In {without} cells the rule's choice does not fit")
    assert 0.4 < lesson["matmul_share"] < 1


def test_it_says_which_rows_to_distrust(lesson):
    """The regimes in the text are those of the table: what it distrusts is off by half at the 90th percentile."""
    table = planning_lab.known_errors().set_index("kind")
    off = table["90th percentile"].str.rstrip("%").astype(float)
    speeds = off[[not kind.endswith("memory") and not kind.startswith(("all", "two ranks")) for kind in off.index]]
    assert {"nanotron, logs", "torchtitan CP", "torchtitan TP", "EasyContext"} <= set(speeds[speeds > 50].index)
    assert {"torchtitan FSDP", "Megatron, weak scaling", "MosaicML FSDP"} <= set(speeds[speeds <= 20].index)
    assert lesson["rows_compared"] == margins.THROUGHPUT.rows
    assert lesson["median_error"] == pytest.approx(100 * margins.THROUGHPUT.median)
    assert says(lesson, "Distrust most what is like “nanotron, logs”: 129.0%.")


def test_the_plan_is_written_down(lesson):
    assert {"course.yaml", "accelerate.yaml", "torchrun.sh", "job.sbatch"} <= set(lesson["emitted"])
    assert 2 < lesson["sixteen_times_the_gpus"] < 16.5
