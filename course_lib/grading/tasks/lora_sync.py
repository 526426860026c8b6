"""Lesson 19, to build: data parallel training in which adapters alone travel, and are saved."""

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, near, number, same, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks.drawing import WORLDS, entry, numbers
from course_lib.grading.tasks.less import by_step
from course_lib.grading.tasks.less_bytes import same_bits
from course_lib.grading.tasks.lora_dpo import Beside, flat, learning
from course_lib.grading.tasks.lora_layer import LESSON
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
        self.norm = nn.Parameter(torch.from_numpy(inputs["norm"].copy()), requires_grad=False)
        self.head = nn.Parameter(torch.from_numpy(inputs["head"].copy()))
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
    rows = [[numbers(rng, 4, width) for _ in range(STEPS)] for _ in range(world)]
    for rank, steps in enumerate(rows):
        for step, batch in enumerate(steps):
            batch[0, 0] = (1 if (rank + step) % 2 == 0 or world == 1 else -1) * (abs(batch[0, 0]) + 0.5)
    layers = {
        name: [numbers(rng, width, width), numbers(rng, r, width), numbers(rng, width, r)]
        for name in ("first", "second")
    }
    return layers | {
        "optimizer": optimizer,
        "max_norm": max_norm,
        "norm": numbers(rng, width),
        "head": numbers(rng, labels, width),
        "rows": rows,
    }


def draw_syncs(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Each number of ranks, with gradients that are clipped and some that are not."""
    kinds = [*((world, "Adam", 0.25) for world in worlds), (2, "momentum", 64.0)]
    return [Case(world, sync_case(rng, world, optimizer, max_norm)) for world, optimizer, max_norm in kinds]


def unmoved(model: nn.Module) -> np.ndarray:
    return flat([parameter for parameter in model.parameters() if not parameter.requires_grad])


def observe_sync(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """Train, save after two steps, load before the last."""
    from safetensors.torch import load_file  # `course check` of other exercises does without

    model = Classifier(case.inputs, rank)
    optimizer = Optimizer(case.inputs["optimizer"], learning(model))
    before, weights, norms = unmoved(model), [], []
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
    return {
        "start": start,
        "weights": np.stack(weights),
        "loaded": loaded,
        "norms": np.array(norms),
        "events": record.events,
        "files": written,
        "saved names": sorted(saved),
        **{f"saved {name}": value for name, value in saved.items()},
        "moved": float(np.abs(unmoved(model) - before).max()),
        "frozen gradients": sum(p.grad is not None for p in model.parameters() if not p.requires_grad),
        "seen": float(model.seen),
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
    return {
        "start": start,
        "weights": np.stack(weights),
        "norms": np.array(norms),
        "saved": {name: tuple(value.shape) for name, value in saved.items()},
    }


def exact(key: str, first_step: int | None = None) -> Rule:
    """A rule: on each rank what one process has that sees all rows."""
    return lambda case, seen: near(seen, key, [as_one(case)[key]] * case.world_size, first_step=first_step)


def trained_weights(case: Case, seen: Seen) -> Miss | None:
    """As one process trains them; what is frozen has not moved, and the model has seen its rows once."""
    if miss := exact("weights", 1)(case, seen):
        return miss
    for rank in range(case.world_size):
        right = {"moved": 0, "frozen gradients": 0, "seen": 4 * STEPS}
        actual = {key: number(seen, rank, key) for key in right}
        if actual != right:
            return Miss("frozen weights as before, and one pass a step", short(actual), rank)
    return None


def adapters_alone(case: Case, seen: Seen) -> Miss | None:
    """A broadcast at the start and at the load, an all-reduce in each step, of the trained weights' bytes."""
    size = 4 * len(as_one(case)["start"])
    reduced, sent = [f"all_reduce {size}"], [f"broadcast {size}"]
    right = [reduced, reduced, [], reduced, sent, reduced]
    names = ["step 1", "step 2", "save", "step 3", "load", "step 4"]
    for rank in range(case.world_size):
        begun = seen[rank].get("events")
        if not isinstance(begun, list) or "step" not in begun:
            raise Malformed(Miss("events of steps", short(begun), rank))
        at = begun.index("step")
        for name, made, due in zip(
            ["the start", *names],
            [[event for event in begun[:at] if event != "wait"], *by_step([{"events": begun[at:]}], 0, len(names))],
            [sent, *right],
            strict=True,
        ):
            if made != due:
                return Miss(
                    f"{', '.join(due) or 'no collective'} in {name}",
                    short(", ".join(map(str, made)) or "no collective"),
                    rank,
                )
    return None


def after_the_save(case: Case, seen: Seen) -> np.ndarray:
    """The trained weights of rank 0 when it saved, right or wrong."""
    return array(seen, 0, "weights", as_one(case)["weights"].shape)[SAVED - 1]


def file_of_adapters(case: Case, seen: Seen) -> Miss | None:
    """Rank 0 has written what is trained, by name, in one file, as it was; the others nothing."""
    shapes, held = as_one(case)["saved"], after_the_save(case, seen)
    if miss := same(seen, "files", [[FILE] * (rank == 0) for rank in range(case.world_size)]):
        return miss
    if miss := same(seen[:1], "saved names", [sorted(shapes)]):
        return miss
    saved = np.concatenate([array(seen, 0, f"saved {name}", shape).reshape(-1) for name, shape in shapes.items()])
    return near([{"saved": saved}], "saved", [held], 1e-6)


def loaded(case: Case, seen: Seen) -> Miss | None:
    """Each rank has what rank 0 had when it saved."""
    return near(seen, "loaded", [after_the_save(case, seen)] * case.world_size, 1e-6)


SYNC = Task(
    name="lora.sync",
    lesson=LESSON,
    function="AdapterParallel",
    title="Build it: adapters alone travel",
    difficulty=4,
    importance=5,
    minutes=50,
    draw=draw_syncs,
    observe=observe_sync,
    own={"rows": entry},
    essential=("weights", "adapters alone travel"),
    properties={
        "start": Property(1, exact("start")),
        "weights": Property(3, trained_weights),
        "same bits": Property(1, same_bits("weights")),
        "norm": Property(1, exact("norms", 1)),
        "adapters alone travel": Property(3, adapters_alone),
        "file": Property(2, file_of_adapters),
        "loaded": Property(1, loaded),
    },
)

ALL = (SYNC,)
