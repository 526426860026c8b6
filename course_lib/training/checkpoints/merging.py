"""Makes a whole model of an adapter and its base model: W + (alpha / r) B A in the place of each W."""

from dataclasses import dataclass
from pathlib import Path

import torch

from course_lib.errors import ModelError
from course_lib.modeling import checkpoint_files, load_trained, lora, lora_files
from course_lib.modeling.loading import task_of
from course_lib.modeling.probing import probe_row, undisturbed
from course_lib.training.checkpoints.model_folder import write_model


@dataclass(frozen=True)
class Merged:
    """Result of a merge.

    Attributes:
        base: name or folder of the base model.
        layers: that had an adapter.
        difference: the largest of the logits of a few tokens, before and after.
    """

    base: str
    layers: int
    difference: float


def merge_folder(folder: Path, output: Path) -> Merged:
    """Write the model that an adapter and its base are together, whole or not at all.

    Beside weights that were in 4 bits the adapter was trained to mend what these lost: it is merged with them as they
    are unpacked, in fp32.

    Args:
        folder: with an adapter, by ``course train --lora_r`` or PEFT.
        output: that ``from_pretrained`` will load; not there, or empty.
    Raises:
        ModelError: no adapter that is read here, its base model is out of reach or another, or ``output`` is taken.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder", "give the folder with adapter_config.json")
    if not lora_files.is_adapter(folder):
        if (folder / lora_files.CONFIG).is_file():
            checkpoint_files.check(folder)  # an adapter beside whole weights
        raise ModelError(
            f"{folder} holds no adapter",
            "give the folder with adapter_config.json, such as runs/NAME/model of a run with --lora_r",
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ModelError(f"{output} is there already", "choose another --output")
    base, *_ = lora_files.base_of(folder)
    loaded = load_trained(folder, task_of(folder))
    model, layers = loaded.model, len(lora.adapted(loaded.model))
    row = probe_row(model)
    with torch.no_grad(), undisturbed(model):
        before = model(**row).logits
        lora.merge(model)
        lora.unpack(model)
        difference = (model(**row).logits - before).abs().max().item()
    card = f"`{base}` with the adapter of `{folder}` merged into the weights of {layers} layers.\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    write_model(output, model, model.state_dict(), loaded.tokenizer, card)
    return Merged(base, layers, difference)
