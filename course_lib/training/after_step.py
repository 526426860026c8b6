"""Between two steps, as it falls due: watch for divergence, log, evaluate, save, stop."""

from collections.abc import Callable
from pathlib import Path

import torch

from course_lib.config import option
from course_lib.errors import EXIT_RESUME, TrainingDiverged, TrainingInterrupted
from course_lib.launching import interrupts
from course_lib.tracking.base import ends_by_name
from course_lib.training.checkpoints import checkpoint
from course_lib.training.checkpoints.saving import Saver
from course_lib.training.evaluation import larger_is_better
from course_lib.training.session import Session


class AfterStep:
    """Called after each step with its loss; does what the config has due then.

    Args:
        session: that trains.
        saver: of its checkpoints.
        settle: moves the learning rate on for the last step.
    """

    def __init__(self, session: Session, saver: Saver, settle: Callable[[], None]):
        self.session, self.saver, self.settle = session, saver, settle
        self.first_update = 0
        """First step that changed the weights: warm-up begins with a rate of 0."""
        self._pending: list[torch.Tensor] = []
        self._first_bad_step = torch.zeros((), dtype=torch.long, device=session.device)

    def __call__(self, loss: torch.Tensor, gradient_norm: torch.Tensor, vote: int, votes: torch.Tensor) -> None:
        """Watch, log, evaluate, save and stop, as the config has it.

        Args:
            loss: this process's part of the mean loss, a scalar.
            gradient_norm: L2 norm of the whole gradient, the same on every process.
            vote: this process's to stop.
            votes: the sum of all processes', on the device.
        Raises:
            TrainingDiverged: see :meth:`check_finite`.
            TrainingInterrupted: somebody asked to stop; a checkpoint was written first.
        """
        session, run = self.session, self.session.config.run
        state = session.state
        if session.engine.knows_at_once:
            self.settle()
        self._note(loss, gradient_norm)
        logs = self.is_due(run.logging_steps) or state.finished or (run.logging_first_step and state.step == 1)
        passed = state.epochs_done if run.eval_steps is None else state.step
        evaluates = self.is_due(run.eval_steps) and "validation" in session.eval_loaders and passed >= run.eval_delay
        saves = self.is_due(session.config.output.save_steps)
        waits = logs or evaluates or saves or session.device.type == "cpu"
        if waits:  # on a GPU not after every step: the device would run out of work meanwhile
            self.check_finite()
            self.count_seconds()
        session.tell("on_step_end")
        if logs:
            self.log(gradient_norm)
        if evaluates:
            with session.stopwatch.stopped():
                self.validate()
        code = interrupts.exit_code(session.ranks.votes_to_stop(vote, votes, waits))
        if code and not waits:
            self.check_finite()
            self.count_seconds()
        if saves or code:
            with session.stopwatch.stopped():
                self.settle()
                self._collect_losses()
                self.saver.save()
        if code:
            self._stop(code)

    def is_due(self, every: int | None) -> bool:
        """Whether what is done every so many steps (None: each epoch; 0: never) is due after this step."""
        state = self.session.state
        if every is None:
            return state.step_in_epoch == state.steps_per_epoch or state.finished
        return every > 0 and state.step % every == 0

    def check_finite(self) -> None:
        """Wait for the device; raise TrainingDiverged, on all processes, where a step so far was not finite."""
        if step := int(self._first_bad_step):
            self.saver.wait()
            kept = checkpoint.in_order(self.session.output_dir)
            untouched = not kept and (not self.first_update or step <= self.first_update)
            raise diverged(step, self.session.config.optim.learning_rate, kept, untouched)

    def count_seconds(self) -> None:
        """Bring ``state.seconds`` and the phases up to date; the device has to have been waited for."""
        session = self.session
        session.state.seconds += session.stopwatch.lap()
        session.throughput.settle(session.state)
        session.phases.settle()

    def log(self, gradient_norm: torch.Tensor) -> None:
        """Report the steps since the last line."""
        self.settle()
        self._collect_losses()
        session, state = self.session, self.session.state
        state.last_loss = sum(state.window) / len(state.window)
        state.window = []
        session.tell(
            "on_log",
            {
                "step": state.step,
                "epoch": state.epochs_done,
                "loss": state.last_loss,
                "learning_rate": session.learning_rate,
                "gradient_norm": float(gradient_norm),
                **session.throughput.rates(state, session.num_processes),
                "seconds": round(state.seconds, 3),
            },
        )

    def validate(self) -> None:
        """Evaluate on the validation split, and keep the weights where they are the best so far."""
        session, state = self.session, self.session.state
        metrics = session.evaluate("validation", intervals=True)
        ends = metrics.pop("interval95")
        state.evaluated_at = state.step
        value, sign = metrics[session.best_metric], 1 if larger_is_better(session.best_metric) else -1
        if state.best_value is None or sign * value > sign * state.best_value:
            state.best_value, state.best_step, state.evaluations_since_best = value, state.step, 0
            if session.config.run.keep_best:
                self.saver.save_best()
        else:
            state.evaluations_since_best += 1
        session.tell("on_evaluate", metrics)
        session.tell(
            "on_log",
            {"step": state.step, "epoch": state.epochs_done}
            | {f"eval.{name}": value for name, value in (metrics | ends_by_name(ends)).items()},
        )

    def _note(self, loss: torch.Tensor, gradient_norm: torch.Tensor) -> None:
        """Keep a step's loss, and whether it was the first with an update, or the first that was not finite."""
        session, state = self.session, self.session.state
        self._pending.append(loss)
        if session.learning_rate and not self.first_update:
            self.first_update = state.step
        # An overflow under fp16 is no divergence: the scaler skips that step and lowers its scale.
        watched = session.ranks.sum(loss.clone()) if session.precision == "fp16" else gradient_norm
        bad = (self._first_bad_step == 0) & ~torch.isfinite(watched)
        self._first_bad_step = torch.where(bad, state.step, self._first_bad_step)

    def _collect_losses(self) -> None:
        """Bring the losses of the steps since the last log together, into ``state.window``."""
        if self._pending:
            self.session.state.window += self.session.ranks.sum(torch.stack(self._pending)).tolist()
            self._pending.clear()

    def _stop(self, code: int) -> None:
        """Raise TrainingInterrupted, now that a checkpoint has been written."""
        session = self.session
        self.saver.wait()
        if session.is_main and code == EXIT_RESUME:
            interrupts.leave_note(session.output_dir, session.state.step)
        raise TrainingInterrupted(
            f"interrupted at step {session.state.step}; a checkpoint is in {session.output_dir}",
            "go on with --resume_from_checkpoint auto",
            code,
        )


def diverged(step: int, rate: float, kept: list[Path], untouched: bool = False) -> TrainingDiverged:
    """Error for a step that was not finite, with the command that goes on from before it.

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
