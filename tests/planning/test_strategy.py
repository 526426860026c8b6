"""The search: what it lists is legal and fits, in order; what it says about the rest is true."""

from dataclasses import replace
from itertools import pairwise

import pytest

from course_lib.errors import ConfigError
from course_lib.planning import cost, hardware, memory, models, strategy

CASES = [("facebook/opt-6.7b", "A100-80", 8, 2048), ("llama-70b", "H100", 1024, 2048), ("gpt2", "T4", 1, 1024),
         ("facebook/opt-6.7b", "T4", 8, 2048), ("mixtral-8x7b", "H100", 64, 4096), ("bert-large", "V100-32", 4, 512)]


def found_for(name, gpu, gpus, length, batch=None):
    return strategy.search(models.load(name), hardware.cluster(gpu, gpus), length, batch)


@pytest.mark.parametrize(("name", "gpu", "gpus", "length"), CASES)
def test_every_candidate_is_legal_fits_and_is_in_order(name, gpu, gpus, length):
    result = found_for(name, gpu, gpus, length)
    model, cluster = result.model, result.cluster
    groups = [[candidate for candidate in result.candidates if (candidate.chance >= strategy.LIKELY) is likely]
              for likely in (True, False)]
    assert groups[0] + groups[1] == result.candidates, "those that are likely to fit come first"
    for group in groups:
        for earlier, later in pairwise(group):
            assert later.cost.tokens_per_second <= 1.0011 * earlier.cost.tokens_per_second
            if later.cost.tokens_per_second > earlier.cost.tokens_per_second:
                assert earlier.plan.accumulation <= later.plan.accumulation, "a tie: the larger micro-batch comes first"
    for candidate in result.candidates:
        plan = candidate.plan
        assert plan.gpus == gpus and plan.global_batch == result.best.plan.global_batch
        assert plan.tensor <= cluster.gpus_per_node and plan.pipeline <= model.layers
        assert model.heads % plan.tensor == 0 and model.kv_heads % plan.tensor == 0
        assert candidate.memory == memory.estimate(model, plan) and candidate.memory.fits(cluster.accelerator.memory)
        assert candidate.cost == cost.estimate(model, plan, cluster)


@pytest.mark.parametrize(("name", "gpu", "gpus", "length"), CASES)
def test_pruning_loses_nothing(name, gpu, gpus, length):
    """Beside a search that tries every micro-batch."""
    result = found_for(name, gpu, gpus, length)
    model, batch = result.model, result.best.plan.global_batch
    precision = result.cluster.accelerator.half_precision()
    every = [plan for layout in strategy.layouts(model, gpus, result.cluster.gpus_per_node, length, batch, precision)
             for plan in strategy.variants(layout, model)]
    fitting = {plan for plan in every if memory.estimate(model, plan).fits(result.cluster.accelerator.memory)}
    assert {candidate.plan for candidate in result.candidates} == fitting and len(every) >= result.considered > 0


def test_what_would_have_to_change_is_true_and_smallest():
    result = found_for("facebook/opt-6.7b", "T4", 8, 2048)
    seen = 0
    for failure in result.failed:
        assert not failure.memory.fits(result.cluster.accelerator.memory)
        if failure.remedy.startswith("fits from"):
            gpus = int(failure.remedy.split()[2])
            room = result.cluster.accelerator.memory
            fits = [memory.estimate(result.model, replace(failure.plan, data=count)).fits(room)
                    for count in (gpus - 1, gpus)]
            assert fits == [False, True]
            seen += 1
        elif failure.remedy.startswith("fits on"):
            chip = hardware.accelerator(failure.remedy.split("such as ")[1])
            assert failure.memory.fits(chip.memory)
            seen += 1
    assert seen >= 4


def test_nothing_fits_says_the_smallest_change():
    with pytest.raises(ConfigError, match=r"does not fit on 48 x T4.*--gpus (\d+)") as caught:
        found_for("llama-405b", "T4", 48, 2048)
    gpus = int(str(caught.value).split("--gpus ")[1].split()[0])
    assert found_for("llama-405b", "T4", gpus, 2048).candidates
    with pytest.raises(ConfigError, match="does not fit"):
        found_for("llama-405b", "T4", gpus - 48, 2048)


@pytest.mark.parametrize(("length", "batch", "says"), [(4096, None, "takes 1 to 2048"), (2048, 3, "--global-batch 8")])
def test_what_cannot_be_divided(length, batch, says):
    with pytest.raises(ConfigError, match=says):
        strategy.search(models.from_config({"model_type": "opt", "num_attention_heads": 1, "num_hidden_layers": 1}),
                        hardware.cluster("A100-80", 8), length, batch)


def test_explained():
    lines = strategy.explain(found_for("facebook/opt-6.7b", "A100-80", 8, 2048))
    assert "is the fastest of" in lines[0] and lines[1].startswith("Next best: ")
    assert any(line.startswith("DDP does not fit") for line in lines)


def test_what_is_offloaded_has_to_fit_into_host_memory():
    """13 billion parameters with their optimizer are 200 GB and more: a GPU's share of one node, not of another."""
    model = models.load("facebook/opt-13b")
    roomy = hardware.cluster("ml.p5.48xlarge", 1, memory_gb=16)
    result = strategy.search(model, roomy, 512, 1)
    assert result.best.memory.host > 144 * 2**30
    assert all(candidate.memory.host <= roomy.host_memory for candidate in result.candidates)
    with pytest.raises(strategy.NothingFits, match="host memory"):
        strategy.search(model, hardware.cluster("ml.p4d.24xlarge", 1, memory_gb=16), 512, 1)
