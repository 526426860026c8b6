"""Progress of a run as plain numbers, saved in every checkpoint."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Progress of a run; the same on every rank.

    Attributes:
        step: optimizer steps done.
        epoch: epoch that the next step belongs to.
        step_in_epoch: optimizer steps done in that epoch.
        max_steps: optimizer steps of the whole run.
        steps_per_epoch: optimizer steps in one epoch.
        samples: rows trained on, filler not counted, over all processes.
        tokens: of these rows, padding not counted.
        flops: of the model for these tokens, forward and backward, as MFU counts them; see ``Throughput``.
        seconds: wall clock of those steps, from the end of one to the end of the next, over all resumed parts;
            evaluation and saving are left out. On a GPU it is brought up to date where the device is waited for: at
            each logged line, evaluation and checkpoint, and at the end.
        best_value: best evaluation so far, of the metric that decides.
        best_step: step of that evaluation.
        evaluations_since_best: evaluations since then.
        evaluated_at: step of the last evaluation.
        last_loss: the last logged loss.
        window: losses of the steps since the last logged line, as global means.
        stop: set by a callback to end the run after this step.
        stream: where a stream of training text stands, see :class:`course_lib.data.streaming.Place`; None without one.
            The steps of such a run are those of one epoch, whatever the stream's.
    """

    max_steps: int = 0
    steps_per_epoch: int = 0
    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    best_value: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    evaluated_at: int | None = None
    last_loss: float | None = None
    window: list[float] = field(default_factory=list)
    stop: bool = False
    stream: dict[str, int] | None = None

    @property
    def epochs_done(self) -> float:
        """Progress in epochs, as a fraction; of a stream whole ones, as nobody knows how long one is."""
        if self.stream is not None:
            return float(self.stream["epoch"])
        return round(self.epoch + self.step_in_epoch / self.steps_per_epoch, 4) if self.steps_per_epoch else 0.0

    @property
    def finished(self) -> bool:
        """True where no step is left to do."""
        return self.stop or self.step >= self.max_steps

    def forget_best(self) -> None:
        """Begin the search for the best evaluation anew."""
        self.best_value = self.best_step = None
        self.evaluations_since_best = 0

    def as_dict(self) -> dict[str, Any]:
        """All fields."""
        return dataclasses.asdict(self)
