"""Lesson 03, to build: a small Accelerator, with accumulation over several batches and a state that can be resumed."""

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from course_lib.grading.recorder import Others
from course_lib.grading.rules import NAMES, Seen, items, short
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import LAST, each_world, entry, numbers
from course_lib.grading.tasks.models import (
    BareOptimizer,
    all_gradients,
    all_weights,
    chain,
    give_mean_gradients,
    odd_case,
    trained,
)

MAX_NORM = 0.25
EPOCHS = 2


class Optimizer(BareOptimizer):
    """SGD with momentum and a rate that falls; its state may take a while, as that of a large model does.

    Args:
        delay: called before the state is handed out.
    """

    def __init__(self, model: nn.Module, delay: Callable[[], None] = lambda: None):
        super().__init__(model.parameters(), {"steps": 0})
        self.delay = delay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change each parameter that has a gradient."""
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                    parameter.sub_(velocity.mul_(0.75).add_(parameter.grad), alpha=0.5 / (1 + group["steps"]))

    def state_dict(self) -> dict[str, Any]:
        """As torch's; late."""
        self.delay()
        return super().state_dict()


def accelerator_case(rng: random.Random, world: int, batches: int = 0) -> dict:
    """A model with other weights on each rank, and batches that do not go evenly into ranks and windows, or so many."""
    case = odd_case(rng, world)
    del case["rows"]
    width, every = case["weights"][0].shape[1], rng.randrange(2, 4)
    batches = batches or world * (every * rng.randrange(1, 3) + rng.randrange(1, every)) - rng.randrange(world)
    starts = [[numbers(rng, *weight.shape) for weight in case["weights"]] for _ in range(world)]
    for weights in starts:
        weights[case["tied"][1]] = weights[case["tied"][0]]
    return {
        **case,
        "weights": starts,
        "every": every,
        "seed": rng.randrange(10**6),
        "batches": [numbers(rng, 2, width) for _ in range(batches)],
    }


def model_of(case: Case, rank: int, scale: float = 1.0) -> nn.Module:
    model = chain({**case.inputs, "weights": [scale * weight for weight in case.inputs["weights"][rank]]})
    with torch.no_grad():
        model.get_parameter("unused").mul_(1 + rank)
    return model


def loss_of(model: nn.Module, batch: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """With noise, of which each rank has its own."""
    return (model(batch) * (0.5 + torch.rand(len(batch), 1, generator=generator))).square().mean()


class Loop:
    """The training loop that uses an answer's accelerator, and what it saw after each batch."""

    def __init__(self, function: Callable[..., Any], case: Case, rank: int, record: Others):
        self.function, self.case, self.rank, self.record = function, case, rank, record
        self.given = [kit.tensor(batch) for batch in case.inputs["batches"]]
        self.batches: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.norms: list[float] = []

    def begin(self, scale: float) -> tuple[Any, ...]:
        """An accelerator, and model, optimizer and loader as it prepares them."""
        model = model_of(self.case, self.rank, scale)
        accelerator = self.function(self.case.inputs["every"])
        return accelerator, *accelerator.prepare(model, Optimizer(model, self._save_slowly), list(self.given))

    def _save_slowly(self) -> None:
        if self.rank == 0 and self.record.stage == "save":
            self.record.wait()

    def train(self, accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
        """One epoch."""
        for batch in loader:
            self.record.note("batch")
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                self.record.note("end")
                norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM) if accelerator.sync_gradients else 0.0
                optimizer.step()
                optimizer.zero_grad()
            self.norms.append(float(norm))
            self.batches.append(plain(batch))
            self.weights.append(plain(all_weights(model.parameters())))


def observe_accelerator(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """An epoch, the state saved, a second epoch; and that once more by another accelerator that loads the state."""
    place = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place)
    folder = str(place[0])
    try:
        with Others(case.world_size, rank) as record:
            seen = Loop(function, case, rank, record)
            made = seen.begin(1.0)
            start = plain(all_weights(made[1].parameters()))
            torch.manual_seed(case.inputs["seed"] + rank)
            seen.train(*made)
            record.stage = "save"
            made[0].save_state(folder)
            on_return = sorted(os.listdir(folder))
            record.say()
            seen.train(*made)
            left = list(record.events)
            again = seen.begin(0.5)
            torch.manual_seed(0)
            again[0].load_state(folder)
            seen.train(*again)
        dist.barrier()
        at_rest = sorted(os.listdir(folder))
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    resumed = len(seen.weights) // 3 * 2
    return {
        "start": start,
        "batches": seen.batches[:resumed],
        "weights": np.stack(seen.weights[:resumed]),
        "resumed": np.stack(seen.weights[resumed:]),
        "norms": np.asarray(seen.norms[:resumed]),
        "events": left,
        "missing": sorted(set(at_rest) - set(on_return)) if at_rest else ["all of it"],
    }


def dealt(case: Case) -> list[list[int]]:
    """By rank the numbers of its batches in an epoch."""
    batches, world = len(case.inputs["batches"]), case.world_size
    return [[(rank + world * i) % batches for i in range(-(-batches // world))] for rank in range(world)]


def synced(case: Case) -> list[bool]:
    """Whether gradients are averaged and used, by batch of an epoch."""
    last, every = len(dealt(case)[0]), case.inputs["every"]
    return [number % every == 0 or number == last for number in range(1, last + 1)]


def by_one(case: Case) -> dict[str, np.ndarray]:
    """Weights after each batch and norms of both epochs, by one process."""
    world = case.world_size
    models = [model_of(case, 0) for _ in range(world)]
    optimizers = [Optimizer(model) for model in models]
    noise = [torch.Generator().manual_seed(case.inputs["seed"] + rank) for rank in range(world)]
    batches = [torch.from_numpy(batch) for batch in case.inputs["batches"]]
    made, norms = [], []
    for _ in range(EPOCHS):
        for is_synced, *chosen in zip(synced(case), *dealt(case), strict=True):
            for model, number, generator in zip(models, chosen, noise, strict=True):
                (loss_of(model, batches[number], generator) / case.inputs["every"]).backward()
            norms.append(0.0)
            if is_synced:
                give_mean_gradients(models)
                norms[-1] = float(all_gradients(trained(models[0])).norm())
                for model, optimizer in zip(models, optimizers, strict=True):
                    for parameter in trained(model):
                        assert parameter.grad is not None
                        parameter.grad *= min(1.0, MAX_NORM / (norms[-1] + 1e-6))
                    optimizer.step()
                    optimizer.zero_grad()
            made.append(all_weights(models[0].parameters()).numpy())
    return {
        "start": all_weights(model_of(case, 0).parameters()).numpy(),
        "weights": np.stack(made),
        "norms": np.asarray(norms),
        "resumed": np.stack(made[len(synced(case)) :]),
    }


@kit.each_rank
def batches_are(case: Case, seen: Seen, rank: int) -> Miss | None:
    numbers_, batches = dealt(case)[rank], case.inputs["batches"]
    mine, right = items(seen, rank, "batches", np.ndarray), [batches[number] for number in numbers_] * EPOCHS
    if len(mine) != len(right):
        return Miss(f"{len(numbers_)} batches in each of {EPOCHS} epochs, as on each rank", f"{len(mine)} in all")
    for place, (batch, due) in enumerate(zip(mine, right, strict=True)):
        if not np.array_equal(batch, due):
            at = place % len(numbers_)
            return Miss(f"batch {numbers_[at]} of {len(batches)} as this rank's number {at}", "another")
    return None


@kit.each_rank
def only_where_synced(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Gradients are sent in the last backward of each window, once each, and in no other."""
    model, due = model_of(case, 0), synced(case) * EPOCHS
    least, most = 4 * sum(p.numel() for p in trained(model)), 4 * sum(p.numel() for p in model.parameters())
    batches = kit.by_step(seen, rank, "batch")
    if len(batches) != len(due):
        return Miss(f"{len(due)} batches", f"{len(batches)}")
    for number, (happened, is_synced) in enumerate(zip(batches, due, strict=True), 1):
        end = happened.index("end") if "end" in happened else len(happened)
        made = [event for event in happened[:end] if event.split()[0] in NAMES]
        late = [event for event in happened[end:] if event.split()[0] == "all_reduce"]
        fits = least <= kit.carried(made) <= most if is_synced else not made
        if late or not (fits or (case.world_size == 1 and not made)):
            return Miss(
                f"{f'{least} bytes of gradients' if is_synced else 'nothing'} sent in the backward of batch {number}, "
                f"with {case.inputs['every']} to a step",
                kit.listed(made + late, "nothing"),
            )
    return None


@kit.each_rank
def all_is_there(case: Case, seen: Seen, rank: int) -> Miss | None:
    missing = items(seen, rank, "missing", str)
    return kit.unless(not missing, "all files in the folder when save_state has returned", f"not yet: {short(missing)}")


def as_by_one(key: str, first_step: int | None = None) -> Rule:
    return kit.equals(key, by_one, of=key, on_all=True, first_step=first_step)


ACCELERATOR = Task(
    **kit.about("accelerate.module"),
    draw=each_world(accelerator_case, (LAST, 1)),
    observe=observe_accelerator,
    own={"weights": entry},
    essential=("weights", "collectives", "resumed"),
    properties={
        "same start": Property(1, as_by_one("start")),
        "batches": Property(2, batches_are),
        "weights": Property(3, as_by_one("weights", first_step=0)),
        "collectives": Property(2, only_where_synced),
        "norms": Property(1, as_by_one("norms", first_step=0)),
        "resumed": Property(3, as_by_one("resumed")),
        "all is there": Property(1, all_is_there),
    },
)
