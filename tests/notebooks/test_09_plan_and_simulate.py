"""What lesson 09 claims: the formula, the simulation and real ranks agree, and the search says what it did."""

import pytest

from course_lib.planning import hardware, models, strategy

pytestmark = pytest.mark.timeout(300)

MODEL, GPU, GPUS = "llama-1b", "H100", 64


@pytest.fixture(scope="module")
def lesson(run_lesson):
    """With a model of one billion parameters in the place of 8: the same cells, in less time."""
    return run_lesson("09_plan_and_simulate", device="auto", model=MODEL, gpu=GPU, gpus=GPUS, sequence_length=512,
                      world_size=2)


def test_an_8b_in_the_head(lesson):
    parameters = models.load(MODEL).parameters
    assert lesson["billions"] == parameters / 1e9
    assert lesson["states"] == pytest.approx(16 * parameters / 2**30, rel=1e-6)
    assert lesson["states_of_a_rank"] == pytest.approx(lesson["states"] / GPUS, rel=0.01)
    assert lesson["activations"] > 3 * lesson["activations_recomputed"] > 0 < lesson["logits"]


def test_the_simulation_agrees_with_the_formula(lesson):
    assert abs(lesson["formula_off_model_states"]) < 0.05 and abs(lesson["formula_off_activations"]) < 0.15
    model = models.load(MODEL)
    root = model.parameters - model.layers * model.layer  # gathered once: it stays from forward to backward
    assert lesson["sent"] == pytest.approx(63 / 64 * (8 * model.parameters - 2 * root) / 2**30, rel=1e-3)
    assert lesson["collectives"] >= 3 * 16, "two gathers and a reduction of every block"


def test_real_ranks_agree_with_the_simulation(lesson):
    assert lesson["same_collectives"] is True
    assert lesson["sent_real_over_simulated"] == 1
    assert lesson["states_real_over_simulated"] == pytest.approx(1, rel=0.01)


def test_the_search_and_its_maps(lesson):
    result = strategy.search(models.load(MODEL), hardware.cluster(GPU, GPUS), 512)
    assert lesson["layouts"] == result.considered and lesson["mfu"] == result.best.cost.mfu
    assert 0 < lesson["fits"] <= lesson["layouts"]
    assert 4 <= lesson["places_with_nothing"] < 25 and 5 < lesson["rule_agrees"] < 49
    assert 0 < lesson["ties"] < 49 - lesson["rule_agrees"], "some disagreements are ties, and not all"
    assert lesson["rows_compared"] == 139 and lesson["median_error"].endswith("%")


def test_the_plan_is_written_down(lesson):
    assert {"course.yaml", "accelerate.yaml", "torchrun.sh", "job.sbatch"} <= set(lesson["emitted"])
    assert 2 < lesson["sixteen_times_the_gpus"] < 16.5
