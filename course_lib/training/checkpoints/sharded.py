"""Checkpoints that outlive the number of ranks: each rank writes its shards, any number reads them.

Every strategy's weights and optimizer states are brought to one form, a run of each flattened
tensor per rank (:class:`~course_lib.parallel.sharding.Shard`), which torch.distributed.checkpoint
writes as safetensors, one file per rank, with the offset of each run. So what ZeRO-3 saved on four
ranks FSDP can read on three. Nothing is pickled.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from course_lib.errors import CheckpointError
from course_lib.parallel.sharding import Shard

SHARDS = "shards"


class ElementRun:
    """A shard as torch.distributed.checkpoint wants it: one chunk of a 1-D tensor.

    Implements the protocol of ``torch.distributed._checkpointable``, as DTensor does.
    """

    def __init__(self, shard: Shard):
        self.numel, self.start, self.data = shard.shape.numel(), shard.start, shard.data.detach()

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([self.start]), sizes=self.data.size())

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if not self.data.numel():
            return []
        about = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties.create_from_tensor(self.data),
            size=torch.Size([self.numel]),
        )
        return [WriteItem(MetadataIndex(fqn, torch.Size([self.start])), WriteItemType.SHARD, tensor_data=about)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.data.numel() else []

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.data

    def size(self) -> torch.Size:
        """Shape of the whole, as the planner checks it."""
        return torch.Size([self.numel])


class _Saving(dcp.DefaultSavePlanner):
    """Looks runs up by name alone, since a rank has one of each tensor."""

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].data


class _Loading(dcp.DefaultLoadPlanner):
    """The same for loading; the default set-up would replace what is neither tensor nor DTensor."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].data


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise the first rank's failure itself; what the library wraps it in is not even an Exception."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, OSError | SafetensorError):
            raise cause from error
        raise RuntimeError(f"rank {rank} could not save its shards: {cause!r}") from error


def save(shards: Mapping[str, Shard], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write every rank's shards below ``folder``; a collective call.

    Args:
        shards: by name; the names and shapes of all ranks together make the tensors.
        folder: shared by all ranks.
        group: of all ranks; another than training uses where training goes on meanwhile.
    """
    with _as_os_error():
        dcp.save(
            {name: ElementRun(shard) for name, shard in shards.items()},
            planner=_Saving(flatten_state_dict=False),
            storage_writer=dcp.HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True),
            process_group=group,
        )


def reader_of(folder: Path) -> dcp.HuggingFaceStorageReader:
    """Reader of the shards below a folder: of each file just the elements that are asked for."""
    return dcp.HuggingFaceStorageReader(str(folder / SHARDS))


def load(shards: Mapping[str, Shard], folder: Path, reader: dcp.StorageReader | None = None) -> None:
    """Fill every rank's shards from what any number of ranks saved; a collective call.

    Args:
        shards: by name, as for :func:`save`; they may be other runs than those that were saved.
        folder: that :func:`save` was given.
        reader: that reads in place of :func:`reader_of`'s, such as one that counts.
    Raises:
        CheckpointError: a tensor is missing, or has another number of elements.
    """
    there = sizes(folder, "")
    for name, shard in shards.items():
        if there.get(name) != shard.shape.numel():
            raise CheckpointError(
                f"checkpoint {folder} is from another model or optimizer: {name} has {there.get(name, 'no')} elements "
                f"there and {shard.shape.numel()} here",
                "give the --model and --optimizer it was trained with",
            )
    dcp.load(
        {name: ElementRun(shard) for name, shard in shards.items()},
        storage_reader=reader or reader_of(folder),
        planner=_Loading(flatten_state_dict=False),
    )


def sizes(folder: Path, prefix: str) -> dict[str, int]:
    """Number of elements of every stored tensor whose name begins with ``prefix``, by the rest of the name."""
    return {
        name.removeprefix(prefix): about.size.numel()
        for name, about in _stored(folder).items()
        if name.startswith(prefix)
    }


def whole(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with ``prefix``, whole and flat, on the CPU, read by this process alone."""
    runs = {
        name: Shard(about.size, 0, torch.empty(about.size, dtype=about.properties.dtype))
        for name, about in _stored(folder).items()
        if name.startswith(prefix)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a process reads alone is meant
        dcp.load(
            {name: ElementRun(shard) for name, shard in runs.items()},
            no_dist=True,
            storage_reader=reader_of(folder),
            planner=_Loading(flatten_state_dict=False),
        )
    return {name.removeprefix(prefix): shard.data for name, shard in runs.items()}


def _stored(folder: Path) -> dict[str, TensorStorageMetadata]:
    """What the files hold, by name."""
    metadata: Any = reader_of(folder).read_metadata().state_dict_metadata
    return metadata
