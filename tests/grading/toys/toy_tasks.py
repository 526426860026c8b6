"""Two small exercises: one in plain Python, quick to start, and one on two real ranks."""

import random
from dataclasses import replace

from course_lib.grading.task import Case, Miss, Property, Task


def weighted(values):
    return sum((i + 1) * value for i, value in enumerate(values))


def draw_total(rng: random.Random) -> list[Case]:
    return [Case(1, {"values": [rng.randrange(1, 10**6) for _ in range(rng.randrange(3, 8))]}) for _ in range(2)]


def observe_total(function, case, rank):
    values = list(case.inputs["values"])
    return {"total": function(values), "after": values}


def right_total(case, seen):
    expected = weighted(case.inputs["values"])
    total = seen[0].get("total")
    return None if type(total) is int and total == expected else Miss(f"total {expected}", str(total)[:40])


def kept(case, seen):
    return None if seen[0].get("after") == case.inputs["values"] else Miss("its argument as it was", "another")


def draw_mean(rng: random.Random) -> list[Case]:
    return [Case(2, {"shares": [[rng.randrange(1000) for _ in range(4)] for _ in range(2)]})]


def observe_mean(function, case, rank):
    import torch

    return {"mean": function(torch.tensor(case.inputs["shares"][rank], dtype=torch.float64)).numpy()}


def right_mean(case, seen):
    expected = [sum(column) / 2 for column in zip(*case.inputs["shares"], strict=True)]
    for rank, observation in enumerate(seen):
        if [float(x) for x in observation["mean"]] != expected:
            return Miss(str(expected), str(observation["mean"]), rank)
    return None


def observe_noted(function, case, rank):
    """Notes each all-reduce as `Recorder` does; here by the plainest means."""
    import torch
    import torch.distributed as dist

    events, real = [], dist.all_reduce

    def noting(tensor, *args, **kwargs):
        events.append(f"all_reduce {tensor.nbytes}")
        return real(tensor, *args, **kwargs)

    dist.all_reduce = noting
    return {"mean": function(torch.tensor(case.inputs["shares"][rank], dtype=torch.float64)).numpy(), "events": events}


def one_reduction(case, seen):
    for rank, observation in enumerate(seen):
        if observation["events"] != ["all_reduce 32"]:
            return Miss("all_reduce 32", str(observation["events"])[:40], rank)
    return None


TOTAL = Task(
    name="toy.total",
    lesson="90_toys",
    function="total",
    title="A weighted sum",
    difficulty=1,
    importance=1,
    minutes=1,
    draw=draw_total,
    observe=observe_total,
    properties={"result": Property(4, right_total)},
    needs_ranks=False,
)
KEPT = replace(
    TOTAL, name="toy.kept", properties={"result": Property(3, right_total), "argument kept": Property(1, kept)}
)
MEANS = {"function": "mean", "title": "A mean over ranks", "draw": draw_mean, "needs_ranks": True}
MEAN = replace(TOTAL, name="toy.mean", observe=observe_mean, properties={"result": Property(2, right_mean)}, **MEANS)
NOTED = replace(
    MEAN,
    name="toy.noted",
    observe=observe_noted,
    properties={"result": Property(2, right_mean), "collectives": Property(1, one_reduction)},
)
TASKS = {task.name: task for task in (TOTAL, KEPT, MEAN, NOTED)}
