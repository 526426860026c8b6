"""What a checkpoint holds, and how a trainer goes on from one, to the bit on a CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.config_files import to_yaml, write_text
from course_lib.errors import CheckpointError
from course_lib.runtime.seeding import rng_state, seed_everything, set_rng_state
from course_lib.training import checkpoint, tensorfile
from course_lib.training.state import TrainState

if TYPE_CHECKING:
    from course_lib.training.frame import TrainerFrame


def write_files(trainer: TrainerFrame, folder: Path) -> None:
    """Write this rank's share of a checkpoint but for sharded tensors: random streams everywhere, the rest once."""
    tensorfile.save(rng_state(), folder / f"random-{trainer.rank}.safetensors")
    if not trainer.is_main:
        return
    trainer.write_whole_tensors(folder)
    tensorfile.save({"scheduler": trainer.scheduler.state_dict(), "engine": trainer.engine_state()},
                    folder / "engine.safetensors")
    progress = {"state": trainer.state.as_dict(), "run": identity(trainer), "engine": trainer.engine_name}
    write_text(folder / "state.json", json.dumps(progress, indent=1))
    write_text(folder / "config.yaml", to_yaml(trainer.config))


def identity(trainer: TrainerFrame) -> dict[str, Any]:
    """What has to be the same for a data position to mean the same rows."""
    return {"data": trainer.data.fingerprint, "global_batch_size": trainer.sampler.global_batch_size,
            "seed": trainer.config.run.seed, "group_by_length": trainer.config.data.group_by_length,
            "task": trainer.task}


def resume(trainer: TrainerFrame) -> None:
    """Put a trainer where the checkpoint that its config names stood.

    Raises:
        CheckpointError: no whole checkpoint, or one of another model, data set or global batch.
    """
    asked = trainer.config.output.resume_from_checkpoint or ""
    if asked == "latest":
        folder = checkpoint.latest(trainer.output_dir, trainer.say)
    else:
        folder = Path(asked).expanduser()
        checkpoint.verify(folder)
    trainer.barrier()
    saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    trainer.check_tensors(folder)
    for name, value in identity(trainer).items():
        if saved["run"][name] != value:
            raise CheckpointError(f"checkpoint {folder} was saved with {name} {saved['run'][name]}, "
                                  f"and this run has {value}",
                                  "make them equal, so that its data position means the same rows")
    trainer.read_tensors(folder)
    engine = tensorfile.load(folder / "engine.safetensors")
    trainer.scheduler.load_state_dict(engine["scheduler"])
    # By this run's plan, which may be longer than the one that was saved.
    rates = [base * factor(trainer.scheduler.last_epoch)
             for base, factor in zip(trainer.scheduler.base_lrs, trainer.scheduler.lr_lambdas, strict=True)]
    trainer.scheduler._last_lr = rates
    for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    if saved["engine"] == trainer.engine_name:
        trainer.load_engine_state(engine["engine"])
    planned = {"max_steps": trainer.state.max_steps, "steps_per_epoch": trainer.state.steps_per_epoch, "stop": False}
    known = {f.name for f in dataclasses.fields(TrainState)}
    trainer.state = TrainState(**{k: v for k, v in saved["state"].items() if k in known} | planned)
    if trainer.state.step_in_epoch == trainer.state.steps_per_epoch:
        trainer.state.epoch, trainer.state.step_in_epoch = trainer.state.epoch + 1, 0
    random = folder / f"random-{trainer.rank}.safetensors"
    if random.exists():
        set_rng_state(tensorfile.load(random))
    else:
        # More ranks than saved it: a stream of its own, other than the one this rank began with.
        seed_everything(trainer.config.run.seed + trainer.state.step, trainer.rank)
    trainer.say(f"resumed from {folder} (step {trainer.state.step} of {trainer.state.max_steps})")
