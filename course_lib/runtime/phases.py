"""Where the time of a step goes, by phase, in seconds of wall clock on this rank."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


class Phases:
    """Adds up the seconds spent in named stretches of code.

    On a GPU, kernels run on after the code that launched them: the times say how long the host
    was busy or waited, and add up to the wall clock all the same.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block's time towards ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
