"""Trainings drawn at random: right ones of many conventions, and such with one planted mistake of twelve kinds.

A small model: an embedding, a block of a norm, a square layer and an MLP, a head. The data are rows of tokens with
targets of which some do not count; rows are dealt to dp and shard, tokens to cp, and the MLP is split over tp.
"""

import random
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from course_lib.audit import Layout
from tests.audit.subjects import CopyToRanks, SumOverRanks, told_as

ROWS, TOKENS, WORDS, WIDTH, INSIDE = 24, 4, 24, 12, 24
IGNORED = -100
ONE_AXIS = [{"dp": 2}, {"dp": 3}, {"dp": 4}, {"shard": 2}, {"cp": 2}, {"tp": 2}]
TWO_AXES = [{"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}, {"dp": 2, "shard": 2}]
LAYOUTS = [Layout(**axes) for axes in (*ONE_AXIS, *TWO_AXES, {"shard": 3})]
CONVENTIONS = ("mean", "share", "sum", "scaled", "whole", "weighed")
"""A mean of own targets, averaged (all count); a share of the mean over all, summed; a sum, summed; a share times the
number of parts, averaged; a share that tells the mean over all; a mean of own targets, weighed by their number."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
DATA_AXES = ("dp", "shard", "cp")


@dataclass(frozen=True)
class Program:
    """One training; ``fault`` is one of twelve mistakes, or empty, ``of`` the parameter and ``axis`` it is about."""

    layout: Layout
    convention: str = "mean"
    dropout: str = ""
    micro_batches: int = 1
    tied: bool = False
    recomputed: bool = False
    dtype: torch.dtype = torch.float64
    fault: str = ""
    of: str = ""
    axis: str = ""

    def __call__(self, layout):
        return Running(self, layout).subject()

    @property
    def parts(self):
        """Ranks with data of their own."""
        return self.layout.dp * self.layout.shard * self.layout.cp


PARAMETERS = [f"{name}.{kind}" for name in ("norm", "square", "up", "down") for kind in ("weight", "bias")]
PARAMETERS += ["head.bias"]
ABOUT = {
    "transposed": {"of": "square.weight"},
    "weighed alike": {"convention": "weighed"},
    "tp sum missing": {"axis": "tp"},
}
"""What a mistake can only be about."""


def drawn(seed, fault=""):
    """The program of a seed; with a mistake, its data parts are two or more where it is about them."""
    pick = random.Random(seed)

    def fits(layout):
        return layout.tp > 1 if fault == "tp sum missing" else Program(layout).parts > 1 or not fault

    program = Program(
        pick.choice([layout for layout in LAYOUTS if fits(layout)]),
        pick.choice(CONVENTIONS),
        pick.choice(("", "", "", "module", "function")),
        pick.choice((1, 2)),
        pick.random() < 0.3,
        pick.random() < 0.3,
        pick.choice(DTYPES),
    )
    if not fault:
        return program
    of = pick.choice([name for name in PARAMETERS if fault != "exchanged" or name != "norm.weight"])
    axis = pick.choice([axis for axis in program.layout.used if axis in DATA_AXES] or ["tp"])
    return replace(program, **{"dropout": "", "fault": fault, "of": of, "axis": axis} | ABOUT.get(fault, {}))


class Small(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.square, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, INSIDE), nn.Linear(INSIDE, WIDTH)
        self.head, self.drop = nn.Linear(WIDTH, WORDS), nn.Dropout(0.3 if program.dropout == "module" else 0.0)
        if program.tied:
            self.head.weight = self.embedding.weight


def data(even):
    generator = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(WORDS, (ROWS, TOKENS), generator=generator) for _ in range(2))
    if not even:  # the first rows and tokens have the most
        places = torch.arange(ROWS)[:, None] / ROWS + torch.arange(TOKENS) / TOKENS
        targets[torch.rand(ROWS, TOKENS, generator=generator) < places * 0.6] = IGNORED
    return ids, targets


class Running:
    """A program on one rank, or on the one process of the reference."""

    def __init__(self, program, layout):
        self.program, self.layout, self.alone = program, layout, layout.ranks == 1
        torch.manual_seed(0)
        self.model = Small(program).to(program.dtype)
        self.place = layout.place(dist.get_rank())
        ids, targets = data(program.convention == "mean")
        self.total = int((targets != IGNORED).sum())
        self.parts = Program(layout).parts
        row = self.place["dp"] * layout.shard + self.place["shard"]
        rows = (tensor.chunk(layout.dp * layout.shard)[row] for tensor in (ids, targets))
        self.batch = tuple(tensor.chunk(layout.cp, 1)[self.place["cp"]] for tensor in rows)
        if not self.alone:
            mesh = layout.mesh()
            self.groups = {axis: mesh.get_group(axis) for axis in layout.used}
        if self.faulty("missing"):
            dict(self.model.named_parameters())[program.of].requires_grad_(False)

    def faulty(self, fault):
        return self.program.fault == fault and not self.alone

    def subject(self):
        optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.05)
        optimizer.register_step_pre_hook(self.reduce)
        return self.model, optimizer, self.loss, self.batch

    # --- forward ---

    def block(self, hidden):
        model, tp = self.model, self.layout.tp
        x = torch.tanh(model.square(model.norm(hidden)))
        if tp == 1:
            return hidden + model.drop(model.down(torch.tanh(model.up(x))))
        rows = slice(self.place["tp"] * INSIDE // tp, (self.place["tp"] + 1) * INSIDE // tp)
        x = CopyToRanks.apply(x, self.groups["tp"], not self.faulty("tp sum missing"))
        inside = torch.tanh(x @ model.up.weight[rows].T + model.up.bias[rows])
        out = SumOverRanks.apply(inside @ model.down.weight[:, rows].T, self.groups["tp"]) + model.down.bias
        return hidden + model.drop(out)

    def forward(self, ids):
        hidden = self.model.embedding(ids)
        hidden = checkpoint(self.block, hidden, use_reentrant=False) if self.program.recomputed else self.block(hidden)
        if self.program.dropout == "function":
            hidden = functional.dropout(hidden, 0.3)
        return self.model.head(hidden)

    def loss(self, _, batch):
        count = int((batch[1] != IGNORED).sum())
        divisors = {"mean": count, "weighed": count, "sum": 1, "scaled": self.total / self.parts}
        divisor = divisors.get(self.program.convention, self.total)
        told, chunks = torch.zeros((), dtype=torch.float64), [t.chunk(self.program.micro_batches) for t in batch]
        for number, (ids, targets) in enumerate(zip(*chunks, strict=True)):
            logits = self.forward(ids).flatten(0, 1)
            logits = logits.float() if self.program.dtype == torch.bfloat16 else logits
            summed = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
            loss = summed / divisor
            told += loss.detach()
            if number < self.program.micro_batches - 1:
                loss.backward()
        if self.program.convention == "whole" and not self.alone:
            for axis in self.data_axes():
                dist.all_reduce(told, group=self.groups[axis])
        return told_as(loss, told)

    # --- gradients ---

    def data_axes(self):
        return [axis for axis in self.layout.used if axis in DATA_AXES]

    def reduce(self, *_):
        """Bring the gradients of all ranks together, as the convention asks; or not, as the mistake does."""
        if self.alone:
            return
        weight = {"mean": 1 / self.parts, "scaled": 1 / self.parts}.get(self.program.convention, 1.0)
        if self.program.convention == "weighed":
            weight = int((self.batch[1] != IGNORED).sum()) / self.total
            weight = 1 / self.parts if self.faulty("weighed alike") else weight
        named = {name: p for name, p in self.model.named_parameters() if p.grad is not None}
        for name, parameter in named.items():
            self.reduce_one(name, parameter.grad, weight)
        if self.faulty("swapped"):
            one, other = (named[name].grad for name in SWAPPED)
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    def reduce_one(self, name, gradient, weight):
        mine, own = name == self.program.of, gradient.clone()
        if name.startswith("up.") or name == "down.weight":
            self.sum_over("tp", gradient)  # each rank has the gradient of its own rows, and zeros
        if self.faulty("batch left out") and self.last():
            gradient.zero_()
        gradient *= weight
        for axis in self.data_axes():
            if not (self.faulty("left out") and mine and axis == self.program.axis):
                self.sum_over(axis, gradient)
        if self.faulty("left out") and mine and weight == 1 / self.parts:
            gradient *= getattr(self.layout, self.program.axis)  # averaged over the others alone
        if self.faulty("other reduction"):
            gradient *= self.parts if weight < 1 else 1 / self.parts
        if not mine:
            return
        if self.faulty("sign"):
            gradient.neg_()
        if self.faulty("one rank") and self.last():
            gradient.copy_(own)
        if self.faulty("part lost"):
            gradient.chunk(self.parts)[-1].zero_()
        if self.faulty("transposed"):
            gradient.copy_(gradient.T.clone())
        if self.faulty("exchanged"):
            gradient.copy_(torch.cat([*gradient.chunk(self.parts)[1:], gradient.chunk(self.parts)[0]]))

    def last(self):
        return all(self.place[axis] == getattr(self.layout, axis) - 1 for axis in self.data_axes())

    def sum_over(self, axis, gradient):
        if axis in self.groups:
            dist.all_reduce(gradient, group=self.groups[axis])


SWAPPED = ("norm.weight", "norm.bias")
EVERY = ("other reduction", "weighed alike", "batch left out")
"""Mistakes in the gradient of every parameter."""


def planted(program):
    """Names of the parameters in which the mistake is; what is computed from a wrong gradient follows it."""
    if program.fault in EVERY:
        return None
    if program.fault == "tp sum missing":
        return {"norm.weight", "norm.bias", "square.weight", "square.bias", "embedding.weight"}
    return set(SWAPPED) if program.fault == "swapped" else {program.of}
