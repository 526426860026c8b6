"""Cases that both FSDP engines have to pass: the same training by one process, and by N ranks."""

import contextlib
import functools
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from course_lib.parallel import blocks

ROWS = (12, 12, 9, 12)  # in the batch of each step; 9 is uneven for 2 and 4 ranks, and for 2 micro-batches
LAYERS, LENGTH, VOCABULARY = 4, 6, 50
TOLERANCE = 2e-6  # float32 sums in another order; the losses are below 4, the weights of the order of 1


class Block(nn.Module):
    """One matrix in, one out, around a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class CallsCheckpoint(nn.Module):
    """Recomputes whole modules with their hooks; transformers' own models recompute what is inside the hooks."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def activation_checkpointing_enable(self, options):
        self.options = options

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        for block in self.layers:
            x = checkpoint(block, x, **self.options)
        return SimpleNamespace(logits=self.head(x))


OF_BERTS = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
OF_GPT2 = {"vocab_size": VOCABULARY, "n_layer": LAYERS, "n_embd": 32, "n_head": 2, "n_positions": LENGTH}
OF_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OF_T5 = {"vocab_size": VOCABULARY, "num_layers": 2, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2}
OF_T5 |= {"dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0}
MODELS = {
    # the token embedding is the output head too
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**OF_GPT2, use_cache=False)),
    "bert": lambda: BertForSequenceClassification(BertConfig(**OF_BERTS)),
    # one block that the forward runs through 4 times
    "albert": lambda: AlbertForSequenceClassification(
        AlbertConfig(**OF_BERTS, embedding_size=16, classifier_dropout_prob=0.0)
    ),
    # every block of the decoder reads the encoder's output, and the first block's position bias is all blocks' input
    "t5": lambda: T5ForConditionalGeneration(T5Config(**OF_T5, use_cache=False)),
    "calls checkpoint": CallsCheckpoint,
}


@dataclass(frozen=True)
class Case:
    """One training; the defaults are plain FSDP."""

    model: str = "gpt2"
    ranks: int = 2
    accumulate: int = 1
    max_norm: float | None = None
    frozen: tuple[str, ...] = ()
    checkpointing: bool = False
    early_stop: bool = True  # checkpointing recomputes a block no further than its last saved tensor
    evaluate: bool = False
    options: dict = field(default_factory=dict, hash=False)  # of the engine


def build(case: Case, rank: int = 0) -> nn.Module:
    """The model of a case, of 4 blocks of width 32; with a rank, one that has to take over the first one's weights."""
    torch.manual_seed(0)
    model = MODELS[case.model]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.frozen))
        parameter.data += 0.1 * rank
    if case.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in two groups; its eps is well above the rounding noise that is the gradient of a key's bias."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        eps=1e-4,
    )


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (ROWS[step], LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(3, (ROWS[step],), generator=generator)}


def loss_sum(model: nn.Module, kind: str, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum over rows, in float32, of the mean cross-entropy of a row."""
    ids = rows["input_ids"]
    decoded = {"decoder_input_ids": ids} if kind == "t5" else {}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **decoded).logits.float()
    if kind in ("bert", "albert"):
        return cross_entropy(logits, rows["labels"], reduction="sum")
    losses = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return losses / (LENGTH - 1)


def train(case: Case, engine: nn.Module, rank: int = 0, world: int = 1, group: dist.ProcessGroup | None = None) -> dict:
    """Train on this rank's rows of every batch: norms, and losses of the whole batches."""
    losses, norms, evaluated = torch.zeros(len(ROWS)), [], []
    for step, total in enumerate(ROWS):
        if case.evaluate and step == 2:
            engine.eval()
            with torch.no_grad():
                evaluated.append(loss_sum(engine, case.model, batch(0)).item())
            engine.train()
        for part in range(case.accumulate):
            rows = {key: value[part :: case.accumulate][rank::world] for key, value in batch(step).items()}
            synchronise = contextlib.nullcontext() if part == case.accumulate - 1 else engine.no_sync()
            with synchronise, set_checkpoint_early_stop(case.early_stop):
                loss = loss_sum(engine, case.model, rows) / total
                (loss * world).backward()  # the engine averages over ranks
            losses[step] += loss.item()
        if case.max_norm is not None:
            norms.append(engine.clip_grad_norm_(case.max_norm).item())
        engine.step()
        engine.zero_grad()
    if world > 1:
        dist.all_reduce(losses, group=group)
    return {"losses": losses, "norms": norms, "evaluated": evaluated}


def expected(case: Case) -> dict:
    """What one process gets from the whole batches, in float32."""
    checkpointing = case.model == "calls checkpoint"
    of_one = {"frozen": case.frozen, "evaluate": case.evaluate, "checkpointing": checkpointing}
    return _one_process(Case(case.model, 1, max_norm=case.max_norm, **of_one))


@functools.cache
def _one_process(case: Case) -> dict:
    model = build(case)
    optimizer = optimizer_for(model)
    # the plain module behind the engines' face; it has no no_sync, as nothing is accumulated
    model.clip_grad_norm_ = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    model.step = optimizer.step
    return train(case, model) | {"weights": {name: p.detach() for name, p in model.named_parameters()}}


def identity(case: Case) -> str:
    """The name of a case's test: what differs from plain FSDP."""
    return "-".join(f"{key}={value}" for key, value in vars(case).items() if value != getattr(Case(), key)) or "plain"


def assert_trains_as_one_process(case, engine, whole_weights, group=None):
    """On every rank; of the weights on those that are given them."""
    outcome = train(case, engine, dist.get_rank(group), dist.get_world_size(group), group)
    wanted = expected(case)
    assert_close(outcome["losses"], wanted["losses"], rtol=0, atol=TOLERANCE)
    assert_close(outcome["norms"], wanted["norms"], rtol=1e-5, atol=0)
    assert_close(outcome["evaluated"], wanted["evaluated"], rtol=1e-6, atol=0)
    assert_close(whole_weights() or wanted["weights"], wanted["weights"], rtol=0, atol=TOLERANCE)


def furthest(weights: dict, expected: dict) -> float:
    """The largest difference of any element; the names have to agree."""
    assert weights.keys() == expected.keys()
    return max((weights[name] - expected[name]).abs().max().item() for name in expected)


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def sizes(model: nn.Module) -> tuple[list[int], int]:
    """Parameters of each block, and of the rest of the model."""
    each = [sum(p.numel() for p in block.parameters()) for block in blocks.blocks(model).values()]
    return each, sum(p.numel() for p in model.parameters()) - sum(each)


def count_collectives(engine: nn.Module) -> dict[str, int]:
    """What torch's CommDebugMode counts in one forward and backward."""
    with CommDebugMode() as mode:
        loss_sum(engine, "gpt2", batch(0)).backward()
    return {str(name).removeprefix("c10d."): count for name, count in mode.get_comm_counts().items() if count}


def watch_parameters(engine: nn.Module) -> list[tuple[str, int, int]]:
    """Resident parameter bytes as each block begins its forward and its backward: ("F" or "B", block, bytes)."""
    seen: list[tuple[str, int, int]] = []

    def note(kind: str, index: int) -> None:
        seen.append((kind, index, storage_bytes(engine.resident()["parameters"])))

    def after_forward(index, module, args, output):
        output = output[0] if isinstance(output, tuple) else output
        output.register_hook(lambda gradient: note("B", index))

    for i, block in enumerate(blocks.blocks(engine.module).values()):
        block.register_forward_pre_hook(lambda module, args, i=i: note("F", i))
        block.register_forward_hook(functools.partial(after_forward, i))
    return seen


def measured(engine: nn.Module) -> SimpleNamespace:
    """Bytes and collectives of one step."""
    steady = storage_bytes(engine.resident()["parameters"])
    seen = watch_parameters(engine)
    collectives = count_collectives(engine)
    engine.step()
    after = {kind: storage_bytes(tensors) for kind, tensors in engine.resident().items()}
    return SimpleNamespace(steady=steady, seen=seen, collectives=collectives, after=after)
