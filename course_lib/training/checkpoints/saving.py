"""Saving: when a session's checkpoints and best weights are written, by which rank, and what is waited for."""

import os
from collections.abc import Callable
from pathlib import Path

from course_lib.training.checkpoints import checkpoint, resuming, safetensors_tree, sharded
from course_lib.training.checkpoints.async_save import BackgroundSaver
from course_lib.training.checkpoints.sharded_state import ShardedState
from course_lib.training.engines import process_group
from course_lib.training.session import Session


class Saver:
    """Writes what a session leaves on disk while it trains. Every method is a collective call.

    Args:
        session: whose state it is.
    """

    def __init__(self, session: Session):
        self.session = session
        self.background: BackgroundSaver | None = None
        """Writes while training goes on; made for the first checkpoint of a run with ``async_save``."""

    def save(self) -> None:
        """Write a checkpoint of this step, and delete those beyond save_total_limit."""
        session = self.session
        self.put(lambda folder: resuming.write_files(session, folder))
        session.tell("on_save", session.output_dir / checkpoint.name(session.state.step))

    def put(self, write_files: Callable[[Path], None]) -> None:
        """Write this step's checkpoint: small files by ``write_files``, and the shards of what is sharded."""
        session, stored, barrier = self.session, self.session.stored, self.session.ranks.barrier
        limit, step = session.config.output.save_total_limit, session.state.step
        if isinstance(stored, ShardedState) and session.config.output.async_save:
            self.background = self.background or BackgroundSaver(
                session.output_dir, limit, barrier, process_group.patience(session.config.guard.watchdog)
            )
            return self.background.start(step, write_files, stored.tensors())

        def write_all(folder: Path) -> None:
            write_files(folder)
            if isinstance(stored, ShardedState):
                barrier()
                sharded.save(stored.tensors(), folder)

        checkpoint.write(session.output_dir, step, write_all, is_main=session.is_main, barrier=barrier)
        if session.is_main:
            checkpoint.prune(session.output_dir, limit)

    def save_best(self) -> None:
        """Write the weights beside their place and rename."""
        weights, place = self.session.stored.whole_weights(), self.session.best_file
        if self.session.is_main:
            beside = place.with_name(f".{place.name}.writing")
            with checkpoint.saving(str(place)):
                try:
                    safetensors_tree.save(weights, beside)
                    os.replace(beside, place)
                finally:
                    beside.unlink(missing_ok=True)
        self.session.ranks.barrier()

    def load_best(self) -> None:
        """Put back the weights of the best evaluation, where they are not those that stand."""
        session = self.session
        if session.config.run.keep_best and session.state.best_step not in (None, session.state.step):
            # The main rank alone has written it, and machines may share no disk.
            weights = safetensors_tree.load(session.best_file) if session.is_main else {}
            session.stored.load_whole_weights(session.ranks.from_main(weights))

    def wait(self) -> None:
        """Wait for checkpoints that are still being written."""
        if self.background:
            self.background.wait()

    def let_end(self) -> None:
        """Let what this rank still writes of a checkpoint end, also where other ranks fail."""
        if self.background:
            self.background.let_end()
