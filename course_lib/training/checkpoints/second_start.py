"""Differences between a resumed run's options and its checkpoint's: refused, or reported and recorded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from course_lib.config import Config, flatten
from course_lib.config.files import read_saved
from course_lib.config.resumed import BATCH, JUDGING, LOOKED, Change, among, changed, refused, shown, told
from course_lib.errors import CheckpointError
from course_lib.modeling.loading import ATTENTION_DROPOUT
from course_lib.training.checkpoints.run_folder import CONFIG
from course_lib.training.session import Session

NO_ARCHITECTURE = (
    "_name_or_path",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "output_router_logits",
    *ATTENTION_DROPOUT,
)
"""What a model's config holds besides what its forward pass is, and what an option of ours says."""
LAYOUT = (
    "num_processes",
    "pipeline_parallel_size",
    "data_parallel_size",
    "tensor_parallel_size",
    "context_parallel_size",
    "training_type",
)
"""Options of the ranks' layout, on which it depends how many rows batch_size makes."""
ANEW = "or begin anew in another --output_dir"


def architecture(config: PreTrainedConfig) -> dict[str, Any]:
    """A model's config as plain values, to compare."""
    held = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in held.items() if name not in NO_ARCHITECTURE}


def identity(session: Session) -> dict[str, Any]:
    """Facts that have to be the same for a data position to mean the same rows, and the weights the same model."""
    return {
        "data": session.data.fingerprint,
        "global_batch_size": session.sampler.global_batch_size,
        "architecture": session.architecture,
        "base": session.base,
    }


def compare(session: Session, folder: Path, saved: Mapping[str, Any]) -> dict[str, Change]:
    """The options whose values are others than those that the checkpoint was saved under.

    Args:
        session: has been made for the new config.
        folder: the checkpoint.
        saved: its ``state.json``.
    Raises:
        CheckpointError: the run cannot go on with some of them.
    """
    before, now = read_saved(folder / CONFIG), flatten(session.config)
    if ranks := saved.get("ranks"):  # older versions did not count them
        before["num_processes"], now["num_processes"] = ranks["num_processes"], session.num_processes
    changes = changed(before, now)
    run, own = saved["run"], identity(session)
    same_rows, same_batch = (run[name] == own[name] for name in ("data", "global_batch_size"))
    rows = Change(run["global_batch_size"], own["global_batch_size"])
    others = refused(changes, same_rows=same_rows, same_batch=same_batch)
    if others or not same_batch:
        cure = _cure(session.config, others, rows)
        given = " ".join(f"--{name} {value}" for name, value in cure.items())
        raise _cannot(
            others if same_batch else others | {"global_batch_size": rows},
            folder,
            f"give {given}" if given else f"keep {rows.was} rows per step",
            cure,
        )
    if not same_rows:
        raise CheckpointError(
            f"the tokens of {session.config.data.dataset} are not those that checkpoint {folder} was "
            "trained on, though every option is the same",
            f"put the data back as they were, {ANEW}",
        )
    for name, value in run.get("architecture", {}).items():
        if value != (here := own["architecture"].get(name, value)):
            raise _cannot({f"a model of {name}": Change(value, here)}, folder, "give the --model it was trained from")
    if run.get("base") != own["base"]:
        raise CheckpointError(
            f"checkpoint {folder} holds adapters for other frozen weights than those of {session.config.model.model}",
            f"give the --model it was trained from, {ANEW}",
        )
    if (step := saved["state"]["step"]) > (end := session.state.max_steps):
        raise CheckpointError(
            f"checkpoint {folder} is of step {step}, and this run ends after {end}",
            "give a larger --max_steps or --num_epochs, or go on from an earlier checkpoint",
        )
    return changes


def _cure(config: Config, changes: Mapping[str, Change], rows: Change) -> dict[str, str]:
    """The options under which a run would go on; none where it takes more than options.

    Args:
        config: the run's.
        changes: with which it cannot go on.
        rows: of a step.
    """
    made_by = among(changes, BATCH)
    cure = {name: shown(change.was) for name, change in changes.items()}
    if rows.was == rows.now or (made_by and not any(name in LAYOUT for name in made_by)):
        return cure
    # Ranks are not an option's to bring back: they may make as many rows in another way.
    cure = {name: value for name, value in cure.items() if name not in made_by}
    if config.run.training_type == "pipeline" or config.run.split_batches or config.run.loss_weighting != "token":
        return cure  # they do not go together with global_batch_size
    alone = {"gradient_accumulation_steps": "1"} if config.run.gradient_accumulation_steps > 1 else {}
    return cure | {"global_batch_size": shown(rows.was)} | alone


def _cannot(
    changes: Mapping[str, Change], folder: Path, instead: str, cure: Mapping[str, str] | None = None
) -> CheckpointError:
    now = ", ".join(shown(change.now) for change in changes.values())
    return CheckpointError(
        f"checkpoint {folder} was saved with {_were(changes)}, and this run has {now}", f"{instead}, {ANEW}", cure=cure
    )


def record(session: Session, saved: Mapping[str, Any], changes: Mapping[str, Change]) -> str:
    """Carry the run's history on; gives the end of the line that says that the run was resumed.

    Args:
        session: stands where the checkpoint stood.
        saved: the checkpoint's ``state.json``; older versions kept no history.
        changes: see :func:`compare`.
    """
    session.changes = list(saved.get("changes", []))
    if bearing := {name: list(change) for name, change in changes.items() if name not in LOOKED.fields}:
        session.changes.append({"step": session.state.step, "changed": bearing})
    weights = "; the weights are the checkpoint's, not those of that model" if "model" in changes else ""
    return f" with {told(changes)}{weights}" if changes else ""


def forget_best(session: Session, folder: Path, changes: Mapping[str, Change]) -> None:
    """Begin the search for the best evaluation anew where the one that was kept was judged otherwise."""
    state, judged = session.state, among(changes, JUDGING)
    if judged and state.best_step is not None:
        session.say(
            f"{folder}: its best evaluation (step {state.best_step}) was judged with {_were(judged)}: it does not count"
        )
        state.forget_best()


def _were(changes: Mapping[str, Change]) -> str:
    return ", ".join(f"{name} {shown(change.was)}" for name, change in changes.items())


def history(changes: list[dict[str, Any]]) -> list[str]:
    """A run's history, a line for each time that it went on with other values."""
    return [
        f"From step {part['step'] + 1}: "
        + told({name: Change(*values) for name, values in part["changed"].items()}, "before:")
        for part in changes
    ]
