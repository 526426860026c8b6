"""Lesson 19's experiment: a small Llama, whole and with adapters, trained by ranks that share it in several ways."""

import json
import pydoc_data.topics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from course_lib.data.bundled import load_tweets
from course_lib.lessons.roofline.lab import most
from course_lib.metering.allocation_log import AllocationLog
from course_lib.metering.meter import Meter
from course_lib.modeling import lora, nf4, sliced_weights
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.sharding import Shard
from course_lib.parallel.torch_engines.fsdp import shard_with_torch
from course_lib.parallel.zero3 import Zero3
from course_lib.planning import memory, models
from course_lib.planning.plan import Plan

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
"""Of the model that the ranks share."""
ROWS, TOKENS, RANK = 8, 32, 8
"""Rows of a rank's batch, tokens of a row, rank of the adapters."""
WAYS: dict[str, dict[str, Any]] = {
    "DDP": {"engine": "ddp"},
    "ZeRO-3": {"engine": "deepspeed", "stage": 3},
    "FSDP2": {"engine": "fsdp", "stage": 3},
}
"""Ways to share it, and how a plan names each."""
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora_rank": RANK},
    "QLoRA": {"lora_rank": RANK, "base_bits": 4},
}
"""Ways to fine-tune, and how a plan names each."""
KINDS = ("parameters", "gradients", "optimizer states", "activations")


@dataclass(frozen=True)
class Held:
    """One rank's step.

    Attributes:
        bytes: by kind of KINDS: what stays from step to step, and of activations the most.
        sent: bytes by collective.
    """

    bytes: dict[str, int]
    sent: dict[str, int]


def docs() -> Tensor:
    """The topics of Python's own help as bytes, (B,) int64."""
    return torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))


def write_talks(path: Path, rows: int) -> None:
    """Write the first bundled tweets as conversations, a line of JSON each: what does it sound like, and the answer."""
    tweets = load_tweets()["train"].select(range(rows))
    names = tweets.features["label"].names
    with path.open("w", encoding="utf-8") as file:
        for tweet in tweets:
            turns = [
                {"role": "user", "content": f"How does this sound? {tweet['text']}"},
                {"role": "assistant", "content": names[tweet["label"]]},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def small_llama() -> LlamaForCausalLM:
    """The same weights on every call and every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False, use_cache=False))


def prepared(method: str) -> nn.Module:
    """The model as a method of METHODS trains it."""
    model = small_llama()
    if method == "QLoRA":
        nf4.quantize_linear(model, lora.linear_layers(model))
    if method != "full":
        lora.add_lora(model, RANK)
    return model


def held(way: str, method: str) -> Held:
    """Bytes that this rank holds and sends in its second step, with the optimizer's state; the ranks have joined."""
    model = prepared(method)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    engine: Any = {
        "DDP": lambda: DataParallel(model),
        "ZeRO-3": lambda: Zero3(model, optimizer),
        "FSDP2": lambda: shard_with_torch(model, optimizer),
    }[way]()
    rank = PartialState().process_index
    ids = torch.randint(SIZES["vocab_size"], (ROWS, TOKENS), generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        with Meter(model, optimizer, getattr(engine, "resident", None)) as meter:
            engine(input_ids=ids, labels=ids).loss.backward()
        stepped = optimizer if way == "DDP" else engine
        stepped.step()
        stepped.zero_grad()
    sent = Counter[str]()
    for collective in meter.collectives:
        sent[collective.name] += collective.sent
    stays = {kind: meter.resident[kind] for kind in KINDS[:3]}
    return Held(stays | {"activations": meter.peak["activations"]}, dict(sent))


def all_held() -> dict[str, dict[str, Held]]:
    """:func:`held` of this rank, by way, by method."""
    PartialState(cpu=True)  # joins the ranks
    return {way: {method: held(way, method) for method in METHODS} for way in WAYS}


def planned(way: str, method: str, ranks: int) -> dict[str, float]:
    """Bytes by kind that the planner foresees on one of some ranks."""
    model = models.from_config({**SIZES, "model_type": "llama", "tie_word_embeddings": False})
    plan = Plan(TOKENS, data=ranks, micro_batch=ROWS, precision="fp32", **WAYS[way], **METHODS[method])
    foreseen = memory.estimate(model, plan)
    activations = foreseen.activations + foreseen.logits
    held = foreseen.parameters, foreseen.gradients, foreseen.optimizer, activations
    return dict(zip(KINDS, held, strict=True))


class _Allocated(AllocationLog):
    """Of tensors that have elements: those on the meta device have none."""

    def hold(self, tensor: Tensor, kind: str, module: str = "", certain: bool = False) -> None:
        if not tensor.is_meta:
            super().hold(tensor, kind, module, certain)


def saved_model(folder: Path) -> None:
    """Write :func:`small_llama` as several files and their index."""
    small_llama().save_pretrained(folder, max_shard_size="500KB")


def loaded(folder: Path, *, way: str = "FSDP2", sliced: bool = True) -> dict[str, float]:
    """Load a model in shares, this rank's here, and run it once.

    Args:
        folder: of :func:`saved_model`.
        way: ``FSDP2``, or ``ZeRO-3`` from scratch.
        sliced: each rank reads its own elements, else the whole model.
    Returns:
        ``peak`` and ``read`` bytes, and the ``loss``.
    """
    PartialState(cpu=True)  # joins the ranks
    rank, ranks = PartialState().process_index, PartialState().num_processes
    with _Allocated() as log:
        log.start()
        if sliced:
            model = sliced_weights.build_empty(AutoModelForCausalLM, LlamaConfig.from_pretrained(folder))
        else:
            model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
            for weight in model.parameters():
                log.hold(weight, "parameters")
        optimizer = torch.optim.AdamW(model.parameters())
        engine: Any = (
            Zero3(model, optimizer, filled_later=sliced)
            if way == "ZeRO-3"
            else shard_with_torch(model, optimizer, filled_later=sliced)
        )
        files = sliced_weights.SlicedWeights(folder)
        if sliced and way == "ZeRO-3":
            sliced_weights.fill(engine.shards(), files)
            engine.refresh()
        elif sliced:
            shards = {name: own_rows(weight, rank, ranks) for name, weight in model.named_parameters()}
            sliced_weights.fill(shards, files)
        log.stop()
    ids = torch.arange(TOKENS)[None]
    loss = engine(input_ids=ids, labels=ids).loss.item()
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {"peak": most(log), "read": files.bytes_read if sliced else whole, "loss": loss}


def own_rows(weight: Tensor, rank: int, ranks: int) -> Shard:
    """This rank's rows of a weight, as FSDP2 deals them out."""
    first = min(-(-weight.shape[0] // ranks) * rank, weight.shape[0])
    return Shard(weight.shape, first * weight.shape[1:].numel(), weight.detach().to_local().view(-1))  # type: ignore


def kept_after(forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes that a forward allocated and that are alive after it, and what it gave."""
    with AllocationLog() as log:
        log.start()
        result = forward()
        log.stop()
    return sum(change.bytes for change in log.changes()), result
