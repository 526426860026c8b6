"""Measurements of lesson 06: distributed checkpoints, shards in files, and what other ranks read of them."""

from pathlib import Path

import pandas as pd
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.futures import Future
from torch.optim import AdamW, Optimizer

from course_lib.lessons.fsdp import lab
from course_lib.lessons.fsdp.lab import Build
from course_lib.parallel import blocks
from course_lib.parallel.torch_engines.fsdp import hybrid_mesh
from course_lib.training.checkpoints import sharded


class _Counting:
    """A reader of a checkpoint.

    Attributes:
        bytes: that this rank has read.
    """

    bytes = 0

    def size(self, item: ReadItem) -> int:
        """Bytes that are read for one item of a plan: those of float32 elements."""
        return 4 * item.lengths.numel()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As the reader itself, and count."""
        self.bytes += sum(map(self.size, plan.items))
        return super().read_data(plan, planner)  # type: ignore[misc]


class CountingTensorReader(_Counting, HuggingFaceStorageReader):
    """The reader of the files that the course's own checkpoints consist of."""


class CountingReader(_Counting, FileSystemReader):
    """torch's reader of the files that ``checkpoint.save`` writes; a shard is read whole, whatever is needed of it."""

    def size(self, item: ReadItem) -> int:
        return self.storage_data[item.storage_index].length


def columns(parameter: nn.Parameter) -> Shard | None:
    """Placement for ``fully_shard``: a matrix is cut by its columns, a vector as it does by itself."""
    return Shard(1) if parameter.ndim == 2 else None


def on_a_mesh(build: Build) -> tuple[nn.Module, Optimizer]:
    """A model in copies of which each is cut by columns over 2 ranks, and its optimizer."""
    device = Accelerator().device
    model = build().to(device)
    mesh = hybrid_mesh(device.type, dist.get_world_size() // 2, 2)
    for block in blocks.blocks(model).values():
        fully_shard(block, mesh=mesh, shard_placement_fn=columns)
    fully_shard(model, mesh=mesh, shard_placement_fn=columns, reshard_after_forward=False)
    return model, AdamW(model.parameters(), lr=3e-3, eps=1e-5)


def by_rows(build: Build) -> tuple[nn.Module, Optimizer]:
    """A model cut by rows over all ranks, as ``fully_shard`` does by itself, and its optimizer."""
    engine = lab.engine_of("torch", build)
    return engine.module, engine.optimizer


def whole(build: Build) -> tuple[nn.Module, Optimizer]:
    """A model of plain tensors, and its optimizer."""
    model = build().to(Accelerator().device)
    return model, AdamW(model.parameters(), lr=3e-3, eps=1e-5)


def next_losses(model: nn.Module, optimizer: Optimizer, step: int) -> list[float]:
    """The losses of two steps more: the second one needs the optimizer's moments, too."""
    return lab.train_steps(model, optimizer, 2, step)


def contents(folder: str | Path) -> pd.DataFrame:
    """The files that ``checkpoint.save`` has written: name and kB."""
    files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    return pd.DataFrame({"file": [path.name for path in files], "kB": [path.stat().st_size / 1e3 for path in files]})


def shards_of(folder: str | Path, name: str) -> pd.DataFrame:
    """Places of the shards of one tensor, in it and in the files, by the folder's index."""
    index = FileSystemReader(folder).read_metadata()
    rows = []
    about = index.state_dict_metadata[name]
    assert isinstance(about, TensorStorageMetadata)
    for chunk in about.chunks:
        stored = index.storage_data[MetadataIndex(name, chunk.offsets)]
        place, shape = str(tuple(chunk.offsets)), str(tuple(chunk.sizes))
        rows.append((place, shape, stored.relative_path, stored.offset, stored.length))
    return pd.DataFrame(rows, columns=["begins at", "shape", "in file", "from byte", "bytes"])


def stored_bytes(folder: str | Path) -> int:
    """All bytes of shards that the files hold, by the folder's index."""
    return sum(stored.length for stored in FileSystemReader(folder).read_metadata().storage_data.values())


def boxes_read(saved: int, loading: int) -> int:
    """Of equal boxes, one per rank that has saved, the most that overlap with what one of the loading ranks keeps."""
    return max(-(-saved * (rank + 1) // loading) - saved * rank // loading for rank in range(loading))


def read_ours(build: Build, folder: Path, step: int) -> tuple[float, float, int]:
    """A step's loss before and after reading the course's own checkpoint, and the bytes that this rank has read."""
    engine = lab.engine_of("scratch", build)
    reader = CountingTensorReader(str(folder / sharded.SHARDS))
    before = lab.averaged(lab.batch_loss(engine, step))
    sharded.load(engine.shards(), folder, reader)
    engine.refresh()
    return before, lab.averaged(lab.batch_loss(engine, step)), reader.bytes
