"""Batches of rows: the same global batches for any number of processes.

The order of an epoch depends on the seed and the epoch alone. It is cut into global batches,
one per optimizer step, and each global batch is dealt out to accumulation steps and processes.
"""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from course_lib.data.cache import column
from course_lib.data.collating import Batch
from course_lib.data.ordering import PART, EpochBatches, lengths_of
from course_lib.data.processing import Collator
from course_lib.data.streaming import TextStream
from course_lib.launching.cores import usable_cores
from course_lib.system.machine import SHARED_MEMORY, shared_memory
from course_lib.system.seeding import seed_worker

MOST_WORKERS = 4
"""Of a rank's loader, by default."""


class RowKey(NamedTuple):
    """One row of one epoch; a filler row evens out a micro-batch and has no targets."""

    epoch: int
    row: int
    is_filler: bool = False


def layout(global_batch_size: int, num_processes: int, largest: int) -> tuple[int, int]:
    """Even layout of a global batch: rows per process in a micro-batch, and micro-batches per process.

    The fewest micro-batches that keep to ``largest``, and then the fewest rows: with 32 rows on 3 processes and at
    most 8 in a micro-batch, that is 2 micro-batches of 6, of whose 36 places 4 are filler.

    Args:
        global_batch_size: rows in one optimizer step.
        num_processes: processes that share them; any number.
        largest: rows per process that a micro-batch may have at most.
    """
    accumulation = -(-global_batch_size // (num_processes * largest))
    return -(-global_batch_size // (num_processes * accumulation)), accumulation


class GlobalBatchSampler(Sampler[list[RowKey]]):
    """Micro-batches in the order in which Accelerate deals them to processes.

    For each global batch, for each accumulation step, one micro-batch per process: process r of N
    takes every N-th, starting at r. Iterated by one process, it is the plain loop.

    Args:
        lengths: tokens of each row; an Arrow column is read as it is needed.
        batch_size: rows per process in one micro-batch.
        num_processes: processes that share a global batch.
        accumulation: micro-batches per process in one global batch.
        seed: decides the order, together with the epoch, and which tokens are masked.
        group_by_length: sort windows of the shuffled order by length, then shuffle the batches.
        global_batch_size: rows in one optimizer step; default: all that the three above hold. Where it is
            less, filler makes up for the rest.
        order_seed: decides the order in the seed's place.
        drop_last_batch: leave out the last rows of an epoch where they fill no global batch.

    Attributes:
        batches: row numbers of each global batch of the epoch chosen, see :class:`EpochBatches`.
    """

    def __init__(
        self,
        lengths: Sequence[int] | pa.ChunkedArray,
        batch_size: int,
        num_processes: int = 1,
        accumulation: int = 1,
        seed: int = 0,
        group_by_length: bool = True,
        global_batch_size: int | None = None,
        *,
        order_seed: int | None = None,
        drop_last_batch: bool = False,
    ):
        self.lengths = lengths
        self.batch_size = batch_size
        self.num_processes = num_processes
        self.accumulation = accumulation
        self.seed = seed
        self.order_seed = seed if order_seed is None else order_seed
        self.group_by_length = group_by_length
        self.places = batch_size * num_processes * accumulation
        self.global_batch_size = global_batch_size or self.places
        self.drop_last = False  # Accelerate asks
        self.drop_last_batch = drop_last_batch
        self.start_at(0)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch; the last may have fewer rows."""
        rows, size = len(self.lengths), self.global_batch_size
        return rows // size if self.drop_last_batch else -(-rows // size)

    def start_at(self, epoch: int, first_step: int = 0) -> None:
        """Choose the epoch, and the global batch to begin at (to resume in its middle).

        Not named set_epoch: on one process Accelerate's loader would call that with a count of its own.
        """
        self.epoch, self.first_step = epoch, first_step
        self.batches = self.global_batches(epoch)

    def global_batches(self, epoch: int) -> Sequence[np.ndarray]:
        """Row numbers of each global batch, longest row first where grouped by length."""
        return EpochBatches(
            self.lengths,
            self.global_batch_size,
            [self.order_seed, epoch],
            self.group_by_length,
            drop_last=self.drop_last_batch,
        )

    def deal(self, batch: np.ndarray, epoch: int) -> Iterator[list[RowKey]]:
        """Micro-batches of one global batch, in order of accumulation step, then process."""
        per_step = self.batch_size * self.num_processes
        keys = [RowKey(epoch, int(row)) for row in batch]
        if missing := self.places - len(keys):
            shortest = min(keys, key=lambda key: lengths_of(self.lengths, key.row, key.row + 1)[0])
            keys += [shortest._replace(is_filler=True)] * missing
        for start in range(0, len(keys), per_step):
            # Every N-th row rather than a block: processes get rows of like lengths, and fillers evenly.
            for process in range(self.num_processes):
                yield keys[start + process : start + per_step : self.num_processes]

    def __iter__(self) -> Iterator[list[RowKey]]:
        for step in range(self.first_step, len(self.batches)):
            yield from self.deal(self.batches[step], self.epoch)

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.accumulation * self.num_processes


class SequentialKeys(Sampler[RowKey]):
    """Every row once, longest first, so that evaluation batches need little padding.

    Args:
        lengths: tokens of each row; an Arrow column is read as it is needed.
        part: rows that are sorted together; of more, one part follows another.
    """

    def __init__(self, lengths: Sequence[int] | pa.ChunkedArray, part: int = PART):
        self.lengths, self.part = lengths, part

    def parts(self) -> Iterator[np.ndarray]:
        """Row numbers in order, a part at a time."""
        for start in range(0, len(self.lengths), self.part):
            here = lengths_of(self.lengths, start, min(start + self.part, len(self.lengths)))
            yield start + np.argsort(-here, kind="stable")

    def __iter__(self) -> Iterator[RowKey]:
        return (RowKey(0, int(row)) for rows in self.parts() for row in rows)

    def __len__(self) -> int:
        return len(self.lengths)


class Rows(Dataset[dict[str, Any]]):
    """Rows of a processed data set, fetched by :class:`RowKey`, with what the collator has to know.

    Args:
        dataset: the rows.
        seed: of the run.
        rank: whose worker processes get a random stream each for every epoch; None leaves theirs alone.
    """

    def __init__(self, dataset: datasets.Dataset, seed: int, rank: int | None = None):
        self.dataset, self.seed, self.rank = dataset, seed, rank
        self.seeded: int | None = None  # the epoch that this worker's streams were seeded for

    def __getitem__(self, key: RowKey) -> dict[str, Any]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[RowKey]) -> list[dict[str, Any]]:
        worker, epoch = get_worker_info(), keys[0].epoch
        if worker is not None and self.rank is not None and self.seeded != epoch:
            seed_worker(self.seed, self.rank, worker.id, epoch)
            self.seeded = epoch
        columns = self.dataset[[key.row for key in keys]]
        return [
            {name: values[i] for name, values in columns.items()}
            | {"ignore": key.is_filler, "mask_seed": (self.seed, key.epoch, key.row)}
            for i, key in enumerate(keys)
        ]

    def __len__(self) -> int:
        return len(self.dataset)


def workers(chosen: int | None, device_type: str, ranks: int) -> int:
    """Number of worker processes of a rank's loader: as chosen, or else what suits the device.

    A rank that drives a GPU does no arithmetic, and what it spends on collating the GPU waits for: it leaves that to up
    to four workers, and keeps one core to itself. A rank on a CPU computes on its cores, and workers would take them
    away. A worker hands its batches over in shared memory, of which a container may have too little; then there are
    none (``course doctor`` says so).

    Args:
        chosen: the option ``num_workers``.
        device_type: `cpu`, `cuda` or `mps`.
        ranks: of the run on this machine, which share its cores.
    """
    if chosen is not None:
        return chosen
    if device_type != "cuda" or shared_memory() < SHARED_MEMORY:
        return 0
    return max(0, min(MOST_WORKERS, usable_cores() // ranks - 1))


def training_loader(
    dataset: datasets.Dataset,
    sampler: GlobalBatchSampler,
    collator: Collator,
    num_workers: int = 0,
    pin_memory: bool = False,
    rank: int = 0,
) -> DataLoader:
    """A loader of micro-batches in the sampler's order; the rank decides its workers' random streams.

    Workers stay from one epoch to the next, and hold two batches each ready. They may be forked from a process that
    uses CUDA: what they run, :class:`Rows` and the collator, is Arrow, NumPy and tensors on the CPU.
    """
    return DataLoader(
        Rows(dataset, sampler.seed, rank),
        batch_sampler=sampler,
        collate_fn=collator,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=_own_generator(),
        worker_init_fn=expect_readers_end,
        persistent_workers=num_workers > 0,
    )


class StreamSteps:
    """Stand-in for a :class:`GlobalBatchSampler` where a stream deals its rows itself.

    Args:
        stream: of this rank; goes on without an end.
        steps: optimizer steps of the run, which has no epochs of its own.
    """

    lengths: Sequence[int] = ()
    batches: Sequence[np.ndarray] = ()

    def __init__(self, stream: TextStream, steps: int):
        self.stream, self.steps_per_epoch = stream, steps
        self.accumulation, self.global_batch_size = stream.accumulation, stream.global_batch_size

    def counts(self, micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """Of this rank's rows of a step without filler: rows, tokens, sum of squared lengths; int64 [3]."""
        lengths = [length for batch in micro_batches if isinstance(batch, Batch) for length in batch.lengths]
        return torch.tensor([len(lengths), sum(lengths), sum(length * length for length in lengths)])

    def place_after(self, micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, int]:
        """The stream's state after a step."""
        last = micro_batches[-1]
        assert isinstance(last, Batch) and last.place is not None, "a loader has lost what the batch knew"
        return dict(last.place)

    def global_batches(self, epoch: int) -> Sequence[np.ndarray]:
        """None: nobody knows them."""
        return ()


def stream_loader(stream: TextStream, collator: Collator, num_workers: int = 0, pin_memory: bool = False) -> DataLoader:
    """A loader of a stream's micro-batches; its workers end with each iteration, and begin where the stream stands."""
    return DataLoader(
        stream,
        batch_size=stream.batch_size,
        collate_fn=collator,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=_own_generator(),
        worker_init_fn=expect_readers_end,
    )


def evaluation_loader(
    dataset: datasets.Dataset,
    batch_size: int,
    collator: Collator,
    seed: int,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader:
    """A loader that gives every row once; masks for masked language modelling are those of epoch 0.

    Its workers end with each evaluation: a run has a loader for every split, and seldom uses them.
    """
    return DataLoader(
        Rows(dataset, seed),
        batch_size=batch_size,
        sampler=SequentialKeys(column(dataset, "length")),
        collate_fn=collator,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=_own_generator(),
        worker_init_fn=expect_readers_end,
    )


def end_workers(loader: DataLoader) -> None:
    """End the processes that a training loader keeps from one epoch to the next; another iteration starts new ones.

    Left alone they end when the loader is collected, which in a notebook may be never.
    """
    if isinstance(loader._iterator, _MultiProcessingDataLoaderIter):  # as Lightning does it; there is no public way
        loader._iterator._shutdown_workers()
    loader._iterator = None


def expect_readers_end(worker_id: int) -> None:
    """A worker process's first act: its rank may be killed while it fetches a tensor, and the worker stays silent.

    The thread of :mod:`multiprocessing.resource_sharer` that hands tensors over would print the lost connection with a
    traceback, as if the worker had failed. Who reads is this rank alone: if it lives, it meets the lost connection
    itself.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        handing_over = threading.current_thread() is not threading.main_thread()
        if not (handing_over and isinstance(error, (ConnectionError, EOFError))):
            before(kind, error, trace)

    sys.excepthook = hook


def _own_generator() -> torch.Generator:
    """A loader draws a seed for its workers whenever it is iterated; not from the stream that dropout uses."""
    return torch.Generator()
