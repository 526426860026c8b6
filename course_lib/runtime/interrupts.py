"""Ctrl-C and SIGTERM as a wish that the training loop grants at the end of a step."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Collect SIGINT and SIGTERM while the block runs; Ctrl-C a second time interrupts at once.

    A launcher forwards one Ctrl-C as several signals, so only a second SIGINT counts as impatience.
    Outside the main thread, where Python allows no handlers, nothing is collected.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and request.signal == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = request.signal or number

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
