"""Checkpoints written while training goes on."""

from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from course_lib.parallel.sharding import Shard
from course_lib.training.checkpoints import checkpoint, sharded


class BackgroundSaver:
    """Copies a step's shards to the host's memory, then writes them on a thread, one checkpoint at a time.

    The thread's collectives have a group of their own, so that they never meet those of training.
    Every rank makes one, and calls its methods at the same steps.

    Args:
        run_dir: the run's folder.
        keep: checkpoints to keep.
        barrier: waits for all ranks.
        patience: how long a rank's thread waits for the others' files; by default torch's 30 minutes.
    """

    def __init__(self, run_dir: Path, keep: int | None, barrier: Callable[[], None], patience: timedelta | None = None):
        self.run_dir, self.keep, self.barrier = run_dir, keep, barrier
        self.is_main = dist.get_rank() == 0
        self.group = dist.new_group(backend="gloo", timeout=patience)
        self.thread = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: futures.Future[int] | None = None

    def start(self, step: int, write_files: Callable[[Path], None], shards: Mapping[str, Shard]) -> None:
        """Write the small files, copy the shards, and go on while they are written."""
        self.wait()
        with checkpoint.saving(str(self.run_dir / checkpoint.name(step))):
            try:
                if self.is_main:
                    checkpoint.begin(self.run_dir, step)
                self.barrier()
                write_files(checkpoint.open_part(self.run_dir, step))
            except BaseException:
                self._abandon(step)
                raise
        copies = {name: replace(shard, data=shard.data.detach().to("cpu", copy=True)) for name, shard in shards.items()}
        self.writing = self.thread.submit(self._write, step, copies)

    def _write(self, step: int, copies: dict[str, Shard]) -> int:
        folder = checkpoint.beside(self.run_dir, step)
        with checkpoint.saving(str(self.run_dir / checkpoint.name(step))):
            try:
                sharded.save(copies, folder, self.group)  # ends on the main rank when every rank has written
                if self.is_main:
                    checkpoint.finish(self.run_dir, step)
                    checkpoint.prune(self.run_dir, self.keep)
            except BaseException:
                self._abandon(step)
                raise
        return step

    def _abandon(self, step: int) -> None:
        if self.is_main:
            checkpoint.abandon(self.run_dir, step)

    def wait(self) -> None:
        """Wait until the checkpoint begun last stands on every rank.

        Raises:
            CheckpointError: it could not be written.
        """
        if self.writing is not None:
            writing, self.writing = self.writing, None
            step = writing.result()
            self.barrier()
            checkpoint.keep_part(self.run_dir, step)

    def let_end(self) -> None:
        """Let this rank's share of the checkpoint begun last come to its end, also where other ranks fail."""
        if self.writing is not None:
            futures.wait([self.writing])
