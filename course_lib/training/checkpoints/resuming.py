"""Resuming: the contents of a checkpoint, and a session that goes on from one, bit-exact on a CPU."""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from course_lib.config.files import to_yaml
from course_lib.config.resumed import KEEPS_RANK_STATE
from course_lib.errors import CheckpointError
from course_lib.launching.rank_process import is_consequence
from course_lib.system.seeding import rng_state, seed_everything, set_rng_state
from course_lib.training.checkpoints import checkpoint, manifest, safetensors_tree, second_start
from course_lib.training.session import Session
from course_lib.training.state import TrainState
from course_lib.writing import write_text


def write_files(session: Session, folder: Path) -> None:
    """Write this rank's share of a checkpoint except for sharded tensors: random streams everywhere, the rest once."""
    if session.ranks.place.tp == 0:  # ranks that share layers draw alike
        safetensors_tree.save(rng_state(session.device), folder / f"random-{session.ranks.random_stream}.safetensors")
    if own := session.stored.rank_state():
        safetensors_tree.save(own, folder / f"rank-{session.rank}.safetensors")
    with session.stored.agreed():
        if session.is_main:
            session.stored.write(folder)
    if not session.is_main:
        return
    if session.config.run.keep_best and session.state.best_step is not None:
        share(session.best_file, folder / session.best_file.name)
    safetensors_tree.save(
        {"scheduler": session.scheduler.state_dict(), "engine": session.stored.extra_state()},
        folder / "engine.safetensors",
    )
    progress = {
        "state": session.state.as_dict(),
        "run": second_start.identity(session),
        "engine": session.engine.name,
        "ranks": of_ranks(session),
        "changes": session.changes,
    }
    write_text(folder / "state.json", json.dumps(progress, indent=1))
    write_text(folder / "config.yaml", to_yaml(session.config))


def share(source: Path, target: Path) -> None:
    """Give a file that is never written to again a second place; a copy where the disk has no links."""
    beside = target.with_name(f".{target.name}.shared")
    beside.unlink(missing_ok=True)
    try:
        os.link(source, beside)
    except OSError:
        shutil.copyfile(source, beside)
    os.replace(beside, target)
    beside.unlink(missing_ok=True)  # renaming one name of a file to another of its names does nothing


def of_ranks(session: Session) -> dict[str, Any]:
    """Facts that have to be the same for a rank to go on with what it alone had."""
    communication = {
        name: value
        for name, value in dataclasses.asdict(session.config.communication).items()
        if name not in KEEPS_RANK_STATE
    }
    return {
        "num_processes": session.num_processes,
        "bucket_bytes": session.config.parallel.bucket_bytes,
        **communication,
    }


def find(session: Session) -> Path | None:
    """The checkpoint that the config names, of the same contents on every rank; None for a run that begins anew.

    Machines without a shared disk have it each in a folder of their own.

    Raises:
        CheckpointError: it is not whole on every rank, or the ranks see different ones.
    """
    asked = session.config.output.resume_from_checkpoint or ""
    if session.is_main:
        with checkpoint.saving(f"what a killed run left in {session.output_dir}"):
            checkpoint.tidy(session.output_dir)
    session.ranks.barrier()
    folder = Path(asked).expanduser()
    mine: tuple[str, str] | CheckpointError
    try:
        if asked in ("latest", "auto"):
            folder = checkpoint.latest(session.output_dir, session.say)
        else:
            manifest.verify(folder)
        mine = str(folder), manifest.sum_of(folder)
    except CheckpointError as error:
        mine = error
    known = session.ranks.gather_objects(mine)
    failed = [rank for rank, one in enumerate(known) if isinstance(one, CheckpointError)]
    if len(failed) == len(known):
        if asked != "auto":
            raise known[0]
        session.say(f"{known[0].what}: beginning anew")
        return None
    if failed:
        raise CheckpointError(
            f"rank {failed[0]}: {known[failed[0]].what}",
            "bring the whole checkpoint to every machine, or resume from another one",
        )
    for rank, (path, contents) in enumerate(known):
        if contents != known[0][1]:
            raise CheckpointError(
                f"rank 0 would go on from {known[0][0]}, and rank {rank} from {path}, which differs",
                "name one checkpoint that every machine has whole",
            )
    return folder


def resume(session: Session) -> None:
    """Put a session where the checkpoint that its config names stood.

    Raises:
        CheckpointError: no whole checkpoint, or one of another model, data set or global batch.
    """
    folder = find(session)
    if folder is None:
        return
    with _contents_of(folder):
        with_changes = _go_on_from(session, folder)
    session.ranks.barrier()
    session.say(f"resumed from {folder} (step {session.state.step} of {session.state.max_steps}){with_changes}")


@contextlib.contextmanager
def _contents_of(folder: Path) -> Iterator[None]:
    """What a whole checkpoint makes of its reader, who expects what this version writes, as one line."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_consequence(error) or isinstance(error, torch.OutOfMemoryError):
            raise  # another rank's failure, or too little memory: no fault of the checkpoint
        told = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"checkpoint {folder} is whole, but holds something else than this version writes "
            f"({type(error).__name__}: {told})",
            "resume from another checkpoint",
        ) from error


def _count_again(session: Session) -> None:
    """Tokens and FLOPs of the steps done, for a checkpoint of a version that counted rows alone."""
    state, counted = session.state, TrainState()
    for epoch in range(state.epoch + 1):
        batches = session.sampler.global_batches(epoch)
        for step in range(state.step_in_epoch if epoch == state.epoch else len(batches)):
            session.throughput.count(counted, batches[step])
    state.tokens, state.flops = counted.tokens, counted.flops


def _go_on_from(session: Session, folder: Path) -> str:
    """Read a checkpoint; gives what the run was told other than the one that saved it."""
    saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    changes = second_start.compare(session, folder, saved)
    session.stored.check(folder)
    session.stored.read(folder)
    read_own(session, folder, saved.get("ranks"))
    read_engine(session, folder, saved["engine"])
    planned = {"max_steps": session.state.max_steps, "steps_per_epoch": session.state.steps_per_epoch, "stop": False}
    known = {f.name for f in dataclasses.fields(TrainState)}
    session.state = TrainState(**{k: v for k, v in saved["state"].items() if k in known} | planned)
    if "tokens" not in saved["state"]:
        _count_again(session)
    if session.state.stream is not None:
        session.state.epoch, session.state.step_in_epoch = 0, session.state.step
    elif session.state.step_in_epoch == session.state.steps_per_epoch:
        session.state.epoch, session.state.step_in_epoch = session.state.epoch + 1, 0
    second_start.forget_best(session, folder, changes)
    read_best(session, folder)
    random = folder / f"random-{session.ranks.random_stream}.safetensors"
    if random.exists():
        set_rng_state(safetensors_tree.load(random), session.device)
    else:
        # More ranks than saved it: a stream of its own, other than the one this rank began with.
        seed_everything(session.config.run.seed + session.state.step, session.ranks.random_stream)
    return second_start.record(session, saved, changes)


def read_engine(session: Session, folder: Path, saved_by: str) -> None:
    """Put the schedule where it stood, by this run's plan and peak rates, and the engine's own state back."""
    engine, scheduler = safetensors_tree.load(folder / "engine.safetensors"), session.scheduler
    scheduler.last_epoch, scheduler._step_count = (engine["scheduler"][name] for name in ("last_epoch", "_step_count"))
    rates = [
        base * factor(scheduler.last_epoch)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    scheduler._last_lr = rates
    for group, rate in zip(session.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    if saved_by == session.engine.name:
        session.stored.load_extra_state(engine["engine"])


def read_own(session: Session, folder: Path, ranks: dict[str, Any] | None) -> None:
    """Put back what this rank alone had, where as many ranks go on as saved it, with the same communication."""
    kept = folder / f"rank-{session.rank}.safetensors"
    own = of_ranks(session)
    if kept.exists() and ranks and {name: ranks.get(name) for name in own} == own:
        return session.stored.load_rank_state(safetensors_tree.load(kept))
    if any(folder.glob("rank-*.safetensors")):
        session.say(
            f"{folder} was saved by other ranks or with another communication: what each of them alone had is "
            "left out, and all begin with the weights that they agreed on"
        )
    session.stored.load_rank_state({})


def read_best(session: Session, folder: Path) -> None:
    """Put the weights of the best evaluation back, as they were then; without them the search begins anew."""
    state, kept = session.state, folder / session.best_file.name
    if not session.config.run.keep_best or state.best_step is None:
        return
    if not kept.exists():
        session.say(f"{folder} holds no weights of the best evaluation (step {state.best_step}): it does not count")
        state.forget_best()
    elif session.is_main:
        with checkpoint.saving(str(session.best_file)):
            share(kept, session.best_file)
