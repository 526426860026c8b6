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
            if device.index is None:  # which on another thread would mean another GPU
                self.device = device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.synchronize(device)
            self._first = self._event()
            self._first.synchronize()
        self._began = time.perf_counter()

    def stamp(self, device: torch.device | None = None) -> Stamp:
        """Now, on ``device`` or on the clock's own; on any thread, in that thread's current stream of the GPU."""
        if (device or self.device).type != "cuda" or self.device.type != "cuda":
            return time.perf_counter()
        return self._event()

    def seconds(self, stamp: Stamp) -> float:
        """A stamp as seconds; a GPU's have to be reached."""
        if isinstance(stamp, float):
            return stamp
        return self._began + self._first.elapsed_time(stamp) / 1e3

    def settle(self) -> None:
        """Wait until all stamps have been reached."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _event(self) -> torch.cuda.Event:
        """One on the clock's own GPU: times between events of two GPUs don't exist.

        A thread's current device is GPU 0 until it is told otherwise, the backend's threads' and autograd's too, so the
        stream is named: `record` would take the current device's.
        """
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
