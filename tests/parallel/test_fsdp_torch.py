"""FSDP by torch's fully_shard: equal to one process, and to FSDP from scratch in what it moves and holds."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from course_lib.errors import ConfigError
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.sharding import gather_whole
from course_lib.parallel.torch_engines.fsdp import hybrid_mesh, shard_with_torch
from tests.parallel.between_ranks import here
from tests.parallel.fsdp_cases import (
    TOLERANCE,
    Case,
    assert_trains_as_one_process,
    batch,
    build,
    count_collectives,
    expected,
    furthest,
    identity,
    optimizer_for,
    sizes,
    storage_bytes,
    train,
)
from tests.ranks import on_ranks

KEEP = {"reshard_after_forward": False}
HYBRID = Case(ranks=4, max_norm=0.2, accumulate=2)
CASES = [
    *(Case(ranks=ranks) for ranks in (1, 2, 4)),
    *(Case(model="bert", ranks=ranks, accumulate=2, max_norm=0.2) for ranks in (1, 2, 4)),
    Case(model="bert", evaluate=True, options=KEEP),
    Case(frozen=("wte", "h.0", "h.2.mlp"), max_norm=0.2, accumulate=2),
    Case(checkpointing=True, evaluate=True, ranks=4),
    Case(model="calls checkpoint", checkpointing=True),
    Case(model="albert", frozen=("query",)),
    HYBRID,
]


def shard(case=None, rank=0, mesh=None):
    case = case or Case()
    model = build(case, rank)
    engine = shard_with_torch(model, optimizer_for(model), mesh=mesh, **case.options)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return engine, model


def whole(model):
    return {name: weight.full_tensor() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("case", CASES, ids=identity)
def test_equals_the_single_process(case, ranks):
    wanted = expected(case)
    assert furthest(wanted["weights"], dict(build(case).named_parameters())) > 0.01  # it did learn

    def on_rank():
        mesh = hybrid_mesh("cpu", replicas=2, shards=2) if case is HYBRID else None
        engine, model = shard(case, dist.get_rank(), mesh)
        assert_trains_as_one_process(case, engine, lambda: whole(model))

    ranks(case.ranks, join=True)(on_rank)


@pytest.mark.parametrize("sums", [{}, {"reduce_dtype": torch.float32}], ids=["", "sums in float32"])
@on_ranks(2)
def test_low_precision_agrees_with_the_engine_from_scratch(sums):
    case = Case(options={"param_dtype": torch.bfloat16} | sums)
    theirs, their_model = shard(case)
    own_model = build(case)
    ours = FullyShardedDataParallel(own_model, optimizer_for(own_model), **case.options)
    for engine in (ours, theirs):
        train(case, engine, *here())
    weights = whole(their_model)
    assert_close(gather_whole(ours.shards()) or weights, weights, rtol=0, atol=TOLERANCE)
    assert furthest(weights, expected(Case())["weights"]) > TOLERANCE


@on_ranks(4)
def test_hybrid_sharding_reduces_within_a_copy_and_then_between_copies():
    engine, _ = shard(HYBRID, mesh=hybrid_mesh("cpu", replicas=2, shards=2))
    blocks, root = sizes(build(HYBRID))
    held = storage_bytes(engine.resident()["parameters"])
    assert held == pytest.approx(4 * (sum(blocks) + root) / 2, rel=0.001)
    counted = {"_allgather_base_": 9, "_reduce_scatter_base_": 5, "allreduce_": 5}
    assert count_collectives(engine) == counted
    weights = engine.whole_weights()
    parameters = dict(build(HYBRID).named_parameters(remove_duplicate=False))
    assert_close(weights or parameters, parameters, rtol=0, atol=0)
    assert weights or dist.get_rank() > 0
    with pytest.raises(ConfigError, match="2 replicas of 3 shards are 6 ranks, not 4"):
        hybrid_mesh("cpu", replicas=2, shards=3)


@pytest.mark.parametrize(("options", "gathers"), [({}, 9), (KEEP, 5)], ids=["reshard", "keep"])
@on_ranks(2)
def test_units_are_gathered_and_reduced_as_by_the_engine_from_scratch(options, gathers):
    engine, _ = shard(Case(options=options))
    assert count_collectives(engine) == {"_allgather_base_": gathers, "_reduce_scatter_base_": 5}


@on_ranks(2)
def test_under_no_sync_nothing_is_reduced():
    engine, _ = shard()
    with engine.no_sync():
        assert count_collectives(engine) == {"_allgather_base_": 9}


@on_ranks(2)
def test_a_parameter_without_a_gradient_is_left_alone():
    """One that the loss doesn't reach: the rest trains, and its own gradient stays None as in one process."""
    engine, model = shard(Case(model="bert"))
    model(input_ids=batch(0)["input_ids"], output_hidden_states=True).hidden_states[-1].square().mean().backward()
    engine.clip_grad_norm_(1.0)
    pooler = model.bert.pooler.dense.weight
    before = pooler.full_tensor()
    engine.step()
    assert pooler.grad is None
    assert_close(pooler.full_tensor(), before, rtol=0, atol=0)


def test_cpu_offload_means_nothing_on_a_cpu():
    model = build(Case())
    with pytest.raises(ConfigError, match="on the CPU already: leave it out, or run on a GPU"):
        shard_with_torch(model, optimizer_for(model), cpu_offload=True)


def test_a_parameter_tied_between_units_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"0\.weight is tied to weight of a Linear"):
        shard_with_torch(model, torch.optim.SGD(model.parameters()), units=list(model))
