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

from torch.optim.optimizer import register_optimizer_step_post_hook

from course_lib.hangs.watchdog import Watchdog

LOOK_SECONDS = 1.0


@contextlib.contextmanager
def watched(seconds: float = 300.0, folder: str | Path = "hang") -> Iterator[Watchdog]:
    """Watch this rank, with a beat for each step of an optimizer; every rank has to enter, once its group stands.

    Args:
        seconds: without progress until the ranks report and end; a process that no launcher started goes on.
        folder: of the reports.
    """
    with Watchdog(seconds, folder, ends="RANK" in os.environ) as dog:
        steps = 0

        def stepped(*_: Any) -> None:
            nonlocal steps
            steps += 1
            dog.beat(steps - 1)

        hook = register_optimizer_step_post_hook(stepped)
        try:
            yield dog
        finally:
            hook.remove()


class _Training:
    """One training that callbacks begin and end; also ended where an exception leaves the loop without telling them."""

    def __init__(self, seconds: float, folder: str | Path):
        self.seconds, self.folder = seconds, folder
        self._stack: contextlib.ExitStack | None = None
        self._over = threading.Event()

    def begin(self, loop: FrameType | None) -> None:
        """Watch until `end`, or until a frame of the main thread, the loop's, has been left."""
        self.end()
        self._stack, self._over = contextlib.ExitStack(), threading.Event()
        self._stack.enter_context(watched(self.seconds, self.folder))
        if "RANK" not in os.environ:  # else the exception ends the process
            threading.Thread(target=self._follow, args=(loop, self._over), daemon=True).start()

    def end(self, error: BaseException | None = None) -> None:
        """It has ended, by an error or not."""
        self._over.set()
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _follow(self, loop: FrameType | None, over: threading.Event) -> None:
        while not over.wait(LOOK_SECONDS):
            here = sys._current_frames().get(threading.main_thread().ident or 0)
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
