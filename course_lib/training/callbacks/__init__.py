"""Hooks into the training loop: what watches, logs, ends and tracks a run."""

from course_lib.training.callbacks.base import Callback, FunctionCallback

__all__ = ["Callback", "FunctionCallback"]
