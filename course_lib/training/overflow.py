"""Finds out, without waiting for the GPU, whether fp16's loss scaler skipped an optimizer step."""

import contextlib
from collections.abc import Iterator

import torch
from torch.amp.grad_scaler import GradScaler


class OverflowWatch:
    """Finds out whether an optimizer's last step was skipped because a scaled gradient was not finite.

    A fused optimizer skips it on the GPU: ``GradScaler.step`` calls it always, with ``found_inf``, and neither the
    scaler nor Accelerate's wrapper around the optimizer, which looks whether it was called, hears of it. But
    ``GradScaler.update`` lowers the scale after such a step, and never else. The comparison is made on the GPU and
    travels to the host while both go on; who asks waits for that step, not for what was launched since.
    """

    def __init__(self) -> None:
        self._fell = torch.zeros((), dtype=torch.bool)
        self._copied: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def watching(self, scaler: GradScaler | None) -> Iterator[None]:
        """Around the optimizer's step and the scaler's update; without a scaler that is enabled no step is skipped."""
        if scaler is None or not scaler.is_enabled():
            yield
            return
        scale = scaler._scale  # get_scale() would wait for the GPU
        assert scale is not None, "a loss was scaled before"
        before = scale.clone()
        yield
        self._fell = (scale < before).to("cpu", non_blocking=True)
        if scale.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def skipped(self) -> bool:
        """Whether the last step was skipped; waits until the GPU has made it."""
        if self._copied:
            self._copied.synchronize()
        return bool(self._fell)
