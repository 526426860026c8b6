"""Lesson 10: a run that goes on exactly where it was left."""

import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from course_lib.grading.rules import Seen, items, near, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import alone, numbers

RATE = 0.02


class Momentum:
    """SGD with momentum 0.9. What torch.optim has would make each process import torch._dynamo, for seconds."""

    def __init__(self, model: nn.Module, rate: float):
        self.parameters, self.rate = list(model.parameters()), rate
        self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Change the parameters by their gradients, and forget these."""
        for parameter, velocity in zip(self.parameters, self.velocity, strict=True):
            assert parameter.grad is not None
            parameter.sub_(self.rate * velocity.mul_(0.9).add_(parameter.grad))
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The velocity, as it is and will be, and the rate."""
        return {"velocity": self.velocity, "rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""
        self.velocity, self.rate = [v.clone() for v in state["velocity"]], state["rate"]


class Falling:
    """A learning rate that falls by a fifth in each step."""

    def __init__(self, optimizer: Momentum):
        self.optimizer, self.first, self.steps = optimizer, optimizer.rate, 0

    def step(self) -> None:
        """Set the rate of the next step."""
        self.steps += 1
        self.optimizer.rate = self.first * 0.8**self.steps

    def state_dict(self) -> dict[str, Any]:
        """The steps done."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; the present rate is the optimizer's."""
        self.steps = state["steps"]


class Run:
    """A training loop that can be left and entered between two steps.

    Attributes:
        model: two linear layers with dropout between them.
        optimizer: `Momentum`.
        schedule: of its learning rate, less in every step.
        shuffle: the `torch.Generator` that draws each epoch's order.
        order: rows of the current epoch, as indices.
        place: of the next row in it.
        step: steps done.
        rows: fp32 of shape (rows, 4).
        seen: row, learning rate and loss of each step, for whoever looks on.
    """

    def __init__(self, rows: np.ndarray, seed: int):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1))
        self.optimizer = Momentum(self.model, RATE)
        self.schedule = Falling(self.optimizer)
        self.shuffle = torch.Generator().manual_seed(seed)
        self.rows = rows
        self.order: list[int] = []
        self.place = 0
        self.step = 0
        self.seen: list[list[float]] = []

    def train(self, steps: int) -> None:
        """Do so many steps of two rows each; the second one is the first with noise and perhaps another sign."""
        for _ in range(steps):
            if self.place >= len(self.order):
                self.order = torch.randperm(len(self.rows), generator=self.shuffle).tolist()
                self.place = 0
            row = self.order[self.place]
            first = torch.from_numpy(self.rows[row])
            noise = torch.from_numpy(np.random.standard_normal(4).astype(np.float32))
            both = torch.stack([first, random.choice((1, -1)) * first + noise])
            loss = (self.model(both) - first.sum()).square().mean()
            loss.backward()
            self.seen.append([row, self.optimizer.rate, loss.item()])
            self.optimizer.step()
            self.schedule.step()
            self.place += 1
            self.step += 1


def resume_case(rng: random.Random) -> dict:
    rows = rng.randrange(4, 6)
    return {
        "rows": numbers(rng, rows, 4),
        "seed": rng.randrange(2**31),
        "before": rng.randrange(1, rows - 1),
        "after": rows + rng.randrange(0, 3),
    }


@contextmanager
def one_thread_and_own_random_numbers() -> Iterator[None]:
    """Leave the process's random numbers and threads as they were."""
    before = torch.get_num_threads(), torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_rng_state(before[1])
        random.setstate(before[2])
        np.random.set_state(before[3])


def stopped(case: Case) -> Run:
    run = Run(case.inputs["rows"], case.inputs["seed"])
    run.train(case.inputs["before"])
    return run


def parts_of(run: Run) -> dict[str, bytes]:
    """Parts that a checkpoint has to bring back, by their names for a learner, as bytes."""
    tensors = {
        "the model": [*run.model.state_dict().values()],
        "the optimizer's momentum": run.optimizer.velocity,
        "the state of torch's generator": [torch.get_rng_state()],
        "the state of `run.shuffle`": [run.shuffle.get_state()],
    }
    numbers_ = {
        "the learning rate": run.optimizer.rate,
        "the schedule's steps": run.schedule.steps,
        "the order of the epoch": run.order,
        "the place in it": run.place,
        "the step": run.step,
        "the state of `random`": random.getstate(),
    }
    state: Any = np.random.get_state()
    _, words, *rest = state
    return {
        **{name: b"".join(tensor.detach().numpy().tobytes() for tensor in held) for name, held in tensors.items()},
        **{name: repr(value).encode() for name, value in numbers_.items()},
        "the state of `np.random`": words.tobytes() + repr(rest).encode(),
    }


def observe_resume(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """The same run went on, and another one went on from its checkpoint, which by then lay on a disk for a while."""
    given, file = case.inputs, io.BytesIO()
    with one_thread_and_own_random_numbers():
        run = stopped(case)
        state = function(run)
        right = parts_of(run)
        run.train(given["after"])
        torch.save(state, file)
        file.seek(0)
        other = Run(given["rows"], given["seed"] + 1)
        function(other, torch.load(file, weights_only=False))
        put_back = parts_of(other)
        other.train(given["after"])
    return {
        "other than it was": [part for part, mine in right.items() if put_back[part] != mine],
        "went on": plain(run.seen[given["before"] :]),
        "resumed": plain(other.seen),
        "step": other.step,
    }


def rows_due(case: Case) -> list[float]:
    """The row of each step after the checkpoint."""
    given = case.inputs
    due: list[float] = []
    shuffle = torch.Generator().manual_seed(given["seed"])
    while len(due) < given["before"] + given["after"]:
        due += torch.randperm(len(given["rows"]), generator=shuffle).tolist()
    return due[given["before"] : given["before"] + given["after"]]


def rates_due(case: Case) -> list[float]:
    """The learning rate of each step after the checkpoint."""
    return [RATE * 0.8 ** (case.inputs["before"] + step) for step in range(case.inputs["after"])]


def losses_due(case: Case) -> list[float]:
    """The loss of each step after the checkpoint, in a run without one."""
    with one_thread_and_own_random_numbers():
        run = stopped(case)
        run.train(case.inputs["after"])
    return [loss for _, _, loss in run.seen[case.inputs["before"] :]]


def columns(case: Case, seen: Seen, key: str) -> np.ndarray:
    """Numbers seen of a run's steps, of shape (steps, 3).

    Raises:
        Malformed: something else.
    """
    steps, due = items(seen, 0, key, list), case.inputs["after"]
    if len(steps) != due or any([type(one) in (int, float) for one in step] != [True] * 3 for step in steps):
        raise Malformed(Miss(f"{due} steps of a row, a rate and a loss", short(steps)))
    return np.array(steps, dtype=np.float64)


def goes_on(column: int, what: str, due: Callable[[Case], list[float]]) -> Rule:
    """Both runs have the numbers that are due, and the same to the last bit: saving changed nothing either."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        straight, resumed = (columns(case, seen, key)[:, column] for key in ("went on", "resumed"))
        apart = np.flatnonzero(straight != resumed)
        if len(apart):
            at = int(apart[0])
            said = f"{what} {straight[at]:.9g} in step {at + 1} after the checkpoint"
            return Miss(said, f"{resumed[at]:.9g}", note=not_put_back(seen))
        return near([{what: straight}], what, [due(case)])

    return rule


def not_put_back(seen: Seen) -> str:
    """Parts of the run that were not as at the checkpoint, once it had been put back."""
    odd = [part for part in items(seen, 0, "other than it was", str) if len(part) < 40]
    return f"not as it was at the checkpoint: {', '.join(odd)}" if odd else ""


def counts_on(case: Case, seen: Seen) -> Miss | None:
    columns(case, seen, "resumed")
    right, step = case.inputs["before"] + case.inputs["after"], seen[0].get("step")
    return kit.unless(step == right and type(step) is int, f"step {right} at the end", short(step))


RESUME = Task(
    **kit.about("faults.resume"),
    draw=alone(resume_case, 2),
    observe=observe_resume,
    essential=("losses",),
    properties={
        "rows": Property(1, goes_on(0, "row", rows_due)),
        "rates": Property(1, goes_on(1, "learning rate", rates_due)),
        "losses": Property(3, goes_on(2, "loss", losses_due)),
        "steps": Property(1, counts_on),
    },
)
