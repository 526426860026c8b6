"""Config section of adapters: what is trained beside frozen weights, and with what that goes together."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from course_lib.config_sections.communication import CommunicationConfig
from course_lib.config_sections.fields import Fraction, Positive, Strict
from course_lib.config_sections.learning import ModelConfig, OptimConfig, RunConfig
from course_lib.config_sections.parallel import ParallelConfig
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


def check_adapters(
    adapter: AdapterConfig,
    model: ModelConfig,
    optim: OptimConfig,
    parallel: ParallelConfig,
    how: CommunicationConfig,
    run: RunConfig,
) -> None:
    """Rules of adapters beside other fields.

    Raises:
        ConfigError: something that is not had with them, why, and what to do.
    """
    if adapter.lora_r is None:
        return
    if adapter.targets is not None and not all(adapter.targets):
        raise ConfigError(f"lora_targets `{adapter.lora_targets}` has an empty name", "give names between commas")
    if run.training_type == "pipeline":
        raise ConfigError(
            "lora_r goes beside layers of a whole model, and a pipeline's ranks have stages of it",
            "use --training_type accelerated",
            cure={"training_type": "accelerated"},
        )
    for size in ("tensor_parallel_size", "expert_parallel_size"):
        if getattr(parallel, size) > 1:
            raise ConfigError(
                f"lora_r goes beside whole matrices, and {size} leaves a rank pieces of them",
                f"leave one of the two out, or shard by --strategy fsdp, without {size}",
            )
    if how.communication != "all_reduce":
        raise ConfigError(
            f"communication {how.communication} is for gradients and weights of a whole "
            "model, and lora_r leaves a hundredth of them",
            "leave one of the two out",
        )
    if optim.optimizer in ("muon", "adafactor"):
        raise ConfigError(
            f"{optim.optimizer} looks at an update's whole matrix, and lora_r trains two factors of it",
            "use --optimizer adamw or sgd",
            cure={"optimizer": "adamw"},
        )
    if parallel.offload != "none":
        raise ConfigError(
            "offload moves the optimizer's state off the GPU, and lora_r leaves next to none",
            "leave it out; --load_in_4bit and --strategy fsdp make the frozen weights small",
        )
    if adapter.load_in_4bit and parallel.chosen_engine == "deepspeed":
        raise ConfigError(
            "load_in_4bit keeps weights as bytes, and DeepSpeed casts all parameters to the run's precision",
            "use --engine torch or scratch",
            cure={"engine": "torch"},
        )
    if adapter.load_in_4bit and model.torch_compile:
        raise ConfigError("torch_compile cannot see into the unpacking of load_in_4bit", "leave one of the two out")
