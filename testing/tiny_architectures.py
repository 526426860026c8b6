"""Every architecture of transformers that `course train` takes, as small as its config lets it be."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from course_lib.modeling.loading import HEADS
from course_lib.modeling.small_configs import OWN, shrunk


def tiny(config_class: type[PreTrainedConfig], task: str, **more: Any) -> PreTrainedConfig:
    """A config of two layers of width 32 and 99 words, as far as its class has fields for them."""
    fields = shrunk(config_class().to_dict()) | OWN.get(config_class.__name__, {}) | more
    if task == "causal_lm" and hasattr(config_class(), "is_decoder"):
        fields["is_decoder"] = True
    return config_class(**fields)


def build(config_class: type[PreTrainedConfig], task: str, **more: Any) -> PreTrainedModel:
    """The tiny model for a task, with new weights; an Exception of any kind where there can be none."""
    with errors_only():
        made = HEADS[task][0].from_config
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in made(tiny(config_class, task, **more)).parameters())
        if size > 8_000_000:
            raise ValueError(f"{size / 1e6:.0f} million parameters are left")
        torch.manual_seed(0)
        config = tiny(config_class, task, **more)
        config.get_text_config().pad_token_id = 0
        model = made(config, dtype=torch.float32)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        return model


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Transformers warns of nothing meanwhile."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def batch() -> dict[str, torch.Tensor]:
    """Three rows of nine tokens, the second of five; each ends with the token where some models read their answer."""
    ids = torch.randint(4, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[[0, 1, 2], [8, 4, 8]] = 2
    mask = torch.ones(3, 9, dtype=torch.long)
    ids[1, 5:] = mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}
