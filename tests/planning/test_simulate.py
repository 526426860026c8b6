"""The simulated rank: against PyTorch's own memory tracker, two real ranks, and the planner's formula."""

import contextlib
import gc
import json
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from course_lib import cli
from course_lib.errors import ConfigError
from course_lib.launching import rank_process
from course_lib.metering.allocation_log import KINDS, AllocationLog
from course_lib.metering.meter import Meter
from course_lib.parallel.torch_engines.fsdp import shard_with_torch
from course_lib.planning import alone, memory
from course_lib.planning import simulate as simulated
from course_lib.planning.formula_check import compare
from course_lib.planning.simulate import STRATEGIES, Setting, simulate
from tests.long_cases import some
from tests.planning.model_cases import known, llama

TOKENS = 32


def setting(strategy: str, world_size: int = 2, **more) -> Setting:
    return Setting(strategy, world_size, sequence_length=TOKENS, **{"shards": 2} | more)


def real_rank(strategy: str) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """Peaks by kind, and collectives with bytes, of the third step of a real rank in fp32."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(llama())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if strategy == "ddp":
        engine = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        engine = shard_with_torch(model, optimizer, reshard_after_forward=strategy != "zero2")
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    for _ in range(3):  # DDP lays its buckets out anew in the second
        with Meter(engine, optimizer) as meter:
            engine(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    return meter.peak, [(collective.name, collective.bytes) for collective in meter.collectives]


@pytest.mark.parametrize("strategy", some(["fsdp", "zero2", "ddp"], "fsdp"))
def test_a_real_rank_holds_and_sends_the_same(strategy, ranks):
    peak, sent = ranks(2, join=True)(real_rank, strategy)[0]
    # Logits count as activations.
    with mock.patch("course_lib.planning.simulate.AllocationLog", lambda vocabulary: AllocationLog()):
        ours = simulate(llama(), setting(strategy, precision="fp32"))
    assert [(exchange.name, exchange.bytes) for exchange in ours.exchanges] == sent
    assert ours.peak["parameters"] + ours.peak["parameter copies"] == peak["parameters"]
    kinds = ("optimizer states", "gradients", "activations")
    assert [ours.peak[kind] for kind in kinds] == [peak[kind] for kind in kinds]


def test_the_total_is_that_of_torch_s_own_tracker():
    """Torch's counts in the same pass; it rounds nothing either, but does not see the batch as ours does."""
    trackers = []

    def tracked(model, engine, optimizer, asked, log):
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            run(model, engine, optimizer, asked, log)
        trackers.append(tracker)

    run = simulated._run
    with mock.patch.object(simulated, "_run", tracked):
        result = simulate(llama(), setting("fsdp", 8))
    (theirs,) = (sizes["Total"] for sizes in trackers[0].get_tracker_snapshot("peak").values())
    assert result.total == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_holds_what_it_says(strategy):
    whole = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(llama()).parameters())
    result = simulate(llama(), setting(strategy, 2 if strategy == "tp" else 4))
    share = {"ddp": 1, "tp": 2, "hsdp": 2}.get(strategy, 4)
    norms = 7 * 64 * (1 - 1 / share) if strategy == "tp" else 0  # tensor ranks have them whole
    assert result.parameters == whole
    assert result.peak["parameters"] == 4 * (whole / share + norms)
    more = 4 * 250 * 64 if strategy == "tp" else 0  # DTensor leaves the gradient of a split embedding whole
    assert result.resident["gradients"] == result.peak["parameters"] + more
    assert sum(result.at_peak.values()) == result.total
    assert sum(sum(held.values()) for held in result.modules.values()) == result.total


MIXTURES = (MixtralConfig, OlmoeConfig, Qwen3MoeConfig)


def mixture(seed):
    """A small one of three families, its experts more or fewer than the ranks of FSDP2, and how it is trained."""
    pick = random.Random(seed)
    kind, experts, width = pick.choice(MIXTURES), pick.choice((4, 6, 8, 12, 16, 60)), pick.choice((64, 128))
    named = {"num_local_experts": experts} if kind is MixtralConfig else {"num_experts": experts}
    more = {"moe_intermediate_size": pick.choice((128, 256)), "head_dim": width // 4} if kind is Qwen3MoeConfig else {}
    sizes = {
        "vocab_size": pick.choice((512, 2048)),
        "hidden_size": width,
        "num_hidden_layers": pick.choice((2, 4, 6)),
        "num_key_value_heads": pick.choice((2, 4)),
        "intermediate_size": pick.choice((128, 256, 512)),
    }
    usual = {"num_attention_heads": 4, "num_experts_per_tok": 2, "use_cache": False}
    usual |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    ranks, rows = pick.choice((2, 3, 8, 16, 24, 64)), pick.choice((1, 2))
    asked = Setting("fsdp", ranks, micro_batch=rows, sequence_length=64, checkpointing=pick.random() < 0.5)
    return kind(**sizes, **usual, **named, **more), asked


@pytest.mark.parametrize("seed", some(range(24), 6, 14))
def test_the_formula_counts_what_fsdp_fills_mixtures_up_with(seed):
    """Before it did, 8 experts on 64 ranks were 42 % short in all."""
    config, asked = mixture(seed)
    model = known(config)
    rows = {row.kind: row for row in compare(model, asked, simulate(config, asked))}
    assert abs(rows["model states"].error) < 0.01
    assert -0.1 < rows["total"].error < 0.25
    padding = memory.expert_padding(model, asked.plan())
    assert (padding > 0) is (model.experts % asked.world_size != 0)
    if padding > model.layer:  # it is most of what is gathered
        assert rows["total"].formula - 3 * 2 * padding < 0.9 * rows["total"].simulated


def test_an_encoder_with_a_decoder_is_simulated():
    """The token that its decoder starts with is published with T5's weights, and not in the class."""
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    result = simulate(config, setting("ddp"))
    assert result.parameters == sum(p.numel() for p in T5ForConditionalGeneration(config).parameters())
    assert result.resident["gradients"] == 4 * result.parameters
    assert not hasattr(config, "decoder_start_token_id"), "the caller's stays as it was"


def test_resharding_frees_what_zero_2_keeps():
    kept, freed = (simulate(llama(num_hidden_layers=8), setting(strategy)) for strategy in ("zero2", "zero3"))
    assert kept.peak["parameter copies"] > 2 * freed.peak["parameter copies"]
    gathers = [sum(exchange.name == "all_gather" for exchange in run.exchanges) for run in (kept, freed)]
    assert gathers == [9, 9 + 8]


def test_checkpointing_keeps_a_block_s_input_alone():
    deep = llama(num_hidden_layers=8)
    plain, again = (simulate(deep, setting("fsdp", checkpointing=checkpointing)) for checkpointing in (False, True))
    inputs = 8 * 2 * TOKENS * 64
    assert inputs <= again.peak["activations"] < plain.peak["activations"] / 4


def test_garbage_that_waits_for_collection_changes_nothing():
    often = gc.get_threshold()
    try:
        gc.set_threshold(1, 1, 1)
        first = simulate(llama(), setting("fsdp", 64))
        gc.set_threshold(10**9, 1, 1)
        assert simulate(llama(), setting("fsdp", 64)) == first and gc.isenabled()
    finally:
        gc.set_threshold(*often)


def test_nothing_is_left_of_the_fake_cluster():
    before = torch.UntypedStorage.resize_
    simulate(llama(), setting("fsdp", 64))
    assert not dist.is_initialized() and torch.UntypedStorage.resize_ is before
    model = AutoModelForCausalLM.from_config(llama())
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert loss.item() > 0 and type(model.lm_head.weight.grad) is torch.Tensor


def places(simulated_rank: int | None = None) -> list[tuple[int, ...]]:
    """Where DTensor believes this rank of two to be, by parameter, after a step of FSDP."""
    with contextlib.nullcontext() if simulated_rank is None else alone.fake_group(simulated_rank, 2):
        if simulated_rank is None:
            dist.init_process_group("gloo")
        model = torch.nn.Linear(16, 16)
        engine = shard_with_torch(model, torch.optim.AdamW(model.parameters()), units=[])
        engine(torch.ones(2, 16)).sum().backward()
        engine.step()
        return [parameter.device_mesh.get_coordinate() for parameter in model.parameters()]


@pytest.mark.parametrize("forgets", ["nobody", "the simulation", "the rank"])
def test_after_a_simulation_each_rank_is_in_its_own_place(forgets, monkeypatch, ranks):
    """DTensor hands out what it computed for a mesh of the same ranks, with that mesh and so another rank's place."""
    for who, module in (("the simulation", alone), ("the rank", rank_process)):
        if who != forgets:
            monkeypatch.setattr(module, "forget_meshes", lambda: None)
    first, second = [(0,), (0,)], [(1,), (1,)]
    assert places(0) == first
    assert ranks(2)(places) == [first, first if forgets == "nobody" else second]
    assert places(1) == (second if forgets == "the simulation" else first)
    monkeypatch.undo()
    rank_process.forget_meshes()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Setting("fdsp", 2), "did you mean `fsdp`"),
        (Setting("fsdp", 0), "world_size 0"),
        (Setting("fsdp", 2, rank=2), "rank 2 of 2"),
        (Setting("fsdp", 2, sequence_length=65), "takes 64"),
        (Setting("hsdp", 6, shards=4, sequence_length=8), "4 ranks, not 6"),
        (Setting("tp", 3, sequence_length=8), "does not divide|cannot|3"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.strategy,
)
def test_mistakes_are_named(asked, says):
    with pytest.raises(ConfigError, match=says):
        simulate(llama(), asked)
    assert not dist.is_initialized()


def test_zero2_has_no_formula():
    with pytest.raises(ConfigError, match="no formula"):
        Setting("zero2", 8).plan()


DROPOUTS = {
    "gpt2": {"attn_pdrop": 0.1},
    "bert": {"attention_probs_dropout_prob": 0.1},
    "llama": {"attention_dropout": 0.1},
}


@pytest.mark.parametrize("family", some(DROPOUTS, "gpt2"))
def test_attention_with_dropout_keeps_what_fused_kernels_keep(family):
    """On CPUs SDPA with dropout keeps the scores: a formula for GPUs would then be off by their size."""
    sizes = {"vocab_size": 1000, "num_attention_heads": 8, "num_hidden_layers": 8, "hidden_size": 128}
    sizes |= {"max_position_embeddings": 512, "intermediate_size": 512, "bos_token_id": 0, "eos_token_id": 0}
    dropping = AutoConfig.for_model(family, **sizes | DROPOUTS[family])
    config = AutoConfig.for_model(family, **sizes | dict.fromkeys(DROPOUTS[family], 0.0))
    asked = Setting("fsdp", 8, micro_batch=2, sequence_length=512)
    held = simulate(dropping, asked)
    assert held == simulate(config, asked)
    scores = 8 * 2 * 8 * 512 * 512 * 2  # layers, sequences, heads, rows, columns, bytes of bf16
    formula = memory.estimate(known(config), asked.plan())
    assert held.peak["activations"] == pytest.approx(formula.activations, rel=0.1)
    assert held.peak["logits"] == pytest.approx(formula.logits, rel=0.01)
    assert held.total == pytest.approx(formula.total, rel=0.1)
    assert scores > 0.3 * formula.activations, "what would be missed is more than the tolerance"
    with mock.patch.object(simulated, "attention_as_on_gpus", contextlib.nullcontext):
        unfused = simulate(dropping, asked)
    assert unfused.peak["activations"] > held.peak["activations"] + scores


WIDE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}


@pytest.mark.parametrize("longer", [1, 4], ids=["the peak is after the loss", "the peak is at the loss"])
def test_the_formula_s_total_counts_what_stands_at_the_same_time(longer):
    """The first holds more gradients than activations at its end, and the second has the most at the loss."""
    config = llama(**WIDE, vocab_size=1000 * longer, num_hidden_layers=12)
    asked = Setting("fsdp", 4, sequence_length=128 * longer)
    formula = memory.estimate(known(config), asked.plan())
    assert simulate(config, asked).total == pytest.approx(formula.total, rel=0.1)
    kinds = sum((formula.states, formula.activations, formula.logits, formula.buffers))
    assert formula.total < 0.95 * kinds, "all kinds together stand at no time"


@pytest.mark.parametrize(("ranks", "words"), [(2, 1000), (4, 8000)])
def test_tensor_ranks_hold_what_the_formula_says(ranks, words):
    """DTensor makes the gradient of a split embedding whole, and all gradients as activations go."""
    config, asked = llama(**WIDE, vocab_size=words, num_hidden_layers=6), Setting("tp", ranks, sequence_length=256)
    rows = {row.kind: row for row in compare(known(config), asked, simulate(config, asked))}
    assert {kind: row.error for kind, row in rows.items()} == pytest.approx(dict.fromkeys(rows, 0), abs=0.05)
    assert rows["gradients"].formula > 1.05 * memory.estimate(known(config), asked.plan()).gradients


def test_command_prints_json(tmp_path, capsys):
    llama().save_pretrained(tmp_path)
    asked = ["simulate", "--model", str(tmp_path), "--world-size", "4"]
    assert cli.main([*asked, "--sequence-length", "16", "--json", "--compare-formula"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["peak"]) == list(KINDS) and printed["exchanges"][0]["name"] == "all_gather"
    assert [row["kind"] for row in printed["formula"]][3] == "model states"
    assert cli.main(asked) == 0
    page = capsys.readouterr().out
    assert "model.layers.0" in page and "1 x 64 tokens" in page, "as many tokens as the model takes"
