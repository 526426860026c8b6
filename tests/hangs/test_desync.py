"""Ranks that disagree are stopped, with what differs, where and by how much; ranks that agree are left alone."""

import contextlib
import dataclasses
import math
import os
import re
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from course_lib.config import build
from course_lib.errors import DesyncError
from course_lib.hangs.desync import GatheringRanks, compare, digest_of, local, replicas, topic
from course_lib.launching.launch import launch
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.training.callbacks import Callback, desync
from course_lib.training.callbacks.guards import guards
from course_lib.training.run import build_trainer
from tests.narrow_presets import WIDTH, narrow_presets  # noqa: F401

QUICK = {
    "model": "tiny-bert",
    "training_type": "accelerated",
    "max_train_samples": 24,
    "max_eval_samples": 8,
    "max_length": 16,
    "max_steps": 4,
    "batch_size": 2,
    "logging_steps": 100,
    "progress_bar": False,
    "device": "cpu",
    "learning_rate": 1e-3,
    "save_steps": 0,
    "eval_steps": 0,
    "keep_best": False,
    "desync_steps": 2,
    "tracker": "none",
    "watchdog": 0,
}


# --- the comparison itself, on three ranks ---


def weights(seed=0):
    torch.manual_seed(seed)
    return {
        "table": torch.randn(5000, 4),
        "bias": torch.randn(3),
        "half": torch.randn(300).bfloat16(),
        "mask": torch.ones(7, dtype=torch.bool),
    }


def nothing(tensors):
    """All ranks stay alike."""


def one_bit(tensors):
    tensors["table"].view(torch.int32)[3333, 1] ^= 1


def swapped(tensors):
    tensors["bias"][[0, 1]] = tensors["bias"][[1, 0]]


def all_moved(tensors):
    tensors["table"] += 0.25
    tensors["half"] *= 2


def no_number(tensors):
    tensors["bias"][2] = math.nan


def flipped(tensors):
    tensors["mask"][6] = False


CHANGES = (nothing, one_bit, swapped, all_moved, no_number, flipped)


def said_of_tensors(elements):
    """What a comparison says, a change of rank 1's tensors each."""
    dist.init_process_group("gloo")
    said = {}
    for change in CHANGES:
        tensors = weights()
        if dist.get_rank() == 1:
            change(tensors)
        said[change.__name__] = heard(lambda tensors=tensors: [replicas(tensors, "mend it", elements=elements)])
    return said


def heard(topics):
    try:
        compare(topics(), "now", GatheringRanks(torch.device("cpu")))
    except DesyncError as error:
        return str(error)
    return None


def test_every_bit_counts_in_a_full_comparison_and_the_copy_that_differs_is_named():
    every = launch(said_of_tensors, None, num_processes=3, timeout=200)
    said = every[0]
    assert every == [said] * 3, "every rank says the same"
    assert said.pop("nothing") is None and len(said) == len(CHANGES) - 1
    assert all(
        " of rank 1 is not that of ranks 0, 2, by up to " in line and line.endswith(": mend it")
        for line in said.values()
    )
    assert "`table` of rank 1" in said["one_bit"] and "(1 of 4 tensors differ)" in said["one_bit"]
    assert float(said["one_bit"].split("by up to ")[1].split()[0]) < 1e-6
    assert "`bias` of rank 1" in said["swapped"]
    assert "`table` of rank 1" in said["all_moved"] and "by up to 0.25 (2 of 4" in said["all_moved"]
    assert "by up to nan" in said["no_number"] and "`mask` of rank 1" in said["flipped"]


def test_a_sample_finds_what_moves_a_whole_tensor_at_once_and_a_single_bit_in_time():
    said = launch(said_of_tensors, 64, num_processes=3, timeout=200)[0]
    assert "`table` of rank 1 is not that of ranks 0, 2, by up to 0.25" in said["all_moved"]
    assert said["nothing"] is None and said["one_bit"] is None, "one element of 20,000, which is not in this sample"
    tensors, changed = weights(), weights()
    one_bit(changed)
    stride = tensors["table"].numel() // 64
    seen = [
        offset
        for offset in range(stride)
        if replicas(tensors, "", elements=64, offset=offset).digest
        != replicas(changed, "", elements=64, offset=offset).digest
    ]
    assert len(seen) == 1, "as the offset goes round, each element has its turn"


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


def said_of_facts():
    """What a comparison says of facts that differ, in words, and within parts."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    facts = {
        "alike": ({"`seed`": "1"}, 0),
        "value": ({"`seed`": "1", "`lr`": "2" if rank == 2 else "1"}, 0),
        "missing": ({"`a`": "1"} | ({"`b`": "2"} if rank == 0 else {}), 0),
        "order": (dict.fromkeys(["`a`", "`b`"] if rank else ["`b`", "`a`"], "1"), 0),
        "of another part": ({"`stage`": str(min(rank, 1))}, min(rank, 1)),
        "within a part": ({"`stage`": str(rank)}, min(rank, 1)),
    }
    return {
        name: heard(lambda each=each, part=part: [topic(each, "mend it", part)]) for name, (each, part) in facts.items()
    }


def test_facts_are_told_with_every_ranks_value():
    every = launch(said_of_facts, num_processes=3, timeout=200)
    assert every[0] == every[1] == every[2]
    assert every[0] == {
        "alike": None,
        "value": "ranks disagree now: `lr` is 1 on ranks 0, 1 and 2 on rank 2: mend it",
        "missing": "ranks disagree now: `b` is 2 on rank 0 and absent on ranks 1, 2: mend it",
        "order": "ranks disagree now: the order is `b`, `a` on rank 0 and `a`, `b` on ranks 1, 2: mend it",
        "of another part": None,
        "within a part": "ranks disagree now: `stage` is 1 on rank 1 and 2 on rank 2: mend it",
    }


# --- in a run ---


class Plant(Callback):
    """Does something to one rank, at one of the trainer's hooks."""

    def __init__(self, hook, deed, rank=1):
        self.rank, self.deed, self.seen = rank, deed, 0
        setattr(self, hook, self.once)

    def once(self, trainer):
        self.seen += 1
        if trainer.rank == self.rank and self.seen == 1:
            self.deed(trainer)


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
    with torch.no_grad():
        next(p for p in trainer.model.parameters() if p.numel()).add_(0.5)


def another_label(trainer):
    trainer.data = dataclasses.replace(trainer.data, fingerprint="0" * 32)


def train(folder, options=None, plant=None, rank_1=None, naive=False):
    """A run on this rank; gives the step it reached and a digest of its parameters, or the line it ended with.

    ``options`` are for all ranks, ``rank_1`` for that one alone; ``plant`` are the arguments of `Plant`. With ``naive``
    every parameter is compared, as if none were sharded.
    """
    own = rank_1 if rank_1 and os.environ["RANK"] == "1" else {}
    config = build(QUICK | {"output_dir": str(folder)} | (options or {}) | own)
    folder.mkdir(exist_ok=True)
    everything = mock.patch.object(desync, "held_alike", lambda trainer: [(0, trainer.stored.parameters())])
    try:
        with everything if naive else contextlib.nullcontext():
            return run(config, plant)
    except DesyncError as error:
        return str(error)


def run(config, plant):
    trainer = build_trainer(config, [*([Plant(*plant)] if plant else []), *guards(config)])[0]
    trainer.train()
    return trainer.state.step, digest_of([local(p).flatten() for p in trainer.model.parameters()])


def trained(tmp_path, runs, ranks=2):
    """What each of several runs gave on each rank; one after another on the same ranks."""

    def all_runs():
        torch.set_num_threads(1)
        return {name: train(tmp_path / name.replace(" ", "-"), **run) for name, run in runs.items()}

    every = launch(all_runs, num_processes=ranks, timeout=600)
    return {name: [results[name] for results in every] for name in runs}


OFF = {"desync_check": "off", "desync_steps": 100}
DISAGREEMENTS = {
    "config": ({"rank_1": {"learning_rate": 2e-3}}, "`learning_rate` is 0.001 on rank 0 and 0.002 on rank 1"),
    "data": (
        {"plant": ("on_connect", another_label)},
        "the data's fingerprint is .* on rank 0 and 000000000000 on rank 1",
    ),
    "frozen": (
        {"plant": ("on_connect", frozen)},
        "`classifier.bias` is (3,) float32 trained on rank 0 and (3,) float32 frozen on rank 1",
    ),
    "dtype": (
        {"plant": ("on_connect", another_type)},
        f"(3, {WIDTH}) float32 trained on rank 0 and (3, {WIDTH}) float64 trained on rank 1",
    ),
    "shape": (
        {"plant": ("on_connect", wider)},
        f"(3, {WIDTH}) float32 trained on rank 0 and (4, {WIDTH}) float32 trained",
    ),
    "step": ({"plant": ("on_train_begin", ahead)}, "the step is 0 on rank 0 and 3 on rank 1"),
    "parameters": (
        {"plant": ("on_step_end", moved)},
        "word_embeddings.weight` of rank 1 is not that of rank 0, by up to 0.5 (1 of 73 tensors differ)",
    ),
}


def test_each_disagreement_of_a_run_is_named_and_goes_unnoticed_without_the_guard(tmp_path):
    runs = {name: dict(run) for name, (run, _) in DISAGREEMENTS.items()}
    silent = ("config", "parameters")
    ends = trained(
        tmp_path, {"healthy": {}} | runs | {f"unguarded {name}": runs[name] | {"options": OFF} for name in silent}
    )
    assert ends["healthy"][0] == ends["healthy"][1] and ends["healthy"][0][0] == 4
    for name in silent:
        (steps, first), (others, second) = ends[f"unguarded {name}"]
        assert steps == others == 4 and first != second, "it runs to its end, with two different models"
    for name, (_, told) in DISAGREEMENTS.items():
        first, second = ends[name]
        assert first == second and first.startswith("ranks disagree "), name
        assert re.search(re.escape(told).replace(r"\.\*", ".*"), first), first
        when = "after step 2 (they agreed before the first step)" if name == "parameters" else "before the first step"
        assert first.startswith(f"ranks disagree {when}: ")
    assert len(DISAGREEMENTS) == 7


SHARDED = {
    "zero1 torch": {"strategy": "zero1", "engine": "torch"},
    "zero2 scratch": {"strategy": "zero2", "engine": "scratch"},
    "zero2 torch": {"strategy": "zero2", "engine": "torch"},
    "zero3 scratch": {"strategy": "zero3", "engine": "scratch"},
    "fsdp torch": {"strategy": "fsdp", "engine": "torch"},
    "hsdp": {"strategy": "fsdp", "engine": "torch", "shard_group_size": 1},
}
HOLD_ALL = ("zero1 torch", "zero2 scratch", "hsdp")


def test_what_is_sharded_is_not_compared_and_what_is_held_alike_is(tmp_path):
    """Full comparisons after every step, of healthy ranks and of one whose copy was changed just before."""
    often = {"desync_check": "full", "desync_steps": 1, "max_steps": 2}
    healthy = {name: {"options": often | options} for name, options in SHARDED.items()}
    planted = {f"planted {name}": healthy[name] | {"plant": ("on_step_end", moved)} for name in HOLD_ALL}
    naive = {"naive": healthy["fsdp torch"] | {"naive": True}}
    ends = trained(tmp_path, healthy | planted | naive)
    for name in SHARDED:
        assert [each[0] for each in ends[name]] == [2, 2], ends[name]
        assert name not in HOLD_ALL or ends[name][0] == ends[name][1]
    assert "rank 1 is not that of rank 0" in ends["naive"][0], "what a comparison of shards would say of healthy ranks"
    for name in planted:
        assert ends[name][0] == ends[name][1] and "rank 1 is not that of rank 0, by up to 0.5" in ends[name][0], name
    assert len(healthy) == 6 and len(planted) == 3


def test_the_copies_of_a_stage_are_compared_with_each_other_alone(tmp_path):
    """Two pipelines of two ranks: ranks 1 and 3 hold the second stage."""
    options = {
        "training_type": "pipeline",
        "data_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "desync_steps": 1,
        "max_steps": 2,
        "pipeline_chunks": 2,
    }
    ends = trained(
        tmp_path,
        {
            "healthy": {"options": options},
            "zero1": {"options": options | {"strategy": "zero1"}},
            "planted": {"options": options, "plant": ("on_step_end", moved, 3)},
        },
        ranks=4,
    )
    for name in ("healthy", "zero1"):
        first, second, *copies = ends[name]
        assert [first, second] == copies and first != second and first[0] == 2
    assert len(set(ends["planted"])) == 1
    assert " of rank 3 is not that of rank 1, by up to 0.5 (1 of " in ends["planted"][0]


def tensor_parallel(seeds_alike):
    """One step of a model whose matrices are split; what a comparison of the parameters that are not says then."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TensorParallel(GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)))
    torch.manual_seed(0 if seeds_alike else dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    whole = {name: each for name, each in model.module.named_parameters() if name not in model.splits}
    assert len(whole) == 9, "position embedding, three norms, and the biases of the row-parallel layers"
    return heard(lambda: [replicas(whole, "seed the ranks of a group alike")])


def test_the_replicated_parameters_of_tensor_parallelism():
    """Ranks that draw other dropout masks drift apart in what each of them has whole."""
    assert launch(tensor_parallel, True, num_processes=2, timeout=200) == [None, None]
    first, second = launch(tensor_parallel, False, num_processes=2, timeout=200)
    assert first == second
    assert "` of rank 1 is not that of rank 0, by up to " in first and "seed the ranks of a group alike" in first
