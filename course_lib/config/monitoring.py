"""Config sections of trackers, of monitoring the ranks, and of guards that end a run."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from course_lib.config.fields import NotNegative, Positive, Strict
from course_lib.config.learning import RunConfig
from course_lib.errors import ConfigError

TRACKERS = ("jsonl", "trackio", "wandb", "tensorboard")
"""Trackers that can be named in ``tracker``."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(Strict):
    """Trackers that a run's numbers go to besides `metrics.jsonl`, and what goes with them."""

    tracker: str = os.environ.get("COURSE_TRACKER", "trackio")
    """`trackio` or `jsonl` (both local, read by `course runs`), `tensorboard`, `wandb` \
(offline without WANDB_API_KEY), several with commas between, or `none`; the environment's COURSE_TRACKER sets another \
default."""
    project: str = "distributed-transformers"
    """Project that the trackers put the run in."""
    run_name: str | None = None
    """The run's name; default: that of its folder."""
    run_group: str | None = None
    """Group that the run belongs to, for example a sweep; with track_every_rank default: the run's name."""
    track_every_rank: bool = False
    """Track a run on every rank, all in one group, rather than one on rank 0."""
    watch: Literal["none", "gradients", "parameters", "all"] = "none"
    """Histograms of these tensors; of a rank's own shard where the state is sharded."""
    watch_steps: Positive = 100
    """Optimizer steps between two looks at the watched tensors; the last step is looked at too."""
    log_predictions: NotNegative = 0
    """Wrong predictions of the final evaluation to track, worst first, with the confusion matrix; 0: none."""
    log_model: bool = False
    """Track the trained model's files as an artifact."""
    env_file: str | None = None
    """File of `NAME=value` lines with keys, for example WANDB_API_KEY; its values are written nowhere."""

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names in ``tracker``, in order, each once; empty for `none`."""
        names = [name.strip() for name in self.tracker.split(",")]
        return tuple(dict.fromkeys(name for name in names if name != "none"))


@dataclass(frozen=True, kw_only=True)
class MonitorConfig(Strict):
    """Monitoring of the ranks while they train; its findings go to `monitor/` in the run's folder."""

    memory_steps: NotNegative = 0
    """Optimizer steps between two looks at every rank's memory; 0: none."""
    memory_alert: Annotated[float, Gt(0), Le(1)] = 0.9
    """Share of its memory at which a rank is reported, once."""
    imbalance_alert: Annotated[float, Gt(1)] = 1.5
    """Memory of the fullest rank by that of the emptiest at which they are reported, once."""
    communication_steps: NotNegative = 0
    """Optimizer steps between two whose communication is metered on every rank; 0: none."""
    profile: bool = False
    """Record some steps of all ranks in one trace, and tell where the step went and which roof bounds each part."""
    profile_steps: NotNegative = 0
    """Steps that torch.profiler records on every rank, for Perfetto and TensorBoard; 0: none, and 3 with `profile`."""
    profile_wait: NotNegative = 2
    """Steps before the profiler begins; `profile` counts the operators of the last two."""
    profile_warmup: NotNegative = 1
    """Steps that are profiled and thrown away, since the profiler's start slows them."""

    @property
    def profiled_steps(self) -> int:
        """Number of recorded steps."""
        return self.profile_steps or (3 if self.profile else 0)


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Strict):
    """Guards that end a run that cannot go well, and say which rank it was."""

    watchdog: Annotated[float, Ge(0)] = 300.0
    """Seconds without progress after which the ranks report who is behind, where, and end; 0: wait for ever."""
    desync_check: Literal["off", "sampled", "full"] = "sampled"
    """Compare the ranks' model, config, data and step, and a hash of parameters that are the same on all: of a sample \
of their elements, or of all."""
    desync_steps: Positive = 100
    """Optimizer steps between two such comparisons; the first is before the first step."""


def check_profile(monitor: MonitorConfig, run: RunConfig) -> None:
    """Refuse a profile that could not be taken."""
    if not monitor.profile:
        return
    if monitor.profile_wait < 2:
        raise ConfigError(
            f"profile counts operators in the last two steps that it waits, and profile_wait is {monitor.profile_wait}",
            "use 2 or more",
            cure={"profile_wait": "2"},
        )
    needed = monitor.profile_wait + monitor.profile_warmup + monitor.profiled_steps
    if run.max_steps and run.max_steps < needed:
        raise ConfigError(
            f"profile takes {needed} steps ({monitor.profile_wait} waiting, {monitor.profile_warmup} to "
            f"warm up, {monitor.profiled_steps} recorded), and max_steps is {run.max_steps}",
            f"use --max_steps {needed}, or lower profile_wait, profile_warmup or profile_steps",
            cure={"max_steps": str(needed)},
        )
