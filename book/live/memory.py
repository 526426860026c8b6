"""The memory of ZeRO's stages and of FSDP beside DDP's, by the planner's formulas, as JSON for the page.

It runs in the browser, by Pyodide, and in the tests, by Python.
"""

import json
from typing import Any

from course_lib.errors import CourseError
from course_lib.planning import hardware, memory, models, optimizers, to_launchers
from course_lib.planning.plan import OPTIMIZERS, WHOLE, Plan

STRATEGIES: tuple[tuple[Any, int], ...] = (
    ("ddp", 0),
    ("deepspeed", 1),
    ("deepspeed", 2),
    ("deepspeed", 3),
    ("fsdp", 3),
)
"""Engine and stage of each row."""
TOKENS = 2048
"""Of the one sequence that buffers are counted for."""
GIB = 2**30


def choices() -> str:
    """JSON of what the page's fields offer: dense models from the smallest on, GPUs, optimizers."""
    dense = [model for model in map(models.load, models.names()) if model.experts == 1]
    return json.dumps(
        {
            "models": [[model.name, model.parameters] for model in sorted(dense, key=lambda model: model.parameters)],
            "gpus": {name: chip.memory for name, chip in hardware.accelerators().items() if chip.has_host},
            "optimizers": [name for name in OPTIMIZERS if name not in WHOLE],
        }
    )


def counted(asked: str) -> str:
    """JSON of the bytes of one GPU for each strategy, and the formula that they come from.

    Args:
        asked: JSON with model, gpus, precision (bf16 or fp32), optimizer, offload (none, optimizer or parameters).
    """
    wanted = json.loads(asked)
    try:
        model = models.load(wanted["model"])
        rows = [_row(model, wanted, engine, stage) for engine, stage in STRATEGIES]
    except CourseError as error:
        return json.dumps({"error": str(error)})
    return json.dumps({"parameters": model.parameters, "rows": rows})


def _row(model: models.Model, wanted: dict[str, Any], engine: Any, stage: int) -> dict[str, Any]:
    name = {"ddp": "DDP", "fsdp": "FSDP2"}.get(engine, f"ZeRO-{stage}")
    try:
        plan = Plan(
            min(TOKENS, model.context or TOKENS),
            engine,
            stage,
            data=wanted["gpus"],
            precision=wanted["precision"],
            optimizer=wanted["optimizer"],
            offload=wanted["offload"],
        )
    except CourseError as error:
        return {"strategy": name, "error": str(error)}
    if plan.offload != "none" and (reason := to_launchers.why_not(plan, model)):
        return {"strategy": name, "error": f"`course train` {reason}"}
    held = memory.estimate(model, plan)
    kinds = {kind: getattr(held, kind) for kind in ("parameters", "gradients", "optimizer", "buffers")}
    return {
        "strategy": name,
        "host": held.host,
        "formula": formula(model, plan, held),
        "bytes": kinds,
        "total": sum(kinds.values()),
    }


def formula(model: models.Model, plan: Plan, held: memory.Memory) -> str:
    """The states of one GPU with the numbers put in: bytes per parameter times parameters, by the GPUs that share them.

    Source: ZeRO, arXiv 1910.02054 section 5; the bytes are the recipe's, :data:`course_lib.planning.plan.RECIPES`.
    """
    recipe, size = plan.bytes, f"{model.parameters / 1e9:.4g}e9"
    moments = recipe.moments if plan.optimizer == "adamw" else optimizers.bytes_per_parameter(plan.optimizer, model)[0]
    kinds = (
        ("parameters", recipe.parameters, 3),
        ("gradients", recipe.gradients + recipe.accumulated, 2),
        ("optimizer", recipe.master + moments, 1),
    )
    lines = []
    for kind, each, shared_from in kinds:
        shared = plan.shards if plan.stage >= shared_from else 1
        text = f"{each:g} × {size}" + (f" / {shared}" if shared > 1 else "")
        whole = each * model.parameters / shared
        here = getattr(held, kind)
        if abs(here - whole) < 1:
            lines.append(f"{kind:10} {text} = {whole / GIB:.2f} GiB")
        else:
            part = f", of which {here / GIB:.2f} at a time on the GPU" if here else ""
            lines.append(f"{kind:10} {text} = {whole / GIB:.2f} GiB in host memory{part}")
    lines.append(f"{'buffers':10} {held.buffers / GIB:.2f} GiB: {_buffers(plan)}")
    return "\n".join(lines)


def _buffers(plan: Plan) -> str:
    """What the engine keeps beside the states."""
    if plan.engine == "fsdp":
        return "what it gathers, of the ends and of a block, and that block's whole gradient"
    if plan.engine == "deepspeed":
        live = f", and up to {memory.DEEPSPEED_LIVE:,} gathered parameters" if plan.stage == 3 else ""
        return f"two buckets of up to {memory.DEEPSPEED_BUCKET:,} numbers{live}"
    return "16-bit copies of the weights, which autocast makes" if plan.autocasts else "none"
