"""Config section of what data-parallel ranks say to each other: how often, and how much of it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Le

from course_lib.config.fields import Fraction, Positive, Strict

LOCAL = ("local_sgd", "diloco")
"""Ways in which ranks train by themselves between two agreements."""


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig(Strict):
    """Less communication between the ranks of --strategy ddp --engine scratch, for slow links (lesson 18)."""

    communication: Literal["all_reduce", "local_sgd", "diloco", "powersgd", "topk", "int8", "int4"] = "all_reduce"
    """What travels: each step's whole gradient (all_reduce), its matrices in low rank (powersgd), its largest \
elements (topk), or all of it in 8 or 4 bits (int8, int4); or every sync_every steps the weights (local_sgd), or their \
change, for an outer optimizer (diloco)."""
    sync_every: Positive = 32
    """Optimizer steps that each rank makes by itself between two agreements (local_sgd, diloco)."""
    outer_lr: Annotated[float, Gt(0)] = 0.7
    """Learning rate of diloco's outer optimizer, SGD with Nesterov's momentum."""
    outer_momentum: Fraction = 0.9
    """Momentum of diloco's outer optimizer."""
    powersgd_rank: Positive = 4
    """Rank of the matrices that PowerSGD sends."""
    topk_density: Annotated[float, Gt(0), Le(1)] = 0.01
    """Share of a bucket's elements that topk sends."""
    error_feedback: bool = True
    """Add what powersgd or topk left out to the next step's gradient, rather than lose it."""
