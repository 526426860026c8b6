"""A model that fits on no rank: built without values, then each rank reads its own shards from files of safetensors.

A rank that loads the whole model, to keep 1/N of it, has its peak there. Here parameters have shapes alone until they
are sharded, and a shard, which is a run of elements of a flattened tensor, is read from the rows of the file that it
lies in. Nothing is broadcast, no rank ever has more than its shards and one unit, and together the ranks read each
file about once. torchtitan and Accelerate's ``init_empty_weights`` go the same way.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn

from course_lib.errors import ModelError
from course_lib.modeling import checkpoint_files
from course_lib.parallel.sharding import Shard


class SlicedWeights:
    """The tensors of a model's folder, of which runs of elements are read.

    Args:
        folder: with ``model.safetensors``, or shards of it and their index.

    Attributes:
        bytes_read: so far, of the rows that were asked for.
    Raises:
        ModelError: it holds no whole model, or one in other files.
    """

    def __init__(self, folder: Path):
        self.folder, self.bytes_read = folder, 0
        self.file_of: dict[str, Path] = {}
        for file in checkpoint_files.check(folder):
            if file.suffix != ".safetensors":
                raise ModelError(
                    f"{file} is read whole or not at all",
                    'save the model as safetensors, in shards: save_pretrained(DIR, max_shard_size="5GB")',
                )
            with safe_open(str(file), framework="pt") as opened:
                self.file_of |= dict.fromkeys(opened.keys(), file)

    def read(self, name: str, start: int, numel: int) -> Tensor:
        """Elements ``start`` to ``start + numel`` of a flattened tensor, 1-D, in the file's dtype.

        Raises:
            ModelError: no such tensor.
        """
        if name not in self.file_of:
            raise ModelError(
                f"the weights of `{self.folder}` lack {name}",
                "give the folder of a whole model, which save_pretrained wrote",
            )
        with safe_open(str(self.file_of[name]), framework="pt") as opened:
            tensor = opened.get_slice(name)
            shape = tensor.get_shape()
            row = torch.Size(shape[1:]).numel()
            first, end = start // row, -(-(start + numel) // row)  # the rows that the run lies in
            rows = tensor[first:end].flatten()
        self.bytes_read += rows.nbytes
        return rows[start - first * row :][:numel]


def build_empty(auto: Any, architecture: Any, **options: Any) -> nn.Module:
    """A model on the meta device, except for buffers, which no file holds.

    Args:
        auto: a class of transformers such as ``AutoModelForCausalLM``.
        architecture: its config.
        options: of ``from_config``.
    """
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(architecture, **options)
    model.tie_weights()  # on the meta device each name was given a parameter of its own
    return model


def fill(shards: Mapping[str, Shard], weights: SlicedWeights) -> None:
    """Read this rank's shards, one after another, each into its place.

    Args:
        shards: by name, as an engine's ``shards()``.
        weights: where from.
    """
    for name, shard in shards.items():
        if shard.data.numel():
            with torch.no_grad():
                shard.data.copy_(weights.read(name, shard.start, shard.data.numel()))
