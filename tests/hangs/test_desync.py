"""Ranks that disagree are stopped, with what differs, where and by how much; ranks that agree are left alone."""

import dataclasses
import functools
import math
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from course_lib.errors import DesyncError
from course_lib.hangs.desync import GatheringRanks, compare, digest_of, replicas, topic
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.training.callbacks import desync
from tests.hangs.desync_runs import OFF, Plant, a_run, train, trained
from tests.narrow_presets import WIDTH, narrow_presets  # noqa: F401
from tests.ranks import on_ranks

# --- the comparison itself, on three ranks ---


def weights():
    torch.manual_seed(0)
    return {
        "table": torch.randn(5000, 4),
        "bias": torch.randn(3),
        "half": torch.randn(300).bfloat16(),
        "mask": torch.ones(7, dtype=torch.bool),
    }


CHANGES = {  # of rank 1's tensors: the tensor that is named, by how much it differs, and how many do
    "one bit": (lambda it: it["table"].view(torch.int32)[3333, 1].bitwise_xor_(1), "table", r"\d\S*e-(0[7-9]|\d\d)", 1),
    "swapped": (lambda it: it["bias"].copy_(it["bias"][[1, 0, 2]]), "bias", r"\d\S*", 1),
    "all moved": (lambda it: (it["table"].add_(0.25), it["half"].mul_(2)), "table", "0.25", 2),
    "no number": (lambda it: it["bias"][2].fill_(math.nan), "bias", "nan", 1),
    "flipped": (lambda it: it["mask"][6].fill_(False), "mask", "1", 1),
}


def changed(name):
    tensors = weights()
    CHANGES[name][0](tensors)
    return tensors


def changed_on_rank_1(name):
    return changed(name) if dist.get_rank() == 1 else weights()


def heard(*topics):
    try:
        compare(topics, "now", GatheringRanks(torch.device("cpu")))
    except DesyncError as error:
        return str(error)
    return None


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(3)
def test_every_bit_counts_in_a_full_comparison_and_the_copy_that_differs_is_named(change):
    assert heard(replicas(weights(), "mend it")) is None
    _, name, much, differ = CHANGES[change]
    said = heard(replicas(changed_on_rank_1(change), "mend it"))
    told = rf"`{name}` of rank 1 is not that of ranks 0, 2, by up to {much} \({differ} of 4 tensors differ\): mend it"
    assert re.fullmatch(f"ranks disagree now: {told}", said), said


@on_ranks(3)
def test_a_sample_finds_what_moves_a_whole_tensor_at_once():
    moved = heard(replicas(changed_on_rank_1("all moved"), "mend it", elements=64))
    assert "`table` of rank 1 is not that of ranks 0, 2, by up to 0.25" in moved
    assert heard(replicas(changed_on_rank_1("one bit"), "mend it", elements=64)) is None, "not in this sample"


def test_a_sample_finds_a_single_bit_in_time():
    """As the offset goes round, each element has its turn."""
    stride = 20_000 // 64

    def digests(tensors):
        return [replicas(tensors, "", elements=64, offset=offset).digest for offset in range(stride)]

    pairs = zip(digests(weights()), digests(changed("one bit")), strict=True)
    assert sum(one != other for one, other in pairs) == 1


def test_digests_are_of_bits_and_places():
    x = torch.randn(100)
    same = digest_of([x])
    assert digest_of([x.clone()]) == same and -(2**63) <= same < 2**63
    assert len({same, digest_of([x.flip(0)]), digest_of([-x]), digest_of([x[:99]]), digest_of([x, x])}) == 5
    assert digest_of([torch.zeros(1)]) != digest_of([-torch.zeros(1)]), "the bits, not the values"
    long = torch.arange(600_000)
    assert digest_of(list(long.split(2**18))) != digest_of(list(long.flip(0).split(2**18)))
    wide, narrow = torch.tensor([4]), torch.tensor([4], dtype=torch.int32)
    assert digest_of([wide + 1, narrow - 1]) != digest_of([wide, narrow]), "one dtype does not make up for another"
    assert digest_of([]) == 0


@on_ranks(3)
def test_facts_are_told_with_every_ranks_value():
    rank = dist.get_rank()

    def said_of(facts, part=0):
        return heard(topic(facts, "mend it", part))

    assert said_of({"`seed`": "1"}) is None
    assert said_of({"`seed`": "1", "`lr`": "2" if rank == 2 else "1"}) == (
        "ranks disagree now: `lr` is 1 on ranks 0, 1 and 2 on rank 2: mend it"
    )
    assert said_of({"`a`": "1"} | ({"`b`": "2"} if rank == 0 else {})) == (
        "ranks disagree now: `b` is 2 on rank 0 and absent on ranks 1, 2: mend it"
    )
    assert said_of(dict.fromkeys(["`a`", "`b`"] if rank else ["`b`", "`a`"], "1")) == (
        "ranks disagree now: the order is `b`, `a` on rank 0 and `a`, `b` on ranks 1, 2: mend it"
    )
    part = min(rank, 1)
    assert said_of({"`stage`": str(part)}, part) is None
    assert said_of({"`stage`": str(rank)}, part) == (
        "ranks disagree now: `stage` is 1 on rank 1 and 2 on rank 2: mend it"
    )


# --- in a run ---


def frozen(trainer):
    trainer.model.get_parameter("classifier.bias").requires_grad_(False)


def another_type(trainer):
    trainer.model.classifier.double()


def wider(trainer):
    old = trainer.model.classifier
    trainer.model.classifier = nn.Linear(old.in_features, old.out_features + 1)


def ahead(trainer):
    trainer.state.step = 3


def moved(trainer):
    next(p for p in trainer.model.parameters() if p.numel()).add_(0.5)


def another_label(trainer):
    trainer.data = dataclasses.replace(trainer.data, fingerprint="0" * 32)


BEFORE = "ranks disagree before the first step: "
MOVED = r".* of rank 1 is not that of rank 0, by up to 0\.5 \(1 of 73 tensors differ\)"
WEIGHT = re.escape(f"(3, {WIDTH}) float32 trained on rank 0 and ")
DISAGREEMENTS = {
    ("on_connect", another_label): f"{BEFORE}the data's fingerprint is .* on rank 0 and 000000000000 on rank 1",
    (
        "on_connect",
        frozen,
    ): rf"{BEFORE}parameter `classifier.bias` is \(3,\) float32 trained on rank 0 and \(3,\) float32 frozen",
    ("on_connect", another_type): rf"{BEFORE}.*{WEIGHT}\(3, {WIDTH}\) float64 trained on rank 1",
    ("on_connect", wider): rf"{BEFORE}.*{WEIGHT}\(4, {WIDTH}\) float32 trained on rank 1",
    ("on_train_begin", ahead): f"{BEFORE}the step is 0 on rank 0 and 3 on rank 1",
    ("on_step_end", moved): rf"ranks disagree after step 2 \(they agreed before the first step\): {MOVED}",
}


SHARDED = {
    "zero1 torch": {"strategy": "zero1", "engine": "torch"},
    "zero2 scratch": {"strategy": "zero2", "engine": "scratch"},
    "zero2 torch": {"strategy": "zero2", "engine": "torch"},
    "zero3 scratch": {"strategy": "zero3", "engine": "scratch"},
    "fsdp torch": {"strategy": "fsdp", "engine": "torch"},
    "hsdp": {"strategy": "fsdp", "engine": "torch", "shard_group_size": 1},
}
HOLD_ALL = ("zero1 torch", "zero2 scratch", "hsdp")
OFTEN = {"desync_check": "full", "desync_steps": 1, "max_steps": 2}
OTHER_RATE = {"learning_rate": 2e-3}


def of_all_parameters(folder):
    """As if none were sharded."""
    with mock.patch.object(desync, "held_alike", lambda trainer: [(0, trainer.stored.parameters())]):
        return train(folder, OFTEN | SHARDED["fsdp torch"])


@pytest.fixture(scope="module")
def ends(ranks, tmp_path_factory):
    """What each of many runs gave on two ranks."""
    step_end = functools.partial(Plant, "on_step_end", moved)
    runs = {"healthy": a_run({}), "rate": a_run({}, rank_1=OTHER_RATE), "all parameters": of_all_parameters}
    runs |= {"unguarded rate": a_run(OFF, rank_1=OTHER_RATE), "unguarded moved": a_run(OFF, step_end())}
    runs |= {deed.__name__: a_run({}, Plant(hook, deed)) for hook, deed in DISAGREEMENTS}
    runs |= {name: a_run(OFTEN | options) for name, options in SHARDED.items()}
    runs |= {f"{name} moved": a_run(OFTEN | SHARDED[name], step_end()) for name in HOLD_ALL}
    return trained(ranks(2), tmp_path_factory.mktemp("runs"), runs)


@pytest.mark.parametrize("plant", DISAGREEMENTS, ids=lambda plant: plant[1].__name__)
def test_what_differs_on_one_rank_is_named_on_both(ends, plant):
    first, second = ends[plant[1].__name__]
    assert first == second and re.match(DISAGREEMENTS[plant], first), first


def test_options_that_differ_are_named(ends):
    first, second = ends["rate"]
    assert first == second and first.startswith(f"{BEFORE}`learning_rate` is 0.001 on rank 0 and 0.002 on rank 1")


def test_healthy_ranks_end_alike_and_others_without_the_guard_with_two_models(ends):
    first, second = ends["healthy"]
    assert first == second and first[0] == 4
    for name in ("unguarded rate", "unguarded moved"):
        (steps, weights), (others, second) = ends[name]
        assert steps == others == 4 and weights != second


@pytest.mark.parametrize("name", SHARDED)
def test_what_is_sharded_is_not_compared_and_what_is_held_alike_is(ends, name):
    """Full comparisons after every step, of healthy ranks and of one whose copy was changed just before."""
    first, second = ends[name]
    assert (first[0], second[0]) == (2, 2), first
    if name in HOLD_ALL:
        assert first == second
        first, second = ends[f"{name} moved"]
        assert first == second and "rank 1 is not that of rank 0, by up to 0.5" in first


def test_a_comparison_of_shards_would_accuse_healthy_ranks(ends):
    assert "rank 1 is not that of rank 0" in ends["all parameters"][0]


PIPELINE = {"training_type": "pipeline", "data_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_chunks": 2}


def test_the_copies_of_a_stage_are_compared_with_each_other_alone(ranks, tmp_path):
    """Two pipelines of two ranks: ranks 1 and 3 hold the second stage."""
    options = PIPELINE | {"desync_steps": 1, "max_steps": 2}
    runs = {"ddp": a_run(options), "zero1": a_run(options | {"strategy": "zero1"})}
    runs["moved"] = a_run(options, Plant("on_step_end", moved, rank=3))
    ends = trained(ranks(4), tmp_path, runs)
    for name in ("ddp", "zero1"):
        first, second, *copies = ends[name]
        assert [first, second] == copies and first != second and first[0] == 2
    (said,) = set(ends["moved"])
    assert " of rank 3 is not that of rank 1, by up to 0.5 (1 of " in said


@pytest.mark.parametrize("seeds_alike", [True, False])
@on_ranks(2)
def test_the_replicated_parameters_of_tensor_parallelism(seeds_alike):
    """Ranks that draw other dropout masks drift apart in what each of them has whole."""
    torch.manual_seed(0)
    model = TensorParallel(GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)))
    torch.manual_seed(0 if seeds_alike else dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    whole = {name: each for name, each in model.module.named_parameters() if name not in model.splits}
    assert len(whole) == 9, "position embedding, three norms, and the biases of the row-parallel layers"
    said = heard(replicas(whole, "seed the ranks of a group alike"))
    if seeds_alike:
        assert said is None
    else:
        assert "` of rank 1 is not that of rank 0, by up to " in said and "seed the ranks of a group alike" in said
