"""Every legal layout of a model over a cluster, as it is really run: what the search goes through.

Ranks are laid tensor first (arXiv 2104.04473 section 3.2: tensor parallelism stays inside a node), then data, then
pipeline.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from course_lib.planning import to_launchers
from course_lib.planning.models import Model
from course_lib.planning.plan import WHOLE, Context, Loss, Offload, Plan

NOTHING: Mapping[str, Any] = MappingProxyType({})

TOKENS_PER_STEP = 2**20
"""Tokens of a step where no global batch is given: the order of GPT-3's (arXiv 2005.14165 table 2.1)."""
CONTEXT_TOKENS = 2048
"""Tokens of a sequence that a context rank has at least. A ring hides the keys and values that go round behind
attention from about FLOP/s over bytes/s of the link on: 1,000 tokens over NVLink, more over a network (arXiv
2310.01889 table 2)."""
TRIED: tuple[Loss, ...] = ("chunked",)
"""Losses that are tried where none is named."""


def default_batch(gpus: int, sequence_length: int) -> int:
    """Sequences of a step of about ``TOKENS_PER_STEP`` tokens, the same for every GPU."""
    return gpus * max(1, round(TOKENS_PER_STEP / sequence_length / gpus))


def layouts(
    model: Model,
    gpus: int,
    gpus_per_node: int,
    sequence_length: int,
    global_batch: int,
    precision: str,
    offload: bool = True,
    settings: Mapping[str, Any] = NOTHING,
    losses: Collection[Loss] = TRIED,
) -> Iterator[Plan]:
    """Every legal layout at micro-batch 1, nothing recomputed; as it is really run.

    Args:
        model: its heads and blocks limit tensor, context and pipeline ranks.
        gpus: all are used.
        gpus_per_node: tensor ranks stay inside.
        sequence_length: tokens; split over context ranks where each has ``CONTEXT_TOKENS`` or more.
        global_batch: sequences of a step; a whole number falls to each replica.
        precision: of the matmuls.
        offload: those too that keep state in host memory: FSDP all of it, ZeRO the optimizer, or at stage 3 all.
        settings: fields of :class:`Plan` that all have: an optimizer, adapters, a loss.
        losses: to try where ``settings`` name none. The linear one for layers that are not split: there is a fused
            kernel of it for those (Liger's).
    """
    for loss in [settings["loss"]] if "loss" in settings else losses:
        asked = Plan(sequence_length, precision=precision, compiled=True, head="gathered", **settings)
        base = replace(asked, loss=loss)
        for context, context_by in contexts(model, gpus, sequence_length):
            shared = replace(base, context=context, context_by=context_by)
            yield from _flat(shared, model, gpus, gpus_per_node, global_batch, offload)
            if loss != "linear" or "loss" in settings:
                yield from _split(shared, model, gpus, gpus_per_node, global_batch)


def contexts(model: Model, gpus: int, sequence_length: int) -> Iterator[tuple[int, Context]]:
    """Context ranks and how they attend: one, and more where sequences are long enough and can be cut.

    Keys and values that are gathered first are not among them: attention keeps them whole for its backward pass, and
    moves them with nothing to hide it, so that a ring is never worse.
    """
    yield 1, "ring"
    if not model.has_head or model.encoder_decoder:  # a label of the whole sequence is no rank's alone
        return
    for ranks in (size for size in range(2, sequence_length // CONTEXT_TOKENS + 1) if gpus % size == 0):
        if sequence_length % (2 * ranks) == 0:
            yield ranks, "ring"
        if sequence_length % ranks == 0 and _deals(model, 1, ranks):
            yield ranks, "ulysses"


def _flat(base: Plan, model: Model, gpus: int, gpus_per_node: int, global_batch: int, offload: bool) -> Iterator[Plan]:
    """Layouts in which each rank has all layers: DDP, FSDP over all or over some nodes, ZeRO, shared experts."""
    data = gpus // base.context
    if global_batch % data:
        return
    places: tuple[Offload, ...] = ("none", "optimizer", "parameters") if offload else ("none",)
    whole = base.optimizer in WHOLE
    # split sequences are trained without torch.compile
    flat = replace(base, data=data, accumulation=global_batch // data, compiled=base.context == 1)
    yield _as_run(flat, model)
    for place in (place for place in places if gpus > 1 or place != "none"):  # one GPU shares nothing
        if place != "optimizer" and not whole:
            yield _as_run(replace(flat, engine="fsdp", stage=3, offload=place), model)
        for stage in () if whole else (1, 2, 3) if place != "parameters" else (3,):
            yield _as_run(replace(flat, engine="deepspeed", stage=stage, offload=place, compiled=False), model)
    if base.context > 1 or whole:
        return
    ranks = gpus_per_node  # that share a copy: those of a node, of two, of four
    while ranks < gpus:
        if ranks > 1 and gpus % ranks == 0:
            yield _as_run(replace(flat, engine="fsdp", stage=3, replicas=gpus // ranks), model)
        ranks *= 2
    for expert in range(2, model.experts + 1):
        if not (model.experts % expert or gpus % expert or base.lora_rank):
            yield from (
                _as_run(
                    replace(flat, engine="megatron", stage=stage, expert=expert, compiled=False, recipe="autocast"),
                    model,
                )
                for stage in (0, 1, 2)
            )


def _split(base: Plan, model: Model, gpus: int, gpus_per_node: int, global_batch: int) -> Iterator[Plan]:
    """Layouts in which ranks have parts of layers, or some of them."""
    whole, ranks = base.optimizer in WHOLE, gpus // base.context
    for tensor in (size for size in range(1, gpus_per_node + 1) if ranks % size == 0):
        if model.heads % tensor or model.kv_heads % tensor or model.ffn % tensor:
            continue
        if base.context_by == "ulysses" and not _deals(model, tensor, base.context):
            continue
        for pipeline in (size for size in range(1, model.layers + 1) if ranks % (tensor * size) == 0):
            data = ranks // (tensor * pipeline)
            if tensor * pipeline == 1 or global_batch % data or (whole and tensor > 1) or base.lora_rank:
                continue  # PEFT's adapters are for models that are not split
            grid = replace(
                base, data=data, tensor=tensor, pipeline=pipeline, accumulation=global_batch // data, compiled=False
            )
            stage = 1 if grid.shards > 1 and not whole else 0
            yield _as_run(replace(grid, engine="megatron", stage=stage, recipe="autocast"), model)
            if pipeline == 1 and grid.shards > 1 and not whole:
                yield _as_run(replace(grid, engine="fsdp", stage=3), model)


def _deals(model: Model, tensor: int, context: int) -> bool:
    """Whether a tensor rank's heads can be dealt to context ranks; key heads are copied where there are fewer."""
    heads, key_heads = model.heads // tensor, model.kv_heads // tensor
    return heads % context == 0 and (key_heads % context == 0 or context % key_heads == 0)


def _as_run(plan: Plan, model: Model) -> Plan:
    """A plan in `course train`'s ways, or where that does not run it, as those have it that do: the Hugging Face
    Trainer with the model's own loss, Megatron-LM with a loss of each rank's logits."""
    if to_launchers.runs_here(plan, model):
        return plan
    loss: Loss = "plain" if plan.loss == "chunked" else plan.loss
    if plan.tensor * plan.pipeline == 1:
        return replace(plan, loss=loss)
    return replace(plan, loss=loss, head="parallel", compiled=True, recipe="")


def variants(plan: Plan, model: Model) -> Iterator[Plan]:
    """The layout's micro-batches, smallest first, for each schedule and with and without recomputation."""
    schedules = [("1f1b", 1)]
    if plan.pipeline > 1:
        schedules += [("interleaved", virtual) for virtual in (2, 4) if model.layers % (virtual * plan.pipeline) == 0]
        schedules += [("zb_h1", 1), ("zb_h2", 1)]
        schedules += [("zbv", 1)] if model.layers >= 2 * plan.pipeline else []
    for checkpointing in ("none", "full"):
        for schedule, virtual in schedules:
            if checkpointing != "none" and schedule.startswith("zb"):
                continue  # each half of a split backward pass would compute the forward again
            size = 1
            while size <= 64 and plan.accumulation % size == 0:
                accumulation = plan.accumulation // size
                if schedule != "interleaved" or accumulation % plan.pipeline == 0:  # which takes whole rounds
                    yield replace(
                        plan,
                        checkpointing=checkpointing,
                        schedule=schedule,
                        virtual=virtual,
                        micro_batch=size,
                        accumulation=accumulation,
                    )
                size *= 2
