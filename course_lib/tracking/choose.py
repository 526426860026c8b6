"""Makes trackers from their names in the config."""

from collections.abc import Sequence

from course_lib.tracking.base import Guarded, RunInfo, Tracker
from course_lib.tracking.jsonl import JsonLinesTracker
from course_lib.tracking.tensorboard_tracker import TensorBoardTracker
from course_lib.tracking.trackio_tracker import TrackioTracker
from course_lib.tracking.wandb_tracker import WandbTracker

TRACKERS: dict[str, type[Tracker]] = {
    "jsonl": JsonLinesTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "tensorboard": TensorBoardTracker,
}


def make_trackers(names: Sequence[str], info: RunInfo) -> list[Guarded]:
    """A guarded tracker of each name, not yet started."""
    return [Guarded(TRACKERS[name](info)) for name in names]
