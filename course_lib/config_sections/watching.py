"""Config sections of trackers, of monitoring the ranks, and of guards that end a run."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from course_lib.config_sections.fields import NotNegative, Positive, Strict

TRACKERS = ("jsonl", "trackio", "wandb", "tensorboard")
"""Trackers that can be named in ``tracker``."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(Strict):
    """Where a run's numbers go besides `metrics.jsonl`, and what goes with them."""

    tracker: str = os.environ.get("COURSE_TRACKER", "trackio")
    """`trackio` or `jsonl` (both local, read by `course runs` and `course dashboard`), `tensorboard`, `wandb` \
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
    track_system: bool = True
    """Track every rank's processor, memory and GPU with logged lines, at most every 10 steps."""
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
    """What is watched on the ranks while they train; what is found goes to `monitor/` in the run's folder."""

    memory_steps: NotNegative = 0
    """Optimizer steps between two looks at every rank's memory; 0: none."""
    memory_alert: Annotated[float, Gt(0), Le(1)] = 0.9
    """Share of its memory at which a rank is reported, once."""
    imbalance_alert: Annotated[float, Gt(1)] = 1.5
    """Memory of the fullest rank by that of the emptiest at which they are reported, once."""
    communication_steps: NotNegative = 0
    """Optimizer steps between two whose communication is metered on every rank; 0: none."""
    profile_steps: NotNegative = 0
    """Steps that torch.profiler records on every rank, for Perfetto and TensorBoard; 0: none."""
    profile_wait: NotNegative = 1
    """Steps before the profiler begins."""
    profile_warmup: NotNegative = 1
    """Steps that are profiled and thrown away, since the profiler's start slows them."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Strict):
    """What ends a run that cannot go well, and says which rank it was."""

    watchdog: Annotated[float, Ge(0)] = 300.0
    """Seconds without progress after which the ranks report who is behind, where, and end; 0: wait for ever."""
    desync_check: Literal["off", "sampled", "full"] = "sampled"
    """Compare the ranks' model, config, data and step, and a hash of parameters that are the same on all: of a sample \
of their elements, or of all."""
    desync_steps: Positive = 100
    """Optimizer steps between two such comparisons; the first is before the first step."""
