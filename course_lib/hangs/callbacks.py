"""The watchdog in a loop of somebody else's: Hugging Face's Trainer, Accelerate, Lightning.

```python
trainer.add_callback(WatchCallback(300, "hang"))         # transformers.Trainer
lightning.Trainer(callbacks=[WatchCallback(300, "hang")])
with watched(300, "hang"):                               # Accelerate, or any loop, once its process group stands
    train()
```

Under `course watch` none of them is needed.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from course_lib.hangs.job_watch import JobWatch
from course_lib.hangs.user_frames import frame_of
from course_lib.hangs.watchdog import Watchdog

LOOK_SECONDS = 1.0


@contextlib.contextmanager
def watched(seconds: float = 300.0, folder: str | Path = "hang") -> Iterator[Watchdog]:
    """Watch this rank, with a beat for each step of an optimizer; every rank has to enter, once its group stands.

    Args:
        seconds: without progress until the ranks report and end; a process that no launcher started goes on.
        folder: of the reports.
    """
    watch = _begun(seconds, folder)
    try:
        yield watch.watchdog
    except BaseException as error:
        watch.end(error)
        raise
    watch.end(None)


def _begun(seconds: float, folder: str | Path) -> JobWatch:
    return JobWatch(seconds, folder, ends="RANK" in os.environ)


class _Training:
    """One training that callbacks begin and end; also ended where an exception leaves the loop without telling them."""

    def __init__(self, seconds: float, folder: str | Path):
        self.seconds, self.folder = seconds, folder
        self.watch: JobWatch | None = None
        self._over = threading.Event()

    def begin(self, loop: FrameType | None) -> None:
        """Watch until `end`, or until a frame of the main thread, the loop's, has been left."""
        self.end()
        self.watch, self._over = _begun(self.seconds, self.folder), threading.Event()
        if "RANK" not in os.environ:  # else the exception ends the process
            threading.Thread(target=self._follow, args=(loop, self._over), daemon=True).start()

    def end(self, error: BaseException | None = None) -> None:
        """It has ended, by an error or not."""
        self._over.set()
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.end(error)

    def _follow(self, loop: FrameType | None, over: threading.Event) -> None:
        while not over.wait(LOOK_SECONDS):
            here = frame_of(threading.main_thread())
            while here is not None and here is not loop:
                here = here.f_back
            if here is None and not over.is_set():
                self.end(RuntimeError("an exception has ended the training"))


def _caller(name: str) -> FrameType | None:
    """The outermost frame above this one of a function with this name."""
    frame, outermost = sys._getframe(1), None
    while frame is not None:
        outermost = frame if frame.f_code.co_name == name else outermost
        frame = frame.f_back  # type: ignore[assignment]
    return outermost


class WatchCallback:
    """A callback for ``transformers.Trainer`` and for Lightning's, which needs neither to be installed.

    Args:
        seconds: as for :func:`watched`.
        folder: of the reports.
    """

    def __init__(self, seconds: float = 300.0, folder: str | Path = "hang"):
        self.training = _Training(seconds, folder)
        self.state_key = type(self).__name__  # by which Lightning keeps a callback's state

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Transformers' training begins."""
        self.training.begin(_caller("train"))

    def on_train_start(self, *_: Any) -> None:
        """Lightning's training begins."""
        self.training.begin(_caller("fit"))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Either's training ends."""
        self.training.end()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Lightning's training ends by an error."""
        self.training.end(exception)

    def state_dict(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name in ("setup", "teardown"):
            return _nothing  # all else that either Trainer tells its callbacks
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def _nothing(*_: Any, **__: Any) -> None:
    """What a callback does that an event is of no use to."""
