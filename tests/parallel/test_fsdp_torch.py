"""FSDP by torch's fully_shard: equal to one process, and to FSDP from scratch in what it moves and holds."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.sharding import gather_whole
from course_lib.parallel.torch_engines.fsdp import hybrid_mesh, shard_with_torch
from tests.parallel.fsdp_cases import (
    LAYERS,
    Case,
    batch,
    build,
    count_collectives,
    expected,
    forgets,
    furthest,
    groups,
    identity,
    loss_sum,
    optimizer_for,
    over_ranks,
    ranks_differ,
    sizes,
    storage_bytes,
    train,
    watch_parameters,
)

CASES = [
    *(Case(ranks=ranks) for ranks in (1, 2, 4)),
    *(Case(model="bert", ranks=ranks, accumulate=2, max_norm=0.2) for ranks in (1, 2, 4)),
    Case(model="bert", reshard_after_forward=False, evaluate=True),
    Case(frozen=("wte", "h.0", "h.2.mlp"), max_norm=0.2, accumulate=2),
    Case(checkpointing=True, evaluate=True, ranks=4),
    Case(model="calls checkpoint", checkpointing=True),
    Case(model="albert", frozen=("query",)),
]
HYBRID = Case(ranks=4, max_norm=0.2, accumulate=2)
TOLERANCE = 2e-6  # float32 sums in another order; the weights are of the order of 1
LOW_PRECISION = [Case(param_dtype=torch.bfloat16), Case(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)]


def options(case):
    return {
        "reshard_after_forward": case.reshard_after_forward,
        "param_dtype": case.param_dtype,
        "reduce_dtype": case.reduce_dtype,
    }


def trained(case, group, mesh):
    """Losses, norms, evaluation and final weights of one case, from ranks that begin with unlike weights."""
    rank = dist.get_rank(group)
    model = ranks_differ(build(case), rank)
    engine = shard_with_torch(model, optimizer_for(model), mesh=mesh, **options(case))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    outcome = over_ranks(train(case, engine, rank, case.ranks), group)
    return outcome | {"weights": {name: weight.full_tensor() for name, weight in model.named_parameters()}}


def trained_from_scratch(case, group):
    rank = dist.get_rank(group)
    model = build(case)
    engine = FullyShardedDataParallel(model, optimizer_for(model), group=group, **options(case))
    train(case, engine, rank, case.ranks)
    return gather_whole(engine.shards(), group)


def measured(mesh):
    """Bytes and collectives of one step on two ranks."""
    found = {}
    for name, case in {"reshard": Case(), "keep": Case(reshard_after_forward=False)}.items():
        model = build(case)
        engine = shard_with_torch(model, optimizer_for(model), mesh=mesh, **options(case))
        steady = storage_bytes(engine.resident()["parameters"])
        seen = watch_parameters(engine)
        collectives = count_collectives(engine)
        engine.step()
        found[name] = {
            "steady": steady,
            "seen": seen,
            "collectives": collectives,
            "after": {kind: storage_bytes(tensors) for kind, tensors in engine.resident().items()},
        }
    model = build(Case())
    engine = shard_with_torch(model, optimizer_for(model), mesh=mesh)
    with engine.no_sync():
        collectives = count_collectives(engine)
    found["no_sync"] = {"collectives": collectives, "gradients": storage_bytes(engine.resident()["gradients"])}
    found["forgets"] = forgets(engine, lambda: model.transformer.h[0].attn.c_attn.weight.grad.to_local())
    return found


def unused_pooler(mesh):
    """A parameter that the loss doesn't reach: the rest trains, and its own gradient stays None as in one process."""
    model = build(Case(model="bert"))
    engine = shard_with_torch(model, optimizer_for(model), mesh=mesh)
    model(input_ids=batch(0)["input_ids"], output_hidden_states=True).hidden_states[-1].square().mean().backward()
    engine.clip_grad_norm_(1.0)
    before = model.bert.pooler.dense.weight.full_tensor()
    engine.step()
    after = model.bert.pooler.dense.weight.full_tensor()
    return model.bert.pooler.dense.weight.grad is None, torch.equal(before, after)


def gradients(mesh):
    """Gradient of one weight: of this rank's rows alone, and as the engine leaves it."""
    rows = {key: value[dist.get_rank() :: 2] for key, value in batch(0).items()}
    alone, model = build(Case()), build(Case())
    engine = shard_with_torch(model, optimizer_for(model), mesh=mesh)
    for each in (alone, engine):
        loss_sum(each, "gpt2", rows).backward()
    return (
        alone.transformer.h[0].attn.c_attn.weight.grad,
        model.transformer.h[0].attn.c_attn.weight.grad.full_tensor(),
    )


def on_rank():
    dist.init_process_group("gloo")
    mine = {ranks: group for ranks, group in groups().items() if dist.get_rank() < ranks}
    mesh = {ranks: DeviceMesh.from_group(group, "cpu") for ranks, group in mine.items()}
    found = {}
    if 2 in mine:
        found |= {"measured": measured(mesh[2]), "pooler": unused_pooler(mesh[2]), "gradients": gradients(mesh[2])}
        found["scratch"] = {case: trained_from_scratch(case, mine[2]) for case in LOW_PRECISION}
    found["trained"] = {
        case: trained(case, mine[case.ranks], mesh[case.ranks])
        for case in [*CASES, *LOW_PRECISION]
        if case.ranks in mine
    }
    found["hybrid"] = trained(HYBRID, mine[4], hybrid := hybrid_mesh("cpu", replicas=2, shards=2))
    model = build(HYBRID)
    engine = shard_with_torch(model, optimizer_for(model), mesh=hybrid)
    found["hybrid bytes"] = storage_bytes(engine.resident()["parameters"])
    found["hybrid collectives"] = count_collectives(engine)
    found["whole"] = engine.whole_weights()
    with pytest.raises(ConfigError) as caught:
        hybrid_mesh("cpu", replicas=2, shards=3)
    return found | {"refusal": str(caught.value)}


@pytest.fixture(scope="module")
def ranks():
    return launch(on_rank, num_processes=4, timeout=480)


@pytest.fixture(scope="module")
def found(ranks):
    return ranks[0]


@pytest.mark.parametrize("case", [*CASES, HYBRID], ids=identity)
def test_equals_the_single_process(found, case):
    outcome, wanted = found["hybrid"] if case is HYBRID else found["trained"][case], expected(case)
    assert outcome["losses"] == pytest.approx(wanted["losses"], abs=TOLERANCE)
    assert outcome["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    assert len(outcome["norms"]) == (0 if case.max_norm is None else 4)
    assert outcome["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-6)
    assert furthest(outcome["weights"], wanted["weights"]) < TOLERANCE
    assert furthest(wanted["weights"], dict(build(case).named_parameters())) > 0.01  # it did learn


def test_the_cases_are_all_there(found):
    assert len(set(CASES)) == 11 and set(found["trained"]) == {*CASES, *LOW_PRECISION}


@pytest.mark.parametrize("case", LOW_PRECISION, ids=identity)
def test_low_precision_agrees_with_the_engine_from_scratch(found, case):
    ours, theirs = found["scratch"][case], found["trained"][case]["weights"]
    assert furthest(ours, theirs) < TOLERANCE < furthest(theirs, expected(Case())["weights"])


def test_collectives_are_those_of_the_engine_from_scratch(found):
    counted = {
        name: {operation: count for operation, count in outcome["collectives"].items() if count}
        for name, outcome in found["measured"].items()
        if name != "forgets"
    }
    assert counted["reshard"] == {"_allgather_base_": 9, "_reduce_scatter_base_": 5}
    assert counted["keep"] == {"_allgather_base_": 5, "_reduce_scatter_base_": 5}
    assert counted["no_sync"] == {"_allgather_base_": 9}


def test_hybrid_sharding_reduces_within_a_copy_and_then_between_copies(found):
    assert found["hybrid collectives"] == {"_allgather_base_": 9, "_reduce_scatter_base_": 5, "allreduce_": 5}
    blocks, root = sizes(build(Case()))
    assert found["hybrid bytes"] == pytest.approx(4 * (sum(blocks) + root) / 2, rel=0.001)
    assert furthest(found["whole"], found["whole"] | dict(build(Case()).named_parameters())) == 0
    assert "2 replicas of 3 shards are 6 ranks, not 4" in found["refusal"]


def test_a_rank_holds_1_nth_and_the_whole_only_while_it_computes(found):
    blocks, root = sizes(build(Case()))
    resharded, kept = found["measured"]["reshard"], found["measured"]["keep"]
    for outcome in (resharded, kept):
        assert outcome["steady"] == outcome["after"]["parameters"] == pytest.approx(2 * (sum(blocks) + root), rel=0.001)
        assert outcome["after"]["gradients"] == pytest.approx(2 * (sum(blocks) + root), rel=0.001)
        assert outcome["after"]["optimizer states"] == pytest.approx(4 * (sum(blocks) + root), rel=0.01)
        assert len(outcome["seen"]) == 2 * LAYERS
    one_block = resharded["steady"] + 4 * (root + blocks[0])
    assert [size for kind, i, size in resharded["seen"]] == [pytest.approx(one_block, rel=0.001)] * 2 * LAYERS
    assert ("F", LAYERS - 1, kept["steady"] + 4 * (sum(blocks) + root)) in kept["seen"]
    assert found["measured"]["no_sync"]["gradients"] == pytest.approx(4 * (sum(blocks) + root), rel=0.001)


def test_zero_grad_forgets_what_no_sync_keeps(found):
    plain, after_another = found["measured"]["forgets"]
    assert torch.equal(plain, after_another) and plain.abs().max() > 0.01


def test_a_parameter_without_a_gradient_is_left_alone(found):
    assert found["pooler"] == (True, True)


def test_cpu_offload_means_nothing_on_a_cpu():
    model = build(Case())
    with pytest.raises(ConfigError, match="on the CPU already: leave it out, or run on a GPU"):
        shard_with_torch(model, optimizer_for(model), cpu_offload=True)


def test_a_parameter_tied_between_units_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"0\.weight is tied to weight of a Linear"):
        shard_with_torch(model, torch.optim.SGD(model.parameters()), units=list(model))
