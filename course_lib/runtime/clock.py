"""Points in time on the CPU and on a GPU's stream, brought to one clock."""

import time

import torch

Stamp = float | torch.cuda.Event


class Clock:
    """Stamps on ``time.perf_counter``'s clock, in seconds.

    On a GPU a stamp is an event in the current stream: it is reached when the work queued before it is done.

    Args:
        device: where the measured work runs.
    """

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record()
            self._first.synchronize()
        self._began = time.perf_counter()

    def stamp(self, device: torch.device | None = None) -> Stamp:
        """Now, on ``device`` or on the clock's own."""
        if (device or self.device).type != "cuda" or self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: Stamp) -> float:
        """A stamp as seconds; a GPU's have to be reached."""
        if isinstance(stamp, float):
            return stamp
        return self._began + self._first.elapsed_time(stamp) / 1e3

    def settle(self) -> None:
        """Wait until all stamps have been reached."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
