"""What a trainer does between two steps, as it falls due: watch for divergence, log, evaluate, save, stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from course_lib.config import option
from course_lib.errors import EXIT_RESUME, TrainingDiverged, TrainingInterrupted
from course_lib.launching import interrupts
from course_lib.tracking.base import ends_by_name
from course_lib.training.checkpoints import checkpoint
from course_lib.training.evaluation import larger_is_better

if TYPE_CHECKING:
    from course_lib.training.trainer import Trainer


def do_what_is_due(trainer: Trainer, loss: torch.Tensor, gradient_norm: torch.Tensor) -> None:
    """Watch, log, evaluate, save and stop, as the config has it.

    Args:
        trainer: has made a step.
        loss: this process's part of the mean loss, a scalar.
        gradient_norm: L2 norm of the whole gradient, the same on every process.
    Raises:
        TrainingDiverged: see :func:`check_finite`.
        TrainingInterrupted: somebody asked to stop; a checkpoint was written first.
    """
    state, config, engine = trainer.state, trainer.config, trainer.engine
    trainer.pending.append(loss)
    if trainer.learning_rate and not trainer.first_update:
        trainer.first_update = state.step
    # An overflow under fp16 is no divergence: the scaler skips that step and lowers its scale.
    watched = engine.sum(loss.clone()) if trainer.precision == "fp16" else gradient_norm
    bad = (trainer.first_bad_step == 0) & ~torch.isfinite(watched)
    trainer.first_bad_step = torch.where(bad, state.step, trainer.first_bad_step)
    logs = (
        is_due(trainer, config.run.logging_steps)
        or state.finished
        or (config.run.logging_first_step and state.step == 1)
    )
    passed = state.epochs_done if config.run.eval_steps is None else state.step
    evaluates = (
        is_due(trainer, config.run.eval_steps)
        and "validation" in trainer.eval_loaders
        and (passed >= config.run.eval_delay)
    )
    saves = is_due(trainer, config.output.save_steps)
    waits = logs or evaluates or saves or trainer.device.type == "cpu"
    if waits:  # on a GPU not after every step: the device would run out of work meanwhile
        check_finite(trainer)
        count_seconds(trainer)
    trainer.tell("on_step_end")
    if logs:
        log(trainer, gradient_norm)
    if evaluates:
        with trainer.stopwatch.stopped():
            validate(trainer)
    code = interrupts.exit_code(engine.votes_to_stop(trainer.stop_request.vote, trainer.votes, waits))
    if code and not waits:
        check_finite(trainer)
        count_seconds(trainer)
    if saves or code:
        with trainer.stopwatch.stopped():
            trainer.settle()
            collect_losses(trainer)
            trainer.saver.save()
    if code:
        trainer.saver.wait()
        if trainer.is_main and code == EXIT_RESUME:
            interrupts.leave_note(trainer.output_dir, state.step)
        raise TrainingInterrupted(
            f"interrupted at step {state.step}; a checkpoint is in {trainer.output_dir}",
            "go on with --resume_from_checkpoint auto",
            code,
        )


def is_due(trainer: Trainer, every: int | None) -> bool:
    """Whether what is done every so many steps (None: each epoch; 0: never) is due after this step."""
    state = trainer.state
    if every is None:
        return state.step_in_epoch == state.steps_per_epoch or state.finished
    return every > 0 and state.step % every == 0


def check_finite(trainer: Trainer) -> None:
    """Wait for the device; raise TrainingDiverged, on all processes, where a step so far was not finite."""
    if step := int(trainer.first_bad_step):
        trainer.saver.wait()
        kept = checkpoint.in_order(trainer.output_dir)
        untouched = not kept and (not trainer.first_update or step <= trainer.first_update)
        raise diverged(step, trainer.config.optim.learning_rate, kept, untouched)


def diverged(step: int, rate: float, kept: list[Path], untouched: bool = False) -> TrainingDiverged:
    """What to say of a step that was not finite, and the command that goes on from before it.

    Loss and gradient of a step come from the weights before it: those of the checkpoint right before it give the same
    again at any learning rate, and those of an earlier one come by other steps to other weights.

    Args:
        step: that was not finite.
        rate: the run's peak learning rate.
        kept: checkpoints of the run, oldest first.
        untouched: whether no update has changed the weights before it: it is the first step, or all rates were 0.
    """
    if untouched:
        return TrainingDiverged(
            f"the loss or its gradient is not a finite number at step {step}; no update has changed the weights before "
            "it, so no learning rate is the cause",
            "look at the rows of that step, or try --mixed_precision no, --attention eager or --cpu_kernels torch",
        )
    before = [folder for folder in kept if checkpoint.step_of(folder) < step]
    good = [folder for folder in before if checkpoint.step_of(folder) < step - 1]
    what = f"the loss or its gradient is not a finite number at step {step}; "
    what += f"the last good checkpoint is {(good or before)[-1]}" if before else "there is no checkpoint before it"
    look = "look at the data of that step"
    lower = f"{rate / 10 if rate <= 1 else option('learning_rate').default:g}"
    if good:
        return TrainingDiverged(
            what,
            f"go on from it with a lower --learning_rate, or clip with --max_grad_norm; or {look}",
            cure={"learning_rate": lower, "overwrite_output_dir": None, "resume_from_checkpoint": str(good[-1])},
        )
    return TrainingDiverged(
        what + (", whose weights give the same again" if before else ""),
        f"lower --learning_rate, or clip with --max_grad_norm, and begin anew; or {look}",
        cure={"learning_rate": lower, "overwrite_output_dir": "true", "resume_from_checkpoint": None},
    )


def count_seconds(trainer: Trainer) -> None:
    """Bring ``state.seconds`` and the phases up to date; the device has to have been waited for."""
    trainer.state.seconds += trainer.stopwatch.lap()
    trainer.throughput.settle(trainer.state)
    trainer.phases.settle()


def collect_losses(trainer: Trainer) -> None:
    """Bring the losses of the steps since the last log together, into ``state.window``."""
    if trainer.pending:
        trainer.state.window += trainer.engine.sum(torch.stack(trainer.pending)).tolist()
        trainer.pending.clear()


def log(trainer: Trainer, gradient_norm: torch.Tensor) -> None:
    """Report the steps since the last line."""
    trainer.settle()
    collect_losses(trainer)
    state = trainer.state
    state.last_loss = sum(state.window) / len(state.window)
    state.window = []
    trainer.tell(
        "on_log",
        {
            "step": state.step,
            "epoch": state.epochs_done,
            "loss": state.last_loss,
            "learning_rate": trainer.learning_rate,
            "gradient_norm": float(gradient_norm),
            **trainer.throughput.rates(state, trainer.num_processes),
            "seconds": round(state.seconds, 3),
        },
    )


def validate(trainer: Trainer) -> None:
    """Evaluate on the validation split, and keep the weights where they are the best so far."""
    metrics, state = trainer.evaluate("validation", intervals=True), trainer.state
    ends = metrics.pop("interval95")
    state.evaluated_at = state.step
    value, sign = metrics[trainer.best_metric], 1 if larger_is_better(trainer.best_metric) else -1
    if state.best_value is None or sign * value > sign * state.best_value:
        state.best_value, state.best_step, state.evaluations_since_best = value, state.step, 0
        if trainer.config.run.keep_best:
            trainer.saver.save_best()
    else:
        state.evaluations_since_best += 1
    trainer.tell("on_evaluate", metrics)
    trainer.tell(
        "on_log",
        {"step": state.step, "epoch": state.epochs_done}
        | {f"eval.{name}": value for name, value in (metrics | ends_by_name(ends)).items()},
    )
