"""FSDP from scratch: equal to one process with the whole batch, with 1/N of everything on a rank."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from course_lib.errors import ConfigError, ModelError
from course_lib.launching.launch import launch
from course_lib.parallel import blocks
from course_lib.parallel.fsdp import FlatParamGroup, FullyShardedDataParallel
from course_lib.parallel.sharded_unit import Reduction
from course_lib.parallel.sharding import Shard, gather_whole, scatter_whole
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
    *(Case(model=model, ranks=ranks) for model in ("gpt2", "bert") for ranks in (1, 2, 4)),
    *(Case(reshard_after_forward=False, ranks=ranks, evaluate=True) for ranks in (1, 2, 4)),
    *(Case(model="bert", ranks=ranks, accumulate=2, max_norm=0.2) for ranks in (1, 2, 4)),
    Case(prefetch=False, max_norm=0.2),
    Case(reshard_after_forward=False, accumulate=2, checkpointing=True),
    Case(model="calls checkpoint", checkpointing=True),
    Case(model="calls checkpoint", checkpointing=True, early_stop=False),
    Case(frozen=("wte", "h.0", "h.2.mlp"), max_norm=0.2),
    Case(model="bert", ranks=4, frozen=("embeddings", "layer.0", "layer.1.attention"), accumulate=2),
    Case(max_norm=0.2, accumulate=2),
    Case(ranks=4, checkpointing=True, evaluate=True, max_norm=0.2),
    Case(model="bert", checkpointing=True, evaluate=True),
    Case(model="albert", frozen=("query",)),
    Case(model="t5", checkpointing=True),
    Case(model="t5", ranks=4, evaluate=True),
]
TOLERANCE = 2e-6  # float32 sums in another order; the losses are below 4, the weights of the order of 1
BF16 = Case(param_dtype=torch.bfloat16)
BF16_SUMS_FP32 = Case(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(case, model, group, **options):
    return FullyShardedDataParallel(
        model,
        optimizer_for(model),
        group=group,
        reshard_after_forward=case.reshard_after_forward,
        prefetch=case.prefetch,
        param_dtype=case.param_dtype,
        reduce_dtype=case.reduce_dtype,
        **options,
    )


def trained(case, group):
    """Losses, norms, evaluation and final weights of one case, from ranks that begin with unlike weights."""
    rank = dist.get_rank(group)
    engine = shard(case, ranks_differ(build(case), rank), group)
    outcome = over_ranks(train(case, engine, rank, case.ranks), group)
    return outcome | {"weights": gather_whole(engine.shards(), group)}


class Unreduced(FlatParamGroup):
    """Each rank keeps its own gradient of its shard: FSDP without the reduction."""

    def reduce_scatter(self):
        whole, self.gradient = self.gradient, None
        mine = whole.view(self.world, -1)[dist.get_rank(self.group)] * self.world
        done = dist.barrier(group=self.group, async_op=True)
        return Reduction(self, whole, mine.clone(), done)


def gathers_before_compute(group, prefetch):
    """How many all-gathers had been issued as each block began to compute."""
    model = build(Case())
    engine = shard(Case(prefetch=prefetch), model, group)
    issued, seen, real = [], [], dist.all_gather_single
    for block in blocks.blocks(model).values():
        block.register_forward_pre_hook(lambda module, args: seen.append(len(issued)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_single", lambda *args, **kwargs: issued.append(0) or real(*args, **kwargs))
        with torch.no_grad():
            loss_sum(engine, "gpt2", batch(0))
    return seen


def measured(group):
    """Bytes and collectives of one step on two ranks."""
    found = {}
    cases = {
        "reshard": Case(),
        "keep": Case(reshard_after_forward=False),
        "no prefetch": Case(prefetch=False),
        "frozen": Case(frozen=("h.0", "h.2.mlp")),
    }
    for name, case in cases.items():
        engine = shard(case, build(case), group)
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
    engine = shard(Case(), build(Case()), group)
    with engine.no_sync():
        collectives = count_collectives(engine)
    found["no_sync"] = {"collectives": collectives, "gradients": storage_bytes(engine.resident()["gradients"])}
    found["forgets"] = forgets(engine, lambda: engine.shards()["transformer.h.0.attn.c_attn.weight"].data.grad)
    return found


def reloaded(group):
    """The loss after the shards have been overwritten with the whole weights of another model, and that model's."""
    other = build(Case())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        expected = loss_sum(other, "gpt2", batch(0)).item()
        engine = shard(Case(), build(Case()), group)
        before = loss_sum(engine, "gpt2", batch(0)).item()
        scatter_whole(dict(other.named_parameters()), engine.shards())
        engine.refresh()
        return before, loss_sum(engine, "gpt2", batch(0)).item(), expected


def two_forwards_one_backward(group):
    """Where the loss compares two outputs of one model: the largest gradient, and how far off FSDP's are."""
    model = build(Case(model="bert"))
    halves = [{key: value[half::2] for key, value in batch(0).items()} for half in (0, 1)]

    def loss(module):
        first, second = (loss_sum(module, "bert", rows) for rows in halves)
        return first * second

    loss(model).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model = build(Case(model="bert"))
    engine = shard(Case(model="bert"), model, group)
    loss(engine).backward()
    gradients = {name: Shard(shard.shape, shard.start, shard.data.grad) for name, shard in engine.shards().items()}
    whole = gather_whole(gradients, group)
    return max(gradient.abs().max() for gradient in expected.values()), furthest(whole or expected, expected)


def on_rank():
    dist.init_process_group("gloo")
    group_of = groups()
    mine = {ranks: group for ranks, group in group_of.items() if dist.get_rank() < ranks}
    found = {
        "trained": {
            case: trained(case, mine[case.ranks]) for case in [*CASES, BF16, BF16_SUMS_FP32] if case.ranks in mine
        }
    }
    if 2 in mine:
        found |= {
            "measured": measured(mine[2]),
            "reloaded": reloaded(mine[2]),
            "two forwards": two_forwards_one_backward(mine[2]),
            "gathers": {prefetch: gathers_before_compute(mine[2], prefetch) for prefetch in (True, False)},
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FullyShardedDataParallel, "unit_type", Unreduced)
            found["unreduced"] = trained(Case(), mine[2])
    return found


@pytest.fixture(scope="module")
def ranks():
    return launch(on_rank, num_processes=4, timeout=480)


@pytest.fixture(scope="module")
def found(ranks):
    return ranks[0]


def test_without_the_reduction_the_weights_drift(found):
    assert furthest(found["unreduced"]["weights"], expected(Case())["weights"]) > 1000 * TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=identity)
def test_equals_the_single_process(found, case):
    outcome, wanted = found["trained"][case], expected(case)
    assert outcome["losses"] == pytest.approx(wanted["losses"], abs=TOLERANCE)
    assert furthest(wanted["weights"], dict(build(case).named_parameters())) > 0.01  # it did learn
    assert outcome["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    assert all(norm > case.max_norm for norm in wanted["norms"][:2])  # so that there was something to clip
    assert outcome["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-6)
    assert furthest(outcome["weights"], wanted["weights"]) < TOLERANCE


def test_the_cases_are_all_there(found):
    assert len(set(CASES)) == 24 and {case.ranks for case in CASES} == {1, 2, 4}
    assert set(found["trained"]) == {*CASES, BF16, BF16_SUMS_FP32}


def test_the_oracle_feels_clipping_freezing_and_the_uneven_batch():
    plain = expected(Case(model="bert"))["weights"]
    assert furthest(expected(Case(model="bert", max_norm=0.2))["weights"], plain) > 1000 * TOLERANCE
    assert furthest(expected(Case(model="bert", frozen=("layer.0",)))["weights"], plain) > 1000 * TOLERANCE


def test_bf16_stays_near_and_the_dtype_of_the_sum_counts(found):
    """Stated tolerance: losses within 0.5 % of float32's after 4 steps."""
    low, high = found["trained"][BF16], found["trained"][BF16_SUMS_FP32]
    for outcome in (low, high):
        assert outcome["losses"] == pytest.approx(expected(Case())["losses"], rel=5e-3)
        assert all(weight.dtype == torch.float32 for weight in outcome["weights"].values())
        assert furthest(outcome["weights"], expected(Case())["weights"]) > TOLERANCE
    assert furthest(low["weights"], high["weights"]) > TOLERANCE


def test_a_rank_holds_1_nth_and_the_root_and_two_blocks_while_it_computes(found):
    blocks, root = sizes(build(Case()))
    assert len(blocks) == LAYERS
    for name, gathered in {"reshard": 2, "no prefetch": 1}.items():
        outcome = found["measured"][name]
        total = sum(blocks) + root
        assert outcome["steady"] == pytest.approx(4 * total / 2, rel=0.001)
        peak = {
            (kind, i): outcome["steady"] + 4 * (root + min(gathered, places) * blocks[0])
            for i in range(LAYERS)
            for kind, places in (("F", LAYERS - i), ("B", i + 1))
        }
        assert len(outcome["seen"]) == 2 * LAYERS
        for kind, i, size in outcome["seen"]:
            assert size == pytest.approx(peak[kind, i], rel=0.001), (name, kind, i)
        after = outcome["after"]
        assert after["parameters"] == outcome["steady"]
        assert after["gradients"] == pytest.approx(4 * total / 2, rel=0.001)
        assert after["optimizer states"] == pytest.approx(8 * total / 2, rel=0.01)
        assert after["communication buffers"] == 0


def test_without_resharding_all_is_held_until_the_backward(found):
    blocks, root = sizes(build(Case()))
    outcome = found["measured"]["keep"]
    last_forward = [size for kind, i, size in outcome["seen"] if (kind, i) == ("F", LAYERS - 1)]
    assert last_forward == [pytest.approx(outcome["steady"] + 4 * (sum(blocks) + root), rel=0.001)]
    assert [size for kind, i, size in outcome["seen"] if (kind, i) == ("B", 0)][0] < last_forward[0] * 0.7
    assert outcome["after"]["parameters"] == outcome["steady"]


def test_collectives_of_a_step(found):
    gathers, scatters = "_allgather_base_", "_reduce_scatter_base_"
    counted = {name: outcome["collectives"] for name, outcome in found["measured"].items() if name != "forgets"}
    plain = {gathers: (LAYERS + 1) + LAYERS, scatters: LAYERS + 1}
    assert counted["reshard"] == counted["no prefetch"] == plain == {gathers: 9, scatters: 5}
    assert counted["keep"] == {gathers: LAYERS + 1, scatters: LAYERS + 1}
    assert counted["no_sync"] == {gathers: 9}
    # Block 0 is frozen: no gradient to reduce. In block 2 the frozen part is a unit of its own, gathered each time.
    assert counted["frozen"][scatters] == LAYERS and counted["frozen"][gathers] > 9


def test_under_no_sync_a_rank_holds_the_whole_gradients(found):
    blocks, root = sizes(build(Case()))
    assert found["measured"]["no_sync"]["gradients"] == pytest.approx(4 * (sum(blocks) + root), rel=0.001)


def test_zero_grad_forgets_what_no_sync_keeps(found):
    plain, after_another = found["measured"]["forgets"]
    assert torch.equal(plain, after_another) and plain.abs().max() > 0.01


def test_the_next_gather_is_issued_before_a_block_computes(found):
    assert found["gathers"] == {True: [3, 4, 5, 5], False: [2, 3, 4, 5]}


def bytes_of_gathers():
    """Of each gather in which two ranks put 40 bytes together, 20 of them from rank 1; and what rank 0 has then."""
    dist.init_process_group("gloo")
    rank, real, sent = dist.get_rank(), dist.gather, []

    def counted(tensor, *arguments, **options):
        sent.append(tensor.nbytes)
        return real(tensor, *arguments, **options)

    with mock.patch.object(dist, "gather", counted):
        whole = gather_whole({"weight": Shard(torch.Size([10]), 5 * rank, torch.full((5,), float(rank)))})
    return sent, {name: tensor.tolist() for name, tensor in whole.items()}


def test_a_gather_takes_the_room_of_what_is_sent():
    assert launch(bytes_of_gathers, num_processes=2) == [([20], {"weight": [0.0] * 5 + [1.0] * 5}), ([20], {})]


def test_new_weights_in_the_pieces_count_after_a_refresh(found):
    before, after, wanted = found["reloaded"]
    assert after == pytest.approx(wanted, rel=1e-6) and abs(before - wanted) > 1e-3


def test_two_forwards_before_one_backward(found):
    largest, difference = found["two forwards"]
    assert largest > 1 and difference < 1e-6 * largest


@pytest.mark.parametrize(
    "name, options, classes",
    [
        ("Bert", {"num_hidden_layers": 3}, {"BertLayer": 3}),
        ("DistilBert", {"n_layers": 3}, {"TransformerBlock": 3}),
        ("Roberta", {"num_hidden_layers": 3}, {"RobertaLayer": 3}),
        ("GPT2", {"n_layer": 3}, {"GPT2Block": 3}),
        ("OPT", {"num_hidden_layers": 3}, {"OPTDecoderLayer": 3}),
        ("T5", {"num_layers": 3}, {"T5Block": 6}),
        ("Llama", {"num_hidden_layers": 3}, {"LlamaDecoderLayer": 3}),
        ("Albert", {}, {"AlbertLayerGroup": 1}),
        ("Bart", {"encoder_layers": 2, "decoder_layers": 3}, {"BartEncoderLayer": 2, "BartDecoderLayer": 3}),
    ],
)
def test_blocks_of_known_models(name, options, classes):
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))
    found = blocks.blocks(model)
    counts = {}
    for path, block in found.items():
        assert model.get_submodule(path) is block
        counts[type(block).__name__] = counts.get(type(block).__name__, 0) + 1
    assert counts == classes


def test_tied_parameters_belong_to_the_root():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, second, nn.Linear(4, 4))
    second.weight, model[2].bias = first.weight, first.bias
    owner = blocks.owners(model, [first, second])
    assert owner[first.weight] is owner[first.bias] is owner[model[2].weight] is model
    assert owner[second.bias] is second and len(owner) == 4


def refusals():
    dist.init_process_group("gloo")
    said = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for options in ({"optimizer": torch.optim.LBFGS(model.parameters())}, {"units": [model, model[0]]}, {}):
        with pytest.raises(ConfigError) as caught:
            FullyShardedDataParallel(model, **{"optimizer": torch.optim.SGD(model.parameters())} | options)
        said.append(str(caught.value))
    FullyShardedDataParallel(model, torch.optim.SGD(model.parameters()), units=[model[0]])
    with pytest.raises(ModelError) as caught:
        model.state_dict()
    assert model[0].weight.shape == (4, 4) and model[0].weight.isnan().all()
    return [*said, str(caught.value)]


def test_refusals_say_what_to_do():
    said = launch(refusals, num_processes=1, timeout=240)[0]
    assert "cannot shard LBFGS" in said[0] and "unit Linear lies within unit Sequential" in said[1]
    assert "no nn.ModuleList of like blocks" in said[2] and "gather_whole(engine.shards())" in said[3]
