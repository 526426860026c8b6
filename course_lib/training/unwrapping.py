"""Taking a model out of its wrappers costs nothing where DeepSpeed did not wrap it."""

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def deepspeed_left_alone() -> Iterator[None]:
    """Keep Accelerate's ``unwrap_model`` from importing DeepSpeed, which takes seconds, to ask whether it wrapped it.

    Where nobody has imported it, it did not wrap anything.
    """
    with mock.patch("accelerate.utils.other.is_deepspeed_available", lambda: "deepspeed" in sys.modules):
        yield
