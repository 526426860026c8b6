"""Config section of what data-parallel ranks say to each other: how often, and how much of it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Le

from course_lib.config.fields import Fraction, NotNegative, Positive, Strict
from course_lib.errors import ConfigError

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
    diloco_fragments: Positive = 1
    """Parts of the model that agree at different steps, so that each message is smaller (streaming DiLoCo)."""
    diloco_overlap: NotNegative = 0
    """Steps that go on while a part's change is under way; below sync_every."""
    diloco_keep: Fraction = 0.5
    """Share of its own weights that a rank keeps when what it sent diloco_overlap steps ago has been agreed on."""
    powersgd_rank: Positive = 4
    """Rank of the matrices that PowerSGD sends."""
    topk_density: Annotated[float, Gt(0), Le(1)] = 0.01
    """Share of a bucket's elements that topk sends."""
    quantization_block: Positive = 256
    """Elements that share a scale in int8 and int4; even."""
    error_feedback: bool = True
    """Add what powersgd or topk left out to the next step's gradient, rather than lose it."""


def check_communication(how: CommunicationConfig) -> None:
    """Rules of this section's numbers.

    Raises:
        ConfigError: an overlap that is too long, or blocks that do not fill bytes.
    """
    if how.communication == "diloco" and how.diloco_overlap >= how.sync_every:
        raise ConfigError(
            f"diloco_overlap {how.diloco_overlap} is no less than sync_every {how.sync_every}",
            "let a part's change arrive before the next is sent",
        )
    if how.communication in ("int8", "int4") and how.quantization_block % 2:
        raise ConfigError(f"quantization_block {how.quantization_block} is odd", "use an even number, as 256")
