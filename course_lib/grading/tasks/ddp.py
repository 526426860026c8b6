"""Lesson 02: the mean of all ranks' gradients, by a ring, in buckets, while backward runs, and only when it is due."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, calls, events, made_by, near, only, result, short
from course_lib.grading.task import Case, Met, Miss, Property, Task, plain
from course_lib.grading.tasks.drawing import each_world, entry, numbers, whole
from course_lib.parallel.ddp import DataParallel

LESSON = "02_data_parallel"


def chain(inputs: dict, key: str = "weights") -> nn.Sequential:
    """Linear layers without bias, with a tanh after each but the last."""
    layers: list[nn.Module] = []
    for weight in inputs[key]:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = torch.from_numpy(weight.copy())
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def widths(rng: random.Random, layers: int) -> list[np.ndarray]:
    """Weights of a chain of layers."""
    sizes = [rng.randrange(2, 7) for _ in range(layers + 1)]
    return [numbers(rng, after, before) for before, after in zip(sizes, sizes[1:], strict=False)]


def local_gradients(case: Case) -> list[list[np.ndarray]]:
    """By rank, the gradients that its own rows bring."""
    made = []
    for rows in case.inputs["rows"]:
        model = chain(case.inputs)
        model(torch.from_numpy(rows)).square().mean().backward()
        made.append([parameter.grad.numpy() for parameter in model.parameters() if parameter.grad is not None])
    return made


def mean_gradients(case: Case) -> list[list[np.ndarray]]:
    """By rank, the mean of the gradients that each rank's rows bring."""
    means = [np.mean(copies, axis=0) for copies in zip(*local_gradients(case), strict=True)]
    return [means] * case.world_size


def flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays])


def model_case(rng: random.Random, world: int) -> dict:
    weights = widths(rng, rng.randrange(3, 6))
    return {"weights": weights, "rows": [numbers(rng, 4, weights[0].shape[1]) for _ in range(world)]}


def gradients_of(model: nn.Module) -> Tensor:
    return torch.cat([torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1)
                      for p in model.parameters()])


def oracle_gradient(case: Case) -> list[np.ndarray]:
    return [flat(means) for means in mean_gradients(case)]


# --- ddp.average ---

def observe_average(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model = chain(case.inputs)
    model(torch.from_numpy(case.inputs["rows"][rank])).square().mean().backward()
    with Recorder() as record:
        function(model)
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return {"gradient": plain(gradients_of(model)), "weights": plain(weights), "events": record.events}


def sends_each_once(case: Case, seen: Seen) -> Miss | None:
    """All-reduces that carry the gradient's bytes, once."""
    size = 4 * sum(weight.size for weight in case.inputs["weights"])
    for rank in range(case.world_size):
        if sum(calls(seen, rank, "all_reduce")) != size or len(calls(seen, rank, "all_reduce")) != len(
                made_by(seen, rank)):
            return Miss(f"all_reduce of {size} bytes in all", short(", ".join(made_by(seen, rank)) or "nothing"), rank)
    return None


def weights_untouched(case: Case, seen: Seen) -> Miss | None:
    """The weights are as they were, though something was sent."""
    for rank in range(case.world_size):
        if not made_by(seen, rank):
            return Miss("gradients averaged, weights as they were", "nothing was sent", rank)
    return near(seen, "weights", [flat(case.inputs["weights"])] * case.world_size, 0)


MET = Met("mean gradient", "gradient", lambda case: flat(local_gradients(case)[0]))

AVERAGE = Task(
    name="ddp.average", lesson=LESSON, function="average_gradients", title="The mean of all ranks' gradients",
    difficulty=1, importance=5, minutes=10, draw=each_world(model_case), observe=observe_average, met=MET,
    own={"rows": entry},
    properties={
        "mean gradient": Property(3, result("gradient", oracle_gradient)),
        "weights untouched": Property(1, weights_untouched), "bytes": Property(1, sends_each_once)})


# --- ddp.ring ---

def ring_case(rng: random.Random, world: int) -> dict:
    size = rng.choice((world, 4 * world, 4 * world + 1, 7))
    return {"tensors": [numbers(rng, size) for _ in range(world)]}


def observe_ring(function: Callable[..., Any], case: Case, rank: int) -> dict:
    tensor = torch.from_numpy(case.inputs["tensors"][rank].copy())
    with Recorder() as record:
        function(tensor)
    return {"sum": plain(tensor), "events": record.events}


def from_messages(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        if case.world_size > 1 and not made_by(seen, rank):
            return Miss("sends and receives", "nothing", rank)
        others = [event for event in made_by(seen, rank) if event.split()[0] not in ("send", "recv")]
        if others:
            return Miss("sends and receives", others[0], rank)
    return None


def ring_bytes(case: Case, seen: Seen) -> Miss | None:
    ranks, size = case.world_size, case.inputs["tensors"][0].nbytes
    part = 4 * -(-size // (4 * ranks))
    limit = 2 * (ranks - 1) * part
    for rank in range(ranks):
        sent = sum(calls(seen, rank, "send"))
        if sent > limit or (ranks > 1 and sent < limit - 16 * ranks):
            return Miss(f"about {limit} bytes sent, 2 (N - 1) / N of {size}", f"{sent}", rank)
    return None


def to_neighbours(case: Case, seen: Seen) -> Miss | None:
    ranks = case.world_size
    for rank in range(ranks):
        peers = {event.split()[-1] for event in events(seen, rank) if event.startswith("send ")}
        if peers - {str((rank + 1) % ranks)} and peers - {str((rank - 1) % ranks)}:
            return Miss("messages to one neighbour", f"to ranks {', '.join(sorted(peers))}", rank)
        if ranks > 1 and not peers:
            return Miss("messages to one neighbour", "none", rank)
    return None


RING = Task(
    name="ddp.ring", lesson=LESSON, function="ring_all_reduce", title="All-reduce by a ring",
    difficulty=4, importance=4, minutes=35, draw=each_world(ring_case), observe=observe_ring,
    own={"tensors": entry},
    properties={
        "sum": Property(3, result("sum", lambda case: [np.sum(case.inputs["tensors"], axis=0)] * case.world_size)),
        "messages only": Property(1, from_messages),
        "to one neighbour": Property(2, to_neighbours), "bytes": Property(2, ring_bytes)})


# --- ddp.bucketing ---

def bucket_case(rng: random.Random, world: int) -> dict:
    sizes = [rng.randrange(1, 30) for _ in range(rng.randrange(5, 9))]
    return {"gradients": [[numbers(rng, size) for size in sizes] for _ in range(world)],
            "bucket_bytes": 4 * rng.choice((25, 40, 60))}


def observe_buckets(function: Callable[..., Any], case: Case, rank: int) -> dict:
    gradients = [torch.from_numpy(gradient.copy()) for gradient in case.inputs["gradients"][rank]]
    with Recorder() as record:
        function(gradients, case.inputs["bucket_bytes"])
    return {"gradients": plain(torch.cat(gradients)), "events": record.events}


def bucket_sizes(case: Case) -> list[int]:
    sizes, filled = [], 0
    for gradient in case.inputs["gradients"][0]:
        filled += gradient.nbytes
        if filled >= case.inputs["bucket_bytes"]:
            sizes.append(filled)
            filled = 0
    return sizes + [filled] * (filled > 0)


def mean_of_lists(case: Case) -> list[np.ndarray]:
    return [np.mean([flat(gradients) for gradients in case.inputs["gradients"]], axis=0)] * case.world_size


BUCKETING = Task(
    name="ddp.bucketing", lesson=LESSON, function="reduce_in_buckets", title="Many small gradients, few messages",
    difficulty=3, importance=4, minutes=25, draw=each_world(bucket_case), observe=observe_buckets,
    own={"gradients": entry},
    met=Met("mean", "gradients", lambda case: flat(case.inputs["gradients"][0])),
    properties={"mean": Property(3, result("gradients", mean_of_lists)),
                "buckets": Property(3, only("all_reduce", bucket_sizes))})


# --- ddp.overlap ---

def observe_overlap(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model = chain(case.inputs)
    with Recorder() as record:
        for number, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: record.note(f"gradient {number}"))
        finish = function(model)
        record.note("backward")
        model(torch.from_numpy(case.inputs["rows"][rank])).square().mean().backward()
        record.note("finish")
        finish()
        record.note("end")
    return {"gradient": plain(gradients_of(model)), "events": record.events}


def leaves_early(case: Case, seen: Seen) -> Miss | None:
    """All but the last all-reduce are issued before the last gradient is there."""
    for rank in range(case.world_size):
        happened = events(seen, rank)
        last = max((i for i, event in enumerate(happened) if event.startswith("gradient")), default=0)
        early = sum(event.startswith("all_reduce") for event in happened[:last])
        due = len(case.inputs["weights"]) - 1
        if early < due:
            return Miss(f"{due} all-reduces begun before the last gradient", f"{early}", rank)
    return None


def waits_late(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        happened = events(seen, rank)
        middle = happened[:happened.index("finish")] if "finish" in happened else happened
        if not made_by(seen, rank):
            return Miss("all-reduces, and no wait for them before backward has ended", "no all-reduce", rank)
        if "wait" in middle:
            return Miss("no wait before backward has ended", f"{middle.count('wait')} waits", rank)
    return None


def waits_for_all(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        happened = events(seen, rank)
        begun, ended = sum(event.startswith("all_reduce") for event in happened), happened.count("wait")
        if ended < begun or not begun:
            return Miss(f"each of {begun or 'some'} all-reduces waited for", f"{ended} waits", rank)
    return None


OVERLAP = Task(
    name="ddp.overlap", lesson=LESSON, function="attach", title="Send while backward still runs",
    difficulty=4, importance=5, minutes=30, draw=each_world(model_case), observe=observe_overlap, met=MET,
    own={"rows": entry},
    properties={"mean gradient": Property(3, result("gradient", oracle_gradient)),
                "leaves early": Property(2, leaves_early),
                "does not block backward": Property(3, waits_late), "waits for all": Property(1, waits_for_all)})


# --- ddp.no_sync ---

def accumulation_case(rng: random.Random, world: int) -> dict:
    weights = widths(rng, 2)
    parts = rng.randrange(2, 5)
    return {"weights": weights, "rows": [[numbers(rng, int(whole(rng, 1, 5)), weights[0].shape[1])
                                          for _ in range(parts)] for _ in range(world)]}


def observe_accumulation(function: Callable[..., Any], case: Case, rank: int) -> dict:
    engine = DataParallel(chain(case.inputs))
    with Recorder() as record:
        function(engine, [torch.from_numpy(rows) for rows in case.inputs["rows"][rank]])
    return {"gradient": plain(gradients_of(engine)), "events": record.events}


def sum_over_parts(case: Case) -> list[np.ndarray]:
    made = []
    for parts in case.inputs["rows"]:
        model = chain(case.inputs)
        for rows in parts:
            (model(torch.from_numpy(rows)).square().mean() / len(parts)).backward()
        made.append(gradients_of(model).numpy())
    return [np.mean(made, axis=0)] * case.world_size


def one_reduction(case: Case) -> list[int]:
    return [4 * sum(weight.size for weight in case.inputs["weights"])]


def at_the_end(case: Case, seen: Seen) -> Miss | None:
    return only("all_reduce", one_reduction)(case, [{"events": [event for event in events(seen, rank)
                                                               if not event.startswith("broadcast")]}
                                                    for rank in range(case.world_size)])


NO_SYNC = Task(
    name="ddp.no_sync", lesson=LESSON, function="accumulate", title="Accumulate, and send once",
    difficulty=2, importance=5, minutes=15, draw=each_world(accumulation_case), observe=observe_accumulation,
    own={"rows": entry},
    properties={"gradient": Property(3, result("gradient", sum_over_parts)),
                "sent once": Property(2, at_the_end)})

ALL = (AVERAGE, RING, BUCKETING, OVERLAP, NO_SYNC)
