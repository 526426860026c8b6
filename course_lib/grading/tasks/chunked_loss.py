"""Lesson 17, to build: a cross-entropy that holds a chunk's logits alone, its mean over all ranks' targets."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, events, items, short
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import each_world, entry, numbers, whole
from course_lib.grading.work import Work

USUAL, LARGE, NONE, SHORT = "usual", "large logits", "no targets", "one chunk"
IGNORED = -100
FACTORS = (1.0, -0.375)
"""By which the loss of a step is multiplied before its backward."""
CHUNKS_HELD = 6
"""Chunks of logits, in fp32, that may be held at a time: probabilities, a mask and the like."""


# --- loss.chunked ---


def loss_case(rng: random.Random, world: int, kind: str) -> dict:
    """Two micro-batches, of which the gradients add up; the ranks' targets differ in number."""
    chunk, width, vocabulary = rng.randrange(3, 6), rng.randrange(2, 5), rng.randrange(80, 120)
    tokens = chunk * rng.randrange(14, 18) + rng.randrange(1, chunk)
    if kind == SHORT:
        chunk = tokens + rng.randrange(3)
    states, targets = [], []
    for rank in range(world):
        states.append(numbers(rng, len(FACTORS), tokens, width))
        of_rank = whole(rng, 0, vocabulary, len(FACTORS), tokens)
        of_rank[whole(rng, 0, 4, *of_rank.shape) < 1 + rank % 3] = IGNORED
        of_rank[:, :chunk] = IGNORED  # a chunk without any
        of_rank[:, -1] = 0  # the last chunk, which is short, counts; and the first word is a target like others
        if kind == NONE and (rank == 0 or world < 3):
            of_rank[:] = IGNORED
        targets.append(of_rank)
    weight = numbers(rng, vocabulary, width)
    return {
        "kind": kind,
        "chunk": chunk,
        "weight": weight * np.float32(64 if kind == LARGE else 0.5),
        "states": states,
        "targets": targets,
    }


draw_losses = each_world(loss_case, (2, LARGE), (1, SHORT), (2, NONE), (3, NONE), usual=(USUAL,))
"""Each number of ranks; logits whose exponentials overflow; a single chunk; no target on a rank, or on any."""


def observe_loss(function: Callable[..., Any], case: Case, rank: int) -> dict:
    weight = case.inputs["weight"]
    module = function(*weight.shape, case.inputs["chunk"])
    parameters = [f"{name} {list(parameter.shape)}" for name, parameter in module.named_parameters()]
    module.weight.data.copy_(kit.tensor(weight))
    steps: dict[str, list] = {name: [] for name in ("loss", "of_states", "peaks", "held", "largest", "flops")}
    with Recorder() as record:
        for rows, targets, factor in zip(
            case.inputs["states"][rank], case.inputs["targets"][rank], FACTORS, strict=True
        ):
            states = kit.tensor(rows).requires_grad_()
            with Work() as work:
                loss = module(states, kit.tensor(targets))
                record.note("backward")
                held = work.held
                (loss * factor).backward()
                record.note("forward")
            of_step = (float(loss.detach()), plain(states.grad), work.peak, held, work.largest, work.flops)
            for values, value in zip(steps.values(), of_step, strict=True):
                values.append(value)
    return kit.noted(record, parameters=parameters, of_weight=module.weight.grad) | {
        name: np.array(values) for name, values in steps.items()
    }


def by_whole_logits(case: Case) -> dict[str, list[np.ndarray]]:
    """In float64, by rank: its share of each step's mean, and the gradients of its shares."""
    right: dict[str, list[np.ndarray]] = {"loss": [], "of_states": [], "of_weight": []}
    targets = [kit.tensor(of_rank) for of_rank in case.inputs["targets"]]
    counts = [max(1, sum(int((of_rank[step] != IGNORED).sum()) for of_rank in targets)) for step in range(len(FACTORS))]
    for rows, wanted in zip(case.inputs["states"], targets, strict=True):
        weight, states = (kit.tensor(values).double().requires_grad_() for values in (case.inputs["weight"], rows))
        losses = [
            F.cross_entropy(states[step] @ weight.T, wanted[step], ignore_index=IGNORED, reduction="sum") / count
            for step, count in enumerate(counts)
        ]
        torch.stack([loss * factor for loss, factor in zip(losses, FACTORS, strict=True)]).sum().backward()
        right["loss"].append(np.array([loss.item() for loss in losses]))
        assert states.grad is not None and weight.grad is not None
        right["of_states"].append(states.grad.numpy())
        right["of_weight"].append(weight.grad.numpy())
    return right


def exact(key: str, *kinds: str) -> Rule:
    """A rule: each rank's numbers, in cases of some kinds."""
    return kit.equals(key, by_whole_logits, *kinds, of=key)


def weight_alone(case: Case, seen: Seen) -> Miss | None:
    right, parameters = [f"weight {list(case.inputs['weight'].shape)}"], items(seen, 0, "parameters", str)
    return kit.unless(parameters == right, f"the parameters {right}", short(parameters))


@kit.each_rank
def a_chunk_alone(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Bytes at any time: a few chunks of logits, and some tensors like the two gradients; of them one after forward."""
    (vocabulary, width), tokens = case.inputs["weight"].shape, case.inputs["states"][0].shape[1]
    chunk = min(case.inputs["chunk"], tokens)
    both = (vocabulary + tokens) * width
    limits = {
        "peaks": (4 * (4 * both + CHUNKS_HELD * chunk * vocabulary), "bytes at a time"),
        "held": (4 * (2 * both + tokens), "bytes after the forward"),
        "largest": (max(chunk * vocabulary, vocabulary * width, tokens * width), "elements in one tensor"),
    }
    note = f"all logits are {tokens * vocabulary} numbers, a chunk's {chunk * vocabulary}"
    for key, (most, unit) in limits.items():
        for step, actual in enumerate(array(seen, rank, key, (len(FACTORS),))):
            if not 0 < actual <= most:
                return Miss(f"{most} {unit} at most", f"{actual:g}", step=step, note=note)
    return None


@kit.each_rank
def three_products(case: Case, seen: Seen, rank: int) -> Miss | None:
    """The head's product and the two of its gradients, each once."""
    (vocabulary, width), tokens = case.inputs["weight"].shape, case.inputs["states"][0].shape[1]
    most = 6 * tokens * vocabulary * width
    for step, actual in enumerate(array(seen, rank, "flops", (len(FACTORS),))):
        needed = int((case.inputs["targets"][rank][step] != IGNORED).sum()) * most // tokens
        if not needed <= actual <= most:
            shown = f"{actual:g}, {actual / most:.2f} of that"
            return Miss(f"{most} FLOPs in matrix products at most", shown, step=step)
    return None


@kit.each_rank
def one_count(case: Case, seen: Seen, rank: int) -> Miss | None:
    """One all-reduce of a number in each forward, nothing in a backward."""
    array(seen, rank, "loss", (len(FACTORS),))
    happened = [event for event in events(seen, rank) if event != "wait"]
    right = [["all_reduce 8", "backward", "forward"], ["all_reduce 4", "backward", "forward"]]
    steps = [happened[at : at + 3] for at in range(0, len(happened), 3)]
    fits = len(steps) == len(FACTORS) and all(step in right for step in steps)
    return kit.unless(fits, "one all-reduce of a number in each forward", kit.listed(happened, ""))


CHUNKED = Task(
    **kit.about("loss.chunked"),
    draw=draw_losses,
    observe=observe_loss,
    own={"states": entry, "targets": entry},
    essential=("loss", "gradient of the weight", "a chunk alone"),
    properties={
        "loss": Property(2, exact("loss", USUAL, LARGE, SHORT)),
        "gradient of states": Property(1, exact("of_states", USUAL, LARGE, SHORT)),
        "gradient of the weight": Property(2, exact("of_weight", USUAL, LARGE, SHORT)),
        "no targets": Property(1, kit.all_of(*(exact(key, NONE) for key in ("loss", "of_states", "of_weight")))),
        "a chunk alone": Property(3, kit.all_of(weight_alone, a_chunk_alone)),
        "three products": Property(2, three_products),
        "one count": Property(1, one_count),
    },
)
