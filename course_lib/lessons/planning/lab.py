"""Measurements of lesson 09: the same step by real ranks and simulated, and the planner's known errors."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from accelerate import Accelerator
from transformers import GPT2Config

import course_lib
from course_lib.errors import DataError
from course_lib.launching.launch import launch
from course_lib.lessons.lab_gpt2 import gpt2, gpt2_config
from course_lib.metering.meter import Meter
from course_lib.parallel.torch_engines.fsdp import shard_with_torch
from course_lib.planning.simulate import Setting, simulate

ROWS, TOKENS, VOCABULARY = 2, 64, 1024
ERRORS = Path("benchmarks/planner.md")


@dataclass(frozen=True)
class Counted:
    """One step of one rank.

    Attributes:
        collectives: how many, by name and payload in bytes.
        sent: bytes under the ring model.
        states: bytes of parameters, gradients and optimizer states after the backward pass.
    """

    collectives: Counter[tuple[str, int]]
    sent: int
    states: int


def small_config(layers: int, width: int) -> GPT2Config:
    """A GPT-2 without dropout that a laptop trains."""
    return gpt2_config(layers, width, TOKENS, VOCABULARY)


def real_step(layers: int, width: int) -> Counted:
    """On one rank: the second step of FSDP2 in fp32, counted by the meter; its forward and backward pass."""
    state = Accelerator()
    model = gpt2(layers, width, TOKENS, VOCABULARY).to(state.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = shard_with_torch(model, optimizer)
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), device=state.device)

    def forward_and_backward() -> None:
        engine(input_ids=tokens, labels=tokens).loss.backward()

    forward_and_backward()
    engine.step()
    engine.zero_grad()
    with Meter(engine, optimizer, engine.resident) as meter:
        forward_and_backward()
    kept = ("parameters", "gradients", "optimizer states")
    return Counted(
        Counter((collective.name, collective.bytes) for collective in meter.collectives),
        meter.bytes_sent,
        sum(meter.resident[kind] for kind in kept),
    )


def real_and_simulated(layers: int, width: int, num_processes: int, device: str) -> tuple[Counted, Counted]:
    """The same step on real ranks, as rank 0 counted it, and simulated."""
    real = launch(real_step, layers, width, num_processes=num_processes, device=device, timeout=120)[0]
    simulated = simulate(small_config(layers, width), Setting("fsdp", num_processes, ROWS, TOKENS, precision="fp32"))
    kept = ("parameters", "gradients", "optimizer states")
    return real, Counted(
        Counter((exchange.name, exchange.bytes) for exchange in simulated.exchanges),
        sum(exchange.sent for exchange in simulated.exchanges),
        sum(simulated.resident[kind] for kind in kept),
    )


def known_errors() -> pd.DataFrame:
    """The planner's errors by kind of published measurement, as the repository's table has them.

    Returns:
        Columns ``kind``, ``rows`` (int), ``median`` and ``90th percentile`` of the absolute error (text).
    Raises:
        DataError: the table is not there, as where the package was installed without the repository.
    """
    path = Path(course_lib.__file__).parents[1] / ERRORS
    if not path.exists():
        raise DataError(f"{ERRORS} is not beside the installed package", "run the lesson in a clone of the repository")
    rows = ([cell.strip(" *") for cell in line.split("|")[1:-1]] for line in path.read_text("utf-8").splitlines())
    counted = [row for row in rows if len(row) == 4 and row[1].isdigit()]
    return pd.DataFrame(counted, columns=["kind", "rows", "median", "90th percentile"]).astype({"rows": int})
