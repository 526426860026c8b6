"""What pipeline ranks hold: all of the model, as much in flight as the schedule's table, and never more than fits."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from course_lib.modeling.stages import EMBEDDINGS, HEAD, split_evenly
from course_lib.parallel.pipeline import validation
from course_lib.parallel.pipeline.schedules import make
from course_lib.planning import hardware, memory, models, strategy
from course_lib.planning.pipeline_ranks import distinct, in_flight, pipeline_ranks
from course_lib.planning.plan import Plan
from course_lib.planning.strategy import NothingFits
from course_lib.planning.to_launchers import options


def plan_of(pipeline, schedule="1f1b", virtual=1):
    return Plan(1024, engine="megatron", pipeline=pipeline, schedule=schedule, virtual=virtual, accumulation=8)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 5), ("zbv", 1)])
def test_the_ranks_have_the_whole_model_once(schedule, virtual):
    for layers in (12, 32, 80, 126):
        for ranks in range(2, layers // max(2, virtual) + 1):
            parts = pipeline_ranks(plan_of(ranks, schedule, virtual), layers)
            assert sum(part.blocks for part in parts) == layers and len(parts) == ranks
            assert [part.rank for part in parts if part.embeds] == [0]
            assert [part.rank for part in parts if part.predicts] == [0 if schedule == "zbv" else ranks - 1]
            assert len(distinct(parts)) <= 5


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv"])
def test_micro_batches_in_flight_are_those_of_the_schedules_table(schedule):
    """Of a V whose micro-batches do not fill it the formula is a limit."""
    stages = 2 if schedule in ("interleaved", "zbv") else 1
    for ranks in (2, 3, 4, 6):
        for microbatches in (ranks, 2 * ranks, 4 * ranks):
            counted = validation.in_flight(make(schedule, ranks, microbatches))
            formula = [stages * in_flight(schedule, ranks, microbatches, stages, rank) for rank in range(ranks)]
            if schedule == "zbv" and microbatches < 2 * ranks:
                assert all(held <= limit for held, limit in zip(counted, formula, strict=True))
            else:
                assert list(counted) == pytest.approx(formula), (ranks, microbatches)


def test_the_middle_ranks_count():
    """80 layers on 24 ranks: a middle one has more layers than the ends, and the states of 70 B do not fit."""
    model = models.load("llama-70b")
    plan = replace(plan_of(24), recipe="mixed")
    of_each = [memory.of_rank(model, plan, rank) for rank in pipeline_ranks(plan, model.layers)]
    assert sum(each.parameters for each in of_each) == pytest.approx(2 * model.parameters, rel=1e-3)
    largest = memory.estimate(model, plan)
    assert largest.total == max(each.total for each in of_each)
    assert largest.states > 16 * model.parameters / 24


def states_of_the_fullest(model, plan):
    """Bytes of states that the fullest GPU holds at least, counted from the model's own numbers and nothing of ours."""
    block = (model.attention + model.mlp) / plan.tensor
    blocks = -(-model.layers // plan.pipeline)
    fullest = blocks * (block - model.experts * model.expert * (1 - 1 / plan.expert))  # of whole states, on this rank
    recipe, share = plan.bytes, blocks * block / (plan.data * plan.context // plan.replicas)  # of sharded ones
    kept = recipe.parameters * (share if plan.stage == 3 else fullest)
    if plan.offload != "none":
        return 0.0 if plan.offload == "parameters" else kept
    kept += (recipe.gradients + recipe.accumulated) * (share if plan.stage >= 2 else fullest) * (plan.engine != "fsdp")
    return kept + (recipe.master + recipe.moments) * (share if plan.stage >= 1 else fullest)


def no_plan_exceeds(searches, seed):
    """Plans looked at in random searches; each holds its states, and what leads is as likely to fit as it says."""
    draw = random.Random(seed)
    looked, losses = 0, ("chunked", "linear")
    for _ in range(searches):
        model, chip = models.load(draw.choice(sorted(models.bundled()))), draw.choice(hardware.names())
        gpus = draw.choice((1, 2, 3, 4, 6, 8, 16, 24, 48, 96, 192, 512))
        cluster, length = hardware.cluster(chip, gpus), draw.choice((1024, 1024, 16384))
        length = min(length, model.context or length)
        try:
            result = strategy.search(model, cluster, length, losses=losses).for_our_trainer()
        except NothingFits:
            continue
        most = max(candidate.chance for candidate in result.candidates)
        assert result.best.chance >= strategy.LIKELY or most < strategy.LIKELY
        assert min(candidate.chance for candidate in result.candidates) >= strategy.AT_LEAST
        for candidate in result.candidates:
            looked += 1
            states = states_of_the_fullest(model, candidate.plan)
            assert states <= cluster.accelerator.memory, (model.name, chip, gpus, candidate.plan)
            assert states <= candidate.memory.total + candidate.memory.host, candidate.plan
    return looked


@pytest.mark.parametrize("searches", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_no_plan_is_returned_whose_states_alone_exceed_the_memory(searches):
    assert no_plan_exceeds(searches, seed=searches) > 10 * searches


def test_the_trainer_is_told_to_cut_where_the_planner_counts():
    asked = options(replace(plan_of(5), stage=0), models.load("gpt2"))
    assert asked["split_by"] == "blocks"
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=8, n_head=2, vocab_size=99, n_positions=16))
    split = split_evenly(model, 5, by=asked["split_by"])
    held = [sum(unit not in (EMBEDDINGS, HEAD) for unit in split.units_of(stage)) for stage in range(5)]
    assert held == [rank.blocks for rank in pipeline_ranks(plan_of(5), 12)] == [2, 3, 3, 2, 2]
    by_work = split_evenly(model, 5, by="flops")
    assert by_work.cuts != split.cuts, "the head would count as blocks"
