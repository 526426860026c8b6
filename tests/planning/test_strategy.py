"""The search: what it lists is legal and fits, in order; what it says about the rest is true."""

import itertools
import re
from dataclasses import replace

import pytest

from course_lib.errors import ConfigError
from course_lib.planning import cost, hardware, layouts, memory, models, strategy, to_launchers
from course_lib.planning.block_collectives import collective
from course_lib.planning.plan import Plan

CASES = [
    ("facebook/opt-6.7b", "A100-80", 8, 2048),
    ("llama-70b", "H100", 1024, 2048),
    ("gpt2", "T4", 1, 1024),
    ("facebook/opt-6.7b", "T4", 8, 2048),
    ("mixtral-8x7b", "H100", 64, 4096),
    ("bert-large", "V100-32", 4, 512),
]


def found_for(name, gpu, gpus, length, batch=None):
    return strategy.search(models.load(name), hardware.cluster(gpu, gpus), length, batch)


@pytest.mark.parametrize(("name", "gpu", "gpus", "length"), CASES)
def test_every_candidate_is_legal_fits_and_is_in_order(name, gpu, gpus, length):
    result = found_for(name, gpu, gpus, length)
    model, cluster = result.model, result.cluster
    groups = [[each for each in result.candidates if (each.chance >= 0.8) is likely] for likely in (True, False)]
    assert groups[0] + groups[1] == result.candidates, "those that are likely to fit come first"
    assert min(each.chance for each in result.candidates) >= strategy.AT_LEAST
    for group in groups:
        for earlier, later in itertools.pairwise(group):
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
    every = [
        plan
        for layout in strategy.layouts(model, gpus, result.cluster.gpus_per_node, length, batch, precision)
        for plan in strategy.variants(layout, model)
    ]
    fitting = {plan for plan in every if memory.estimate(model, plan).fits(result.cluster.accelerator.memory)}
    assert {candidate.plan for candidate in result.candidates} == fitting and len(every) >= result.considered > 0


def test_what_would_have_to_change_is_true_and_smallest():
    result = found_for("facebook/opt-6.7b", "T4", 8, 2048)
    room, seen = result.cluster.accelerator.memory, 0
    for failure in result.failed:
        assert not failure.memory.fits(room)
        if failure.remedy.startswith("fits from"):
            gpus = int(failure.remedy.split()[2])
            plans = [replace(failure.plan, data=count) for count in (gpus - 1, gpus)]
            assert [memory.estimate(result.model, plan).fits(room) for plan in plans] == [False, True]
            seen += 1
        elif failure.remedy.startswith("fits on"):
            assert failure.memory.fits(hardware.accelerator(failure.remedy.split("such as ")[1]).memory)
            seen += 1
    assert seen >= 4


def test_nothing_fits_says_the_smallest_change():
    with pytest.raises(ConfigError, match=r"does not fit on 8 x T4: the nearest layout .*--gpus (\d+)") as caught:
        found_for("llama-70b", "T4", 8, 2048)
    gpus = int(str(caught.value).split("--gpus ")[1].split()[0])
    assert found_for("llama-70b", "T4", gpus, 2048).candidates
    with pytest.raises(ConfigError, match="does not fit"):
        found_for("llama-70b", "T4", gpus - 8, 2048)


def test_what_is_unlikely_to_fit_is_no_plan_but_the_nearest():
    """A card that holds the smallest layout by a tenth: published runs say that it fits in a third of cases."""
    model, alone = models.load("gpt2-xl"), hardware.cluster("A100-80", 1)
    smallest = min(
        memory.estimate(model, plan).total
        for layout in strategy.layouts(model, 1, 1, 1024, 8, "bf16", offload=False)
        for plan in strategy.variants(layout, model)
    )

    def search(share):
        chip = replace(alone.accelerator, memory=int(smallest / share + memory.RUNTIME))
        cluster = replace(alone, accelerator=chip, host_memory=0)
        return strategy.search(model, cluster, 1024, 8, families=("DDP",))

    with pytest.raises(strategy.NothingFits) as caught:
        search(0.9)
    chance = int(re.search(r"the nearest layout \(DDP \+ .* a chance of (\d+)%", str(caught.value))[1])
    assert 10 < chance < 50 and "it fits with --gpu" in str(caught.value)
    assert search(0.8).best.chance >= strategy.AT_LEAST


@pytest.mark.parametrize(("length", "batch", "says"), [(4096, None, "takes 1 to 2048"), (2048, 3, "--global-batch 8")])
def test_what_cannot_be_divided(length, batch, says):
    model = models.from_config({"model_type": "opt", "num_attention_heads": 1, "num_hidden_layers": 1})
    with pytest.raises(ConfigError, match=says):
        strategy.search(model, hardware.cluster("A100-80", 8), length, batch)


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


LONG = models.load("llama-8b"), hardware.cluster("H100", 64), 131072


def test_long_sequences_are_split_over_context_ranks():
    """Without them FSDP with eight tensor ranks led, which fits with a chance of 9 %: 63 GiB of logits."""
    found = strategy.search(*LONG)
    assert found.best.chance >= strategy.LIKELY and found.best.plan.context > 1
    assert all(candidate.plan.context > 1 for candidate in found.candidates)
    ways = {(each.plan.context_by, each.plan.engine, each.plan.tensor > 1) for each in found.candidates}
    assert {(way, engine, False) for way in ("ring", "ulysses") for engine in ("fsdp", "deepspeed")} <= ways
    assert {("ring", "fsdp", True), ("ulysses", "megatron", True)} <= ways
    for candidate in found.candidates:
        plan = candidate.plan
        assert plan.gpus == 64 and plan.sequence_length // plan.context >= layouts.CONTEXT_TOKENS
        assert plan.context == 1 or plan.sequence_length % (2 * plan.context) == 0
        assert plan.context_by == "ring" or (32 // plan.tensor) % plan.context == 0
        if not to_launchers.runs_here(plan, LONG[0]):
            assert plan.pipeline > 1
        elif plan.engine != "deepspeed":  # it is counted as it is trained
            assert plan.compiled == ("torch_compile" in to_launchers.options(plan, LONG[0]))


def test_copies_and_shared_experts_are_searched_where_they_divide():
    """Copies of a node, of two, of four; experts over every number of ranks that divides both."""
    plans = list(strategy.layouts(models.load("mixtral-8x7b"), 64, 8, 2048, 64, "bf16"))
    assert {plan.shards for plan in plans if plan.replicas > 1} == {8, 16, 32}
    shared = set(itertools.product((2, 4, 8), (0, 1, 2)))
    assert {(plan.expert, plan.stage) for plan in plans if plan.expert > 1} == shared
    one_node = list(strategy.layouts(models.load("llama-8b"), 8, 8, 2048, 64, "bf16"))
    assert {(plan.replicas, plan.expert, plan.context) for plan in one_node} == {(1, 1, 1)}, "nor short sequences split"


def test_copies_have_shorter_rings_and_hold_more():
    """Over 512 GPUs a gather waits for 63 borders of nodes, one of four nodes for three."""
    model, cluster = models.load("llama-8b"), hardware.cluster("H100", 512)
    whole = next(plan for plan in strategy.layouts(model, 512, 8, 2048, 512, "bf16") if plan.strategy == "FSDP")
    copies = replace(whole, replicas=16)
    assert cost.estimate(model, copies, cluster).data < 0.5 * cost.estimate(model, whole, cluster).data
    assert memory.estimate(model, copies).states == pytest.approx(16 * memory.estimate(model, whole).states)
    by_hand = collective("all_reduce", model.layer * 4 / 32, 16, 32, cluster)
    four_nodes = cost.estimate(model, replace(copies, data=32, replicas=1, overlap=False), cluster)
    apart = cost.estimate(model, replace(copies, overlap=False), cluster).data - four_nodes.data
    assert apart == pytest.approx(model.layers * by_hand)


def test_tokens_travel_to_shared_experts_and_back_in_both_passes():
    model, cluster = models.load("mixtral-8x7b"), hardware.cluster("H100", 8)
    plan = next(plan for plan in strategy.layouts(model, 8, 8, 2048, 8, "bf16") if (plan.expert, plan.stage) == (8, 1))
    one_way = collective("all_to_all", 2048 * 2 * model.hidden * 2, 8, 1, cluster)
    spent = cost.estimate(model, plan, cluster)
    assert spent.tensor == pytest.approx(4 * model.layers * one_way * plan.accumulation)
    alone = memory.estimate(model, replace(plan, expert=1))
    shared = memory.estimate(model, plan)
    elsewhere = model.layers * 7 * model.expert
    assert alone.parameters - shared.parameters == pytest.approx(4 * elsewhere)
    assert alone.optimizer == pytest.approx(shared.optimizer), "ZeRO shares all of it either way"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"engine": "ddp", "replicas": 2, "data": 4}, "copies of the model over"),
        ({"engine": "fsdp", "stage": 3, "replicas": 3, "data": 4}, "copies of the model over"),
        ({"engine": "ddp", "expert": 2, "data": 4}, "experts over"),
        ({"engine": "megatron", "expert": 3, "data": 4}, "experts over"),
        ({"engine": "megatron", "expert": 2, "data": 4, "tensor": 2}, "experts over"),
        ({"engine": "fsdp", "stage": 3, "data": 8, "offload": "optimizer"}, "FSDP2 keeps parameters with their"),
        ({"engine": "fsdp", "stage": 3, "optimizer": "adafactor"}, "whole matrices"),
        ({"optimizer": "lion"}, "`lion` is unknown"),
        ({"lora_rank": -1}, "adapters of rank -1"),
        ({"base_bits": 4}, "beside 4 bits"),
        ({"optimizer": "muon", "lora_rank": 4}, "it needs whole matrices"),
    ],
    ids=str,
)
def test_plans_that_cannot_be_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        Plan(1024, **wrong)


def test_losses_are_tried_where_none_is_named():
    model, cluster = models.load("llama-8b"), hardware.cluster("H100", 8)
    both = strategy.search(model, cluster, 8192, losses=("chunked", "linear"))
    linear = {candidate.plan for candidate in both.candidates if candidate.plan.loss == "linear"}
    assert linear and all(plan.tensor == plan.pipeline == 1 and "linear loss" in plan.strategy for plan in linear)
    named = strategy.search(model, cluster, 8192, losses=("chunked", "linear"), settings={"loss": "chunked"})
    assert named.candidates == strategy.search(model, cluster, 8192).candidates
    assert {candidate.plan for candidate in both.candidates} == linear | {each.plan for each in named.candidates}


@pytest.mark.parametrize(
    ("chances", "speeds", "order"),
    [
        ((0.9, 0.85, 0.7), (1.0, 2.0, 9.0), (1, 0, 2)),
        ((0.79, 0.6, 0.5), (1.0, 2.0, 3.0), (2, 1, 0)),
        ((0.8, 0.79, 0.5), (1.0, 9.0, 9.0), (0, 1, 2)),
    ],
)
def test_what_leads(chances, speeds, order):
    """The fastest of 80 % or more, then the fastest of the others."""
    first = strategy.search(models.load("gpt2"), hardware.cluster("A100-80", 1), 1024).best
    costs = [replace(first.cost, tokens=int(1e6 * speed)) for speed in speeds]
    tried = [replace(first, chance=chance, cost=cost) for chance, cost in zip(chances, costs, strict=True)]
    assert sorted(range(3), key=lambda number: strategy.place(tried[number])) == list(order)


def test_for_our_trainer_what_it_runs_comes_first_but_nothing_unlikely():
    found = found_for("gpt2", "T4", 4, 1024)
    ours = found.for_our_trainer()
    assert not to_launchers.runs_here(found.best.plan, found.model), "fp16 under FSDP"
    assert to_launchers.runs_here(ours.best.plan, ours.model) and ours.best.chance >= strategy.LIKELY
    assert sorted(map(repr, ours.candidates)) == sorted(map(repr, found.candidates))
    said = strategy.explain(ours)
    faster = found.best.cost.tokens_per_second / ours.best.cost.tokens_per_second - 1
    assert "is the fastest that `course train` runs of" in said[0]
    assert said[1].startswith(f"Faster by {faster:.0%} with the Hugging Face Trainer: {found.best.plan.strategy}, ")
    others = [
        replace(each, chance=0.3) if to_launchers.runs_here(each.plan, found.model) else each
        for each in found.candidates
    ]
    assert replace(found, candidates=others).for_our_trainer().best == found.best, "what fits comes before what runs"


def test_more_gpus_for_split_sequences_are_counted_with_their_context_ranks():
    model, cluster = models.load("llama-70b"), hardware.cluster("H100", 8)
    plan = next(
        replace(each, checkpointing="full")
        for each in strategy.layouts(model, 8, 8, 8192, 8, "bf16")
        if (each.engine, each.context, each.tensor, each.offload) == ("fsdp", 4, 1, "none")
    )
    said = strategy.remedy(model, cluster, plan)
    gpus = int(said.removeprefix("fits from ").split()[0])
    fewer, enough = (memory.estimate(model, replace(plan, data=count // 4)) for count in (gpus - 4, gpus))
    room = cluster.accelerator.memory
    assert gpus % 4 == 0 and (fewer.fits(room), enough.fits(room)) == (False, True)
