"""Lesson 19, to build: data parallel training in which adapters alone travel, and are saved."""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, near, number, same, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.ddp_module import gated_rows
from course_lib.grading.tasks.drawing import each_world, entry, numbers
from course_lib.grading.tasks.less import by_step
from course_lib.grading.tasks.less_bytes import same_bits
from course_lib.grading.tasks.lora_dpo import Beside, flat, frozen
from course_lib.grading.tasks.models import learning
from course_lib.grading.tasks.zero_optimizer import Optimizer

SAVED, STEPS = 2, 4
"""Steps after which it is saved, and in all; what was saved is loaded before the last."""
FILE = "adapter_model.safetensors"


class Classifier(nn.Module):
    """Frozen layers with adapters, of which some rows pass the first, and a head that is trained whole."""

    seen: Tensor

    def __init__(self, inputs: dict, rank: int):
        super().__init__()
        self.first, self.second = (Beside(*inputs[name]) for name in ("first", "second"))
        self.norm = nn.Parameter(kit.tensor(inputs["norm"]), requires_grad=False)
        self.head = nn.Parameter(kit.tensor(inputs["head"]))
        self.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            for parameter in learning(self):
                parameter.mul_(1 + rank / 2)  # until somebody makes them alike

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        x = torch.tanh(self.second(x + self.first(x) if x[0, 0] > 0 else x)) * self.norm
        return x @ self.head.T


# --- lora.sync ---


def sync_case(rng: random.Random, world: int, optimizer: str, max_norm: float) -> dict:
    """Rows of which rank r's pass the first layer in step s where r + s is even; on one rank always."""
    width, r, labels = rng.randrange(4, 7), 2, rng.randrange(2, 4)
    rows = gated_rows(rng, world, STEPS, width)
    if world == 1:
        for batch in rows[0]:
            batch[0, 0] = abs(batch[0, 0])
    layers = {
        name: [numbers(rng, width, width), numbers(rng, r, width), numbers(rng, width, r)]
        for name in ("first", "second")
    }
    weights = {"norm": numbers(rng, width), "head": numbers(rng, labels, width)}
    return layers | {"optimizer": optimizer, "max_norm": max_norm, **weights, "rows": rows}


def observe_sync(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """Train, save after two steps, load before the last."""
    from safetensors.torch import load_file  # `course check` of other exercises does without

    model = Classifier(case.inputs, rank)
    optimizer = Optimizer(case.inputs["optimizer"], learning(model))
    before, weights, norms = flat(frozen(model)), [], []
    with tempfile.TemporaryDirectory() as folder, Recorder() as record:
        path = Path(folder) / FILE
        trainer = function(model, optimizer, case.inputs["max_norm"])
        start = flat(learning(model))
        for step, rows in enumerate(case.inputs["rows"][rank]):
            if step == STEPS - 1:
                record.note("step")
                trainer.load(path)
                loaded = flat(learning(model))
            record.note("step")
            model(torch.from_numpy(rows)).square().mean().backward()
            norms.append(float(trainer.step()))
            weights.append(flat(learning(model)))
            if step == SAVED - 1:
                record.note("step")
                trainer.save(path)
        written = sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*"))
        saved = {name: plain(value) for name, value in load_file(path).items()} if path.is_file() else {}
    trained = {"start": start, "weights": np.stack(weights), "loaded": loaded, "norms": np.array(norms)}
    return kit.noted(record, **trained, files=written, seen=float(model.seen)) | {
        "saved names": sorted(saved),
        **{f"saved {name}": value for name, value in saved.items()},
        "moved": float(np.abs(flat(frozen(model)) - before).max()),
        "frozen gradients": sum(parameter.grad is not None for parameter in frozen(model)),
    }


def as_one(case: Case) -> dict[str, Any]:
    """Start, weights and norms after each step, in one process; and the shapes of what is saved, by name."""
    model = Classifier(case.inputs, 0)
    parameters = learning(model)
    optimizer = Optimizer(case.inputs["optimizer"], parameters)
    weights, norms, start = [], [], flat(parameters)
    saved: dict[str, Tensor] = {}
    for step in range(STEPS):
        if step == STEPS - 1:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in saved:
                        parameter.copy_(saved[name])
        model.zero_grad()
        for rows in case.inputs["rows"]:
            (model(torch.from_numpy(rows[step])).square().mean() / case.world_size).backward()
        norm = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= (case.inputs["max_norm"] / norm).clamp(max=1)
        optimizer.step()
        norms.append(norm.item())
        weights.append(flat(parameters))
        if step == SAVED - 1:
            saved = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: tuple(value.shape) for name, value in saved.items()}
    return {"start": start, "weights": np.stack(weights), "norms": np.array(norms), "saved": shapes}


def exact(key: str, first_step: int | None = None) -> Rule:
    """A rule: on each rank what one process has that sees all rows."""
    return kit.equals(key, as_one, of=key, on_all=True, first_step=first_step)


@kit.each_rank
def nothing_else(case: Case, seen: Seen, rank: int) -> Miss | None:
    """What is frozen has not moved, and the model has seen its rows once."""
    right = {"moved": 0, "frozen gradients": 0, "seen": 4 * STEPS}
    actual = {key: number(seen, rank, key) for key in right}
    return kit.unless(actual == right, "frozen weights as before, and one pass a step", short(actual))


@kit.each_rank
def adapters_alone(case: Case, seen: Seen, rank: int) -> Miss | None:
    """A broadcast at the start and at the load, an all-reduce in each step, of the trained weights' bytes."""
    size = 4 * len(as_one(case)["start"])
    reduced, sent = [f"all_reduce {size}"], [f"broadcast {size}"]
    right = {"step 1": reduced, "step 2": reduced, "save": [], "step 3": reduced, "load": sent, "step 4": reduced}
    begun = seen[rank].get("events")
    if not isinstance(begun, list) or "step" not in begun:
        raise Malformed(Miss("events of steps", short(begun), rank))
    at = begun.index("step")
    before = [event for event in begun[:at] if event != "wait"]
    parts = [before, *by_step([{"events": begun[at:]}], 0, len(right))]
    for made, (name, due) in zip(parts, {"the start": sent, **right}.items(), strict=True):
        if made != due:
            return Miss(f"{kit.listed(due)} in {name}", kit.listed(list(map(str, made))))
    return None


def after_the_save(case: Case, seen: Seen) -> np.ndarray:
    """The trained weights of rank 0 when it saved, right or wrong."""
    return array(seen, 0, "weights", as_one(case)["weights"].shape)[SAVED - 1]


def file_of_adapters(case: Case, seen: Seen) -> Miss | None:
    """Rank 0 has written what is trained, by name, in one file, as it was; the others nothing."""
    shapes, held = as_one(case)["saved"], after_the_save(case, seen)
    files = same(seen, "files", [[FILE] * (rank == 0) for rank in range(case.world_size)])
    if miss := files or same(seen[:1], "saved names", [sorted(shapes)]):
        return miss
    saved = np.concatenate([array(seen, 0, f"saved {name}", shape).reshape(-1) for name, shape in shapes.items()])
    return near([{"saved": saved}], "saved", [held], 1e-6)


def loaded(case: Case, seen: Seen) -> Miss | None:
    """Each rank has what rank 0 had when it saved."""
    return near(seen, "loaded", [after_the_save(case, seen)] * case.world_size, 1e-6)


SYNC = Task(
    **kit.about("lora.sync"),
    draw=each_world(sync_case, (2, "momentum", 64.0), usual=("Adam", 0.25)),  # gradients that are clipped or not
    observe=observe_sync,
    own={"rows": entry},
    essential=("weights", "adapters alone travel"),
    properties={
        "start": Property(1, exact("start")),
        "weights": Property(3, kit.all_of(exact("weights", 1), nothing_else)),
        "same bits": Property(1, same_bits("weights")),
        "norm": Property(1, exact("norms", 1)),
        "adapters alone travel": Property(3, adapters_alone),
        "file": Property(2, file_of_adapters),
        "loaded": Property(1, loaded),
    },
)
