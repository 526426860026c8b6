"""Config section of adapters: what is trained beside frozen weights."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from course_lib.config.fields import Fraction, Positive, Strict
from course_lib.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Strict):
    """Fine-tuning of few parameters: LoRA, and QLoRA."""

    lora_r: Positive | None = None
    """Train two thin matrices of this rank beside each chosen linear layer, and a classifier's head, rather than all \
weights (LoRA, arXiv 2106.09685); 8 and 16 are usual."""
    lora_alpha: Annotated[float, Gt(0)] | None = None
    """The two matrices count lora_alpha / lora_r times; default: twice lora_r."""
    lora_dropout: Fraction = 0.0
    """Share of what goes into the two matrices to drop in training."""
    lora_targets: str | None = None
    """Names of the layers to train beside, or their ends, between commas, as in q_proj,v_proj; default: all linear \
layers of the blocks (QLoRA, arXiv 2305.14314)."""
    load_in_4bit: bool = False
    """Keep the blocks' frozen weights in 4 bits (NF4, QLoRA), and unpack a layer's while it computes."""

    @property
    def targets(self) -> list[str] | None:
        """The names in ``lora_targets``; None: by default."""
        return None if self.lora_targets is None else [name.strip() for name in self.lora_targets.split(",")]


def check_adapters(adapter: AdapterConfig) -> None:
    """Refuse names of layers that are none.

    Raises:
        ConfigError: an empty name.
    """
    if adapter.targets is not None and not all(adapter.targets):
        raise ConfigError(f"lora_targets `{adapter.lora_targets}` has an empty name", "give names between commas")
