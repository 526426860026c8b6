"""Every legal layout of a model over a cluster, as it is really run: what the search goes through.

Ranks are laid tensor first (arXiv 2104.04473 section 3.2: tensor parallelism stays inside a node), then data, then
pipeline.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from course_lib.planning import to_launchers
from course_lib.planning.models import Model
from course_lib.planning.plan import WHOLE, Loss, Offload, Plan

NOTHING: Mapping[str, Any] = MappingProxyType({})

TOKENS_PER_STEP = 2**20
"""Tokens of a step where no global batch is given: the order of GPT-3's (arXiv 2005.14165 table 2.1)."""


def default_batch(gpus: int, sequence_length: int) -> int:
    """Sequences of a step of about ``TOKENS_PER_STEP`` tokens, the same for every GPU."""
    return gpus * max(1, round(TOKENS_PER_STEP / sequence_length / gpus))


def layouts(model: Model, gpus: int, gpus_per_node: int, sequence_length: int, global_batch: int,
            precision: str, offload: bool = True,
            settings: Mapping[str, Any] = NOTHING) -> Iterator[Plan]:
    """Every legal layout at micro-batch 1, nothing recomputed; as it is really run.

    Args:
        model: its heads and blocks limit tensor and pipeline ranks.
        gpus: all are used.
        gpus_per_node: tensor ranks stay inside.
        sequence_length: tokens.
        global_batch: sequences of a step; a whole number falls to each replica.
        precision: of the matmuls.
        settings: fields of :class:`Plan` that all have: an optimizer, adapters, a loss.
        offload: those too that keep state in host memory: FSDP all of it, ZeRO the optimizer, or at stage 3 all.
    """
    places: tuple[Offload, ...] = ("none", "optimizer", "parameters") if offload else ("none",)
    base = Plan(sequence_length, precision=precision, compiled=True, head="gathered",
                **({"loss": "chunked"} | dict(settings)))
    whole = base.optimizer in WHOLE
    if global_batch % gpus == 0:
        flat = replace(base, data=gpus, accumulation=global_batch // gpus)
        yield _as_run(flat, model)
        for place in (place for place in places if gpus > 1 or place != "none"):  # one GPU shares nothing
            if place != "optimizer" and not whole:
                yield _as_run(replace(flat, engine="fsdp", stage=3, offload=place), model)
            for stage in () if whole else (1, 2, 3) if place != "parameters" else (3,):
                yield _as_run(replace(flat, engine="deepspeed", stage=stage, offload=place, compiled=False), model)
    for tensor in (size for size in range(1, gpus_per_node + 1) if gpus % size == 0):
        if model.heads % tensor or model.kv_heads % tensor or model.ffn % tensor:
            continue
        for pipeline in (size for size in range(1, model.layers + 1) if gpus % (tensor * size) == 0):
            data = gpus // (tensor * pipeline)
            if tensor * pipeline == 1 or global_batch % data or (whole and tensor > 1) or base.lora_rank:
                continue  # PEFT's adapters are for models that are not split
            grid = replace(base, data=data, tensor=tensor, pipeline=pipeline, accumulation=global_batch // data,
                           compiled=False)
            stage = 1 if data > 1 and not whole else 0
            yield _as_run(replace(grid, engine="megatron", stage=stage, recipe="autocast"), model)
            if pipeline == 1 and data > 1 and not whole:
                yield _as_run(replace(grid, engine="fsdp", stage=3), model)


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
    for checkpointing in ("none", "full"):
        for schedule, virtual in schedules:
            size = 1
            while size <= 64 and plan.accumulation % size == 0:
                accumulation = plan.accumulation // size
                if schedule == "1f1b" or accumulation % plan.pipeline == 0:  # interleaving takes whole rounds
                    yield replace(plan, checkpointing=checkpointing, schedule=schedule, virtual=virtual,
                                  micro_batch=size, accumulation=accumulation)
                size *= 2
