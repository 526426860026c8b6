"""When a trainer's checkpoints and best weights are written, by which rank, and what is waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from course_lib.training.checkpoints import checkpoint, resuming, safetensors_tree, sharded
from course_lib.training.checkpoints.async_save import BackgroundSaver
from course_lib.training.engines import process_group

if TYPE_CHECKING:
    from course_lib.training.trainer import Trainer


class Saver:
    """Writes what a trainer leaves on disk while it trains. Every method is a collective call.

    Args:
        trainer: whose state it is.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.background: BackgroundSaver | None = None
        """Writes while training goes on; made for the first checkpoint of a run with ``async_save``."""

    def save(self) -> None:
        """Write a checkpoint of this step, and delete those beyond save_total_limit."""
        trainer = self.trainer
        self.put(lambda folder: resuming.write_files(trainer, folder))
        trainer.tell("on_save", trainer.output_dir / checkpoint.name(trainer.state.step))

    def put(self, write_files: Callable[[Path], None]) -> None:
        """Write this step's checkpoint: small files by ``write_files``, and the pieces of what is sharded."""
        trainer, engine = self.trainer, self.trainer.engine
        limit, step = trainer.config.output.save_total_limit, trainer.state.step
        if engine.shards_state and trainer.config.output.async_save:
            self.background = self.background or BackgroundSaver(
                trainer.output_dir, limit, engine.barrier, process_group.patience(trainer.config.guard.watchdog)
            )
            return self.background.start(step, write_files, engine.tensors())

        def write_all(folder: Path) -> None:
            write_files(folder)
            if engine.shards_state:
                engine.barrier()
                sharded.save(engine.tensors(), folder)

        checkpoint.write(trainer.output_dir, step, write_all, is_main=trainer.is_main, barrier=engine.barrier)
        if trainer.is_main:
            checkpoint.prune(trainer.output_dir, limit)

    def save_best(self) -> None:
        """Write the weights beside their place and rename."""
        weights, place = self.trainer.engine.whole_weights(), self.trainer.best_file
        if self.trainer.is_main:
            beside = place.with_name(f".{place.name}.writing")
            with checkpoint.saving(str(place)):
                try:
                    safetensors_tree.save(weights, beside)
                    os.replace(beside, place)
                finally:
                    beside.unlink(missing_ok=True)
        self.trainer.engine.barrier()

    def load_best(self) -> None:
        """Put back the weights of the best evaluation, where they are not those that stand."""
        trainer = self.trainer
        if trainer.config.run.keep_best and trainer.state.best_step not in (None, trainer.state.step):
            # The main rank alone has written it, and machines may share no disk.
            weights = safetensors_tree.load(trainer.best_file) if trainer.is_main else {}
            trainer.engine.load_whole_weights(trainer.engine.from_main(weights))

    def wait(self) -> None:
        """Wait for checkpoints that are still being written."""
        if self.background:
            self.background.wait()

    def let_end(self) -> None:
        """Let what this rank still writes of a checkpoint end, also where other ranks fail."""
        if self.background:
            self.background.let_end()
