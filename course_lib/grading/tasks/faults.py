"""Lesson 10: the rank that a hang is due to, and ranks that no longer agree."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, items, made_by, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import entry, in_turn, numbers

# --- faults.hang ---

CALLS = (("all_reduce", 4096), ("all_reduce", 1024), ("all_gather", 512), ("broadcast", 64))
KINDS = ("behind", "mismatched", "dead", "skipped", "dead later", "nobody")


def hang_case(rng: random.Random, place: int) -> dict:
    """Each rank's notes: what it issued last, in order, as a flight recorder keeps it."""
    kind, world = KINDS[place % len(KINDS)], rng.randrange(3, 7)
    culprit, at, first = rng.randrange(world), rng.randrange(3, 7), rng.randrange(1, 50)
    loop = [rng.choice(CALLS) for _ in range(at + 1)]
    loop[at - 1] = next(call for call in CALLS if call != loop[at])  # so that leaving it out shows
    name, elements = loop[at]
    made = {
        "behind": loop[:at],
        "dead": loop[:at],
        "skipped": [*loop[: at - 1], loop[at]],
        "nobody": loop,
        "mismatched": [*loop[:at], (name, elements + 8)],
        "dead later": [*loop[:at], ("barrier", 0)],
    }[kind]
    stuck = {"skipped": at - 1, "nobody": at + 1}.get(kind, at)
    ranks = []
    for rank in range(world):
        calls = [
            {"sequence": first + i, "collective": name, "elements": elements, "ended": i < stuck}
            for i, (name, elements) in enumerate(made if rank == culprit else loop)
        ]
        ranks.append({"alive": kind != "dead" or rank != culprit, "calls": calls[rng.randrange(2) :]})
    if kind == "dead later":  # it met the error first, and has left by no fault of its own
        ranks[(culprit + 1) % world]["alive"] = False
    return {"ranks": ranks}


def verdict(ranks: list[dict]) -> list:
    """The culprit, why, and at which number; -1 for nobody."""
    made = [{call["sequence"]: (call["collective"], call["elements"]) for call in rank["calls"]} for rank in ranks]
    last = [max(calls) for calls in made]
    for sequence in range(min(map(min, made)), max(last) + 1):
        there = [calls.get(sequence) for calls in made]
        kinds = Counter(call for call in there if call)
        if len(kinds) > 1:
            odd = there.index(min(kinds, key=kinds.__getitem__))
            return [odd, "mismatched", sequence]
    if len(set(last)) == 1:
        return [-1, "nobody", -1]
    behind = last.index(min(last))
    return [behind, "behind" if ranks[behind]["alive"] else "dead", last[behind] + 1]


def observe_hang(function: Callable[..., Any], case: Case, rank: int) -> dict:
    culprit = function(
        [{"alive": r["alive"], "calls": [dict(call) for call in r["calls"]]} for r in case.inputs["ranks"]]
    )
    return {"verdict": [-1, "nobody", -1] if culprit is None else plain(list(culprit))}


def in_lines(inputs: dict) -> str:
    """The notes of each rank in a line; what has not ended has dots."""
    lines = [
        f"rank {rank}, {'alive' if noted['alive'] else 'dead'}:  "
        + "  ".join(
            f"{call['sequence']} {call['collective']} {call['elements']}{'' if call['ended'] else ' ...'}"
            for call in noted["calls"]
        )
        for rank, noted in enumerate(inputs["ranks"])
    ]
    return "\n".join(["sequence, collective, elements; ... for one that has not ended", *lines])


def verdict_has(place: int, what: str) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        actual, right = items(seen, 0, "verdict"), verdict(case.inputs["ranks"])
        if [type(part) for part in actual] != [int, str, int]:
            raise Malformed(Miss("a rank, a word and a sequence number, or None", short(actual)))
        if actual[place] == right[place]:
            return None
        due, told = (str(tuple(one)) if one[0] >= 0 else "None" for one in (right, actual))
        return Miss(f"{what} {right[place]} in {due}" if right[0] >= 0 else "None: nobody is to blame", told)

    return rule


HANG = Task(
    **kit.about("faults.hang"),
    draw=in_turn(hang_case, len(KINDS)),
    observe=observe_hang,
    shown=in_lines,
    essential=("who",),
    properties={
        "who": Property(2, verdict_has(0, "rank")),
        "what": Property(2, verdict_has(1, "what")),
        "where": Property(1, verdict_has(2, "sequence")),
    },
)


# --- faults.agreement ---

DIFFERENCES = ("one bit", "another sign", "none but a NaN", "swapped rows")


def agreement_cases(rng: random.Random, worlds: Sequence[int] = (1, 3, 2, 3, 2)) -> list[Case]:
    """Cases of each of DIFFERENCES in turn; another sign is always on rank 0."""
    cases = []
    for place, world in enumerate(worlds):
        kind, width = DIFFERENCES[place % len(DIFFERENCES)], rng.randrange(2, 5)
        weights, biases = [numbers(rng, 3, width)] * world, [numbers(rng, width) + 8] * world
        odd = 0 if kind == "another sign" else rng.randrange(world)
        if kind == "one bit":
            biases[odd] = (biases[odd].view(np.int32) ^ 1).view(np.float32)
        elif kind == "another sign":
            weights[odd] = -weights[odd]
        elif kind == "swapped rows":
            weights[odd] = weights[odd][[1, 0, 2]]
        cases.append(Case(world, {"weights": weights, "biases": biases, "nan": kind == "none but a NaN"}))
    return cases


def observe_agreement(function: Callable[..., Any], case: Case, rank: int) -> dict:
    weight, bias = (kit.tensor(case.inputs[key][rank]) for key in ("weights", "biases"))
    if case.inputs["nan"]:
        weight[0, 0] = float("nan")
    with Recorder() as record:
        odd_ranks = function([weight, bias])
    return kit.noted(record, ranks=odd_ranks)


@kit.each_rank
def names_who_differs(case: Case, seen: Seen, rank: int) -> Miss | None:
    """The ranks named are those that differ from most; of two that differ, the lower counts as right."""
    both = zip(case.inputs["weights"], case.inputs["biases"], strict=True)
    held = [weight.tobytes() + bias.tobytes() for weight, bias in both]
    most = max(held, key=held.count)
    right, named = [other for other, value in enumerate(held) if value != most], items(seen, rank, "ranks", int)
    return kit.unless(named == right, f"ranks {right}", short(named))


@kit.each_rank
def one_small_collective(case: Case, seen: Seen, rank: int) -> Miss | None:
    most, made = 32 * case.world_size, made_by(seen, rank)
    fits = len(made) == 1 and kit.carried(made) <= most
    return kit.unless(fits, f"one collective of at most {most} bytes", kit.listed(made, "none"))


AGREEMENT = Task(
    **kit.about("faults.agreement"),
    draw=agreement_cases,
    observe=observe_agreement,
    own={"weights": entry, "biases": entry},
    essential=("ranks",),
    properties={"ranks": Property(3, names_who_differs), "one small collective": Property(2, one_small_collective)},
)
