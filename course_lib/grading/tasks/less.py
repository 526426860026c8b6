"""Lesson 18: what a link makes of each way to talk, and weights that are averaged every H steps."""

import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, events, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.ddp_module import Gated, gated_rows
from course_lib.grading.tasks.drawing import WORLDS, entry, in_turn, numbers
from course_lib.grading.tasks.models import all_weights, learning, odd_case
from course_lib.grading.tasks.zero_optimizer import Optimizer

# --- less.link ---

NEVER, TIED, EXACT = "never", "tied", "exact"


def link_case(rng: random.Random, place: int) -> dict:
    """A link and ways to train over it, in powers of two so that sums are exact; in turn a trap of each kind."""
    kind = (EXACT, TIED, "", NEVER)[place % 4]
    compute, rate = 2.0 ** -rng.randrange(4, 7), 2.0 ** rng.randrange(17, 21)
    ranks, share = rng.choice((2, 4, 8)), 2.0 ** -rng.randrange(1, 5)
    size, latency = 2**12 * rng.randrange(20, 200), 2.0 ** -rng.randrange(5, 8) * rng.randrange(1, 4)
    if kind == EXACT:  # a whole number of steps makes the share what it may be
        ranks, share, number = 2, 0.5, rng.randrange(2, 6)
        size, latency = int(rate * compute) * number, compute * rng.randrange(2, 6)
    every = rng.randrange(5, 9)
    steps = 60 + rng.randrange(40)
    sent = 2 * (ranks - 1) * size // ranks
    ways: dict[str, dict[str, Any]] = {
        "all-reduce": {"messages": 1, "bytes": sent, "every": 1, "steps": steps},
        "int4": {"messages": 2, "bytes": sent // 8, "every": 1, "steps": steps + rng.randrange(1, 9)},
        "LocalSGD": {
            "messages": 1,
            "bytes": sent,
            "every": every,
            "steps": every * rng.randrange(14, 20) + rng.randrange(1, every),
        },
        "top-k": {"messages": 1, "bytes": sent // 64, "every": 1, "steps": None},
    }
    if kind == TIED:
        ways = {
            "top-k": ways["top-k"],
            "PowerSGD": dict(ways["LocalSGD"]),
            "LocalSGD": ways["LocalSGD"],
            "all-reduce": ways["all-reduce"],
        }
    if kind == NEVER:
        ways = {name: way | {"steps": None} for name, way in ways.items()}
    link = {"ranks": ranks, "size": size, "latency": latency, "rate": rate}
    return {**link, "compute": compute, "share": share, "ways": ways}


def observe_link(function: Callable[..., Any], case: Case, rank: int) -> dict:
    fewest, seconds, first = function(**case.inputs)
    return {"local_steps": plain(fewest), "seconds": plain(seconds), "first": plain(first)}


def on_a_link(case: Case) -> tuple[int, dict[str, Fraction | None], str | None]:
    """(fewest local steps, seconds by way, the first way), exactly."""
    about = {name: Fraction(value) for name, value in case.inputs.items() if name != "ways"}
    waits = about["latency"] + 2 * (about["ranks"] - 1) / about["ranks"] * about["size"] / about["rate"]
    fewest = ceil(waits * (1 - about["share"]) / (about["share"] * about["compute"]))
    seconds: dict[str, Fraction | None] = {}
    for name, way in case.inputs["ways"].items():
        seconds[name] = None
        if way["steps"] is not None:
            period = way["every"] * about["compute"] + way["messages"] * about["latency"] + way["bytes"] / about["rate"]
            seconds[name] = -(-way["steps"] // way["every"]) * period
    reached = {name: value for name, value in seconds.items() if value is not None}
    return fewest, seconds, min(reached, key=lambda name: reached[name]) if reached else None


def fewest_steps(case: Case, seen: Seen) -> Miss | None:
    right, counted = on_a_link(case)[0], array(seen, 0, "local_steps", ())
    return kit.unless(counted == right, f"{right} local steps", f"{counted:g}")


def seconds_to_the_loss(case: Case, seen: Seen) -> Miss | None:
    seconds = seen[0].get("seconds")
    if not isinstance(seconds, dict) or set(seconds) != set(case.inputs["ways"]):
        return Miss("seconds by way", short(seconds))
    for name, right in on_a_link(case)[1].items():
        value = seconds[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (value is not None) if right is None else not (number and abs(value - right) <= 1e-6 * right):
            return Miss(f"{name}: {'None' if right is None else f'{float(right):.6g} s'}", short(value))
    return None


def first_there(case: Case, seen: Seen) -> Miss | None:
    right, first = on_a_link(case)[2], seen[0].get("first", "")
    fits = type(first) is type(right) and first == right and isinstance(seen[0].get("seconds"), dict)
    return kit.unless(fits, f"first: {right}", short(first))


LINK = Task(
    **kit.about("less.link"),
    draw=in_turn(link_case, 8),
    observe=observe_link,
    essential=("first",),
    properties={
        "local steps": Property(2, fewest_steps),
        "seconds": Property(2, seconds_to_the_loss),
        "first": Property(1, first_there),
    },
)


# --- less.average ---


class Averaged(Gated):
    """A model that only some rows pass whole, with a running mean of its inputs."""

    seen: Tensor

    def __init__(self, inputs: dict):
        super().__init__(inputs)
        self.register_buffer("seen", torch.zeros(len(inputs["extra"])))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.lerp_(x.mean(0), 0.25)
        return super().forward(x)


def gated_case(rng: random.Random, world: int, steps: int) -> dict:
    """A chain with an odd weight of each kind, and rows of which every second batch of a rank passes its gate."""
    case = odd_case(rng, world)
    width = case["weights"][0].shape[1]
    rows = gated_rows(rng, world, steps, width)
    return case | {"extra": numbers(rng, width, width), "rows": rows}


def draw_averages(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Each number of ranks with Adam, and two ranks that take the mean after each step of momentum."""
    cases = []
    for world, kind in [*((world, "Adam") for world in worlds), (2, "momentum")]:
        every = rng.randrange(2, 4) if kind == "Adam" else 1
        cases.append(Case(world, gated_case(rng, world, 2 * every + 1) | {"every": every, "optimizer": kind}))
    return cases


def states_of(model: nn.Module, optimizer: Optimizer) -> Tensor:
    """A rank's own states: those of its optimizer, in the order of the parameters, and its buffers."""
    states = [state for parameter in model.parameters() for state in optimizer.state.get(parameter, {}).values()]
    return all_weights([*states, *model.buffers()])


def observe_average(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model, weights = Averaged(case.inputs), []
    optimizer = Optimizer(case.inputs["optimizer"], model.parameters())
    with Recorder() as record:
        step = function(model, optimizer, case.inputs["every"])
        for rows in case.inputs["rows"][rank]:
            model.zero_grad()
            record.note("step")
            model(torch.from_numpy(rows)).square().mean().backward()
            step()
            weights.append(all_weights(model.parameters()))
    return kit.noted(record, weights=torch.stack(weights), own=states_of(model, optimizer))


def local_steps(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], rows: Sequence[Sequence[np.ndarray]]
) -> Iterator[int]:
    """The steps of ranks that train by themselves, in one process: yields their number after each."""
    for number, batches in enumerate(zip(*rows, strict=True), 1):
        for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
            model.zero_grad()
            model(torch.from_numpy(batch)).square().mean().backward()
            optimizer.step()
        yield number


def averaged(case: Case) -> dict[str, list[np.ndarray]]:
    """By rank: the weights after each step, and what is its own at the end."""
    models = [Averaged(case.inputs) for _ in range(case.world_size)]
    optimizers = [Optimizer(case.inputs["optimizer"], model.parameters()) for model in models]
    weights: list[list[np.ndarray]] = [[] for _ in models]
    for number in local_steps(models, optimizers, case.inputs["rows"]):
        if number % case.inputs["every"] == 0:
            for copies in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([copy.detach() for copy in copies]).mean(0)
                for copy in copies:
                    copy.data.copy_(mean)
        for kept, model in zip(weights, models, strict=True):
            kept.append(all_weights(model.parameters()).numpy())
    own = [states_of(*pair).numpy() for pair in zip(models, optimizers, strict=True)]
    return {"weights": [np.stack(kept) for kept in weights], "own": own}


def by_step(seen: Seen, rank: int, steps: int) -> list[list[str]]:
    """The collectives that a rank issued in each step; raises Malformed where there are not so many steps."""
    noted = [event for event in events(seen, rank) if event != "wait"]
    before = noted[: noted.index("step") if "step" in noted else None]
    parts = kit.by_step([{"events": noted}], 0)
    if len(parts) != steps or before:
        raise Malformed(Miss(f"nothing before {steps} steps", kit.listed(before, f"{len(parts)} steps"), rank))
    return parts


@kit.each_rank
def once_per_period(case: Case, seen: Seen, rank: int) -> Miss | None:
    """One all-reduce of all trained weights in every H-th step, nothing in the others."""
    size = sum(parameter.nbytes for parameter in learning(Averaged(case.inputs)))
    for number, made in enumerate(by_step(seen, rank, len(case.inputs["rows"][0])), 1):
        right = [f"all_reduce {size}"] * (number % case.inputs["every"] == 0)
        if made != right:
            return Miss(f"{kit.listed(right)} in step {number}", kit.listed(made))
    return None


AVERAGE = Task(
    **kit.about("less.average"),
    draw=draw_averages,
    observe=observe_average,
    own={"rows": entry},
    essential=("weights", "once per period"),
    properties={
        "weights": Property(3, kit.equals("weights", averaged, of="weights", first_step=1)),
        "each rank's own": Property(1, kit.equals("own", averaged, of="own")),
        "once per period": Property(2, once_per_period),
    },
)
