"""Lesson 19: a step of direct preference optimization, whose reference is the model without its adapters."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.grading.rules import Seen, items, same, short, suspected
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import in_turn, numbers, whole
from course_lib.grading.tasks.models import all_weights, learning
from course_lib.grading.tasks.zero_optimizer import Optimizer

USUAL, START, LARGE = "usual", "at the base", "large margins"
STEPS = {USUAL: 2, START: 2, LARGE: 1}
IGNORED = -100


class Beside(nn.Module):
    """A frozen matrix (m, n), and A (r, n) and B (m, r) beside it, which count once."""

    def __init__(self, weight: np.ndarray, a: np.ndarray, b: np.ndarray):
        super().__init__()
        self.weight, self.A, self.B = (nn.Parameter(kit.tensor(values)) for values in (weight, a, b))
        self.weight.requires_grad_(False)
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        return out + x @ self.A.T @ self.B.T if self.on else out


class Adapted(nn.Module):
    """A language model in which a token sees the mean of those up to it. (rows, tokens) gives (rows, tokens, words)."""

    def __init__(self, inputs: dict):
        super().__init__()
        self.embedding = nn.Parameter(kit.tensor(inputs["embedding"]), requires_grad=False)
        self.hidden, self.head = (Beside(*inputs[name]) for name in ("hidden", "head"))

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.embedding[ids]
        before = tokens.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None].to(tokens.dtype)
        return self.head(tokens + torch.tanh(self.hidden(before)))

    @property
    def on(self) -> bool:
        """Whether the adapters are."""
        return self.hidden.on and self.head.on

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """While it is open the model is its base, as PEFT's models are."""
        self.hidden.on = self.head.on = False
        try:
            yield
        finally:
            self.hidden.on = self.head.on = True


def flat(parameters: list[nn.Parameter]) -> np.ndarray:
    return all_weights(parameters).numpy()


def frozen(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]


# --- lora.dpo ---


def sequences(rng: random.Random, pairs: int, words: int, prompts: list[np.ndarray]) -> list[np.ndarray]:
    """ids and labels of pairs of a prompt and an answer, as long as the longest; others end in padding of token 0."""
    answers = [whole(rng, 0, words, rng.randrange(1, 6)) for _ in range(pairs)]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids, labels = np.zeros((pairs, length), np.int64), np.full((pairs, length), IGNORED, np.int64)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = np.concatenate([prompt, answer])
        labels[row, len(prompt) : end] = answer
    return [ids, labels]


def dpo_case(rng: random.Random, place: int) -> dict:
    """In turn: adapters as training has them; at their start; and a beta by which 1 - sigmoid is 1, or sigmoid is 0."""
    kind = (USUAL, START, USUAL, LARGE)[place % 4]
    pairs, words, width, r = rng.randrange(2, 4), rng.randrange(7, 11), rng.randrange(3, 6), 2
    batches = []
    for _ in range(STEPS[kind]):
        prompts = [whole(rng, 0, words, rng.randrange(1, 5)) for _ in range(pairs)]
        chosen, rejected = (sequences(rng, pairs, words, prompts) for _ in range(2))
        batches.append([chosen, rejected])
    zero = 0 if kind == START else 1
    case = {
        "kind": kind,
        "beta": rng.choice((0.125, 0.25, 0.5)),
        "optimizer": rng.choice(("Adam", "momentum")),
        "embedding": numbers(rng, words, width),
        "hidden": [numbers(rng, width, width), numbers(rng, r, width), zero * numbers(rng, width, r)],
        "head": [numbers(rng, words, width), numbers(rng, r, width), zero * numbers(rng, words, r)],
        "batches": batches,
    }
    if kind == LARGE:
        case["optimizer"] = "Adam"
        margins = by_hand(Case(1, case))["margins"][0] / case["beta"]
        if margins.min() > -0.5:
            return dpo_case(rng, place)
        case["beta"] = float(np.ceil(200 / -margins.min()))
    return case


def observe_dpo(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """Some steps; of each forward pass with which rows, with adapters or without, with a graph or without."""
    model = Adapted(case.inputs)
    optimizer = Optimizer(case.inputs["optimizer"], learning(model))
    passes: list[list] = []
    made: dict[str, list[Any]] = {"loss": [], "margins": [], "weights": []}

    def note(module: nn.Module, given: tuple) -> None:
        step, is_on = len(made["loss"]), getattr(module, "on", None)
        passes.append([step, list(given[0].shape), is_on, torch.is_grad_enabled(), module is model])

    model.register_forward_pre_hook(note)
    before, still = flat(frozen(model)), frozen(model)
    for batch in case.inputs["batches"]:
        chosen, rejected = (list(map(kit.tensor, side)) for side in batch)
        loss, margin = function(model, optimizer, chosen, rejected, case.inputs["beta"])
        for key, value in (("loss", loss), ("margins", margin), ("weights", flat(learning(model)))):
            made[key].append(plain(value))
    moved = int((flat(still) != before).sum()) + sum(parameter.grad is not None for parameter in still)
    return {
        **{key: np.stack(values) for key, values in made.items()},
        "passes": passes,
        "moved": moved,
        "trained": len(learning(model)),
        "on": model.on,
    }


WRONG = {
    "a mean over the answer's tokens, not a sum?": "mean",
    "the tokens' scores not shifted by one?": "unshifted",
    "padding counted?": "all",
    "beta forgotten, or in another place?": "beta",
}


def answer_scores(model: Adapted, ids: Tensor, labels: Tensor, *, how: str) -> Tensor:
    """By row the log-probability of its answer; `how` as of `WRONG`."""
    logits = model(ids) if how == "unshifted" else model(ids)[:, :-1]
    wanted = labels if how == "unshifted" else labels[:, 1:]
    if how == "all":
        wanted = ids[:, 1:]
    losses = -F.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")
    return losses.sum(1) / ((wanted != IGNORED).sum(1).clamp(min=1) if how == "mean" else 1)


def by_hand(case: Case, how: str = "") -> dict[str, np.ndarray]:
    """Losses, margins and trained weights after each step, in float64; `how` as of `WRONG`."""
    model = Adapted(case.inputs).double()
    optimizer = Optimizer(case.inputs["optimizer"], learning(model))
    beta = 1.0 if how == "beta" else case.inputs["beta"]
    right: dict[str, list[np.ndarray]] = {"loss": [], "margins": [], "weights": []}
    for batch in case.inputs["batches"]:
        sides = [list(map(kit.tensor, side)) for side in batch]
        with torch.no_grad(), model.disable_adapter():
            reference = [answer_scores(model, *side, how=how) for side in sides]
        chosen, rejected = (
            answer_scores(model, *side, how=how) - base for side, base in zip(sides, reference, strict=True)
        )
        margin = beta * (chosen - rejected)
        loss = F.softplus(-margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for key, value in (("loss", loss), ("margins", margin), ("weights", all_weights(learning(model)))):
            right[key].append(value.detach().numpy().copy())
    return {key: np.stack(values) for key, values in right.items()}


def exact(key: str, *kinds: str) -> Rule:
    """A rule: the numbers of each step, in cases of some kinds."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        miss = kit.equals(key, by_hand, *kinds, of=key, on_all=True, first_step=1)(case, seen)
        wrong = {
            f"{note} These numbers come about so": lambda how=how: [by_hand(case, how)[key]]
            for note, how in WRONG.items()
        }
        return suspected(miss, seen, key, wrong)

    return rule


def adapters_move(case: Case, seen: Seen) -> Miss | None:
    """The adapters after each step; nothing else moved, and they are on."""
    if miss := exact("weights", USUAL, START)(case, seen):
        return miss
    return same(seen, "moved", [0]) or same(seen, "trained", [4]) or same(seen, "on", [True])


def one_model(case: Case, seen: Seen) -> Miss | None:
    """In each step every sequence passes the model once with adapters, with a graph, and once without either."""
    passes = items(seen, 0, "passes", list)
    pairs = len(case.inputs["batches"][0][0][0])
    for step in range(len(case.inputs["batches"])):
        rows = {True: 0, False: 0}
        for one in passes:
            if len(one) != 5 or not isinstance(one[1], list) or len(one[1]) != 2 or type(one[2]) is not bool:
                return Miss("passes as they were noted", short(one))
            if one[0] != step:
                continue
            _, shape, is_on, has_graph, is_the_model = one
            if is_the_model is not True:
                return Miss("passes of the model itself", "one of a copy", step=step + 1)
            if has_graph is not is_on:
                said = f"with adapters: {is_on}, with a graph: {has_graph}"
                return Miss("a graph where the adapters are on, and only there", said, step=step + 1)
            rows[is_on] += shape[0] if type(shape[0]) is int else 0
        if rows != {True: 2 * pairs, False: 2 * pairs}:
            shown = f"{rows[True]} with and {rows[False]} without"
            return Miss(f"{2 * pairs} rows with adapters and {2 * pairs} without", shown, step=step + 1)
    return None


DPO = Task(
    **kit.about("lora.dpo"),
    draw=in_turn(dpo_case, 4),
    observe=observe_dpo,
    essential=("loss", "adapters move", "one model"),
    properties={
        "loss": Property(2, exact("loss", USUAL, START)),
        "margins": Property(1, exact("margins", USUAL, START)),
        "adapters move": Property(3, adapters_move),
        "large margins": Property(1, kit.all_of(*(exact(key, LARGE) for key in ("loss", "margins", "weights")))),
        "one model": Property(2, one_model),
    },
)
