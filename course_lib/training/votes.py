"""The ranks' votes to stop, read without waiting for the device."""

from collections import deque

import torch


class Votes:
    """Sums of the ranks' votes, one per step.

    On a GPU the host queues a step long before the sum of its votes is there, and reading it at once would leave the
    device with nothing to do. So a sum is copied to pinned memory while the device works, and the last one is left
    alone until a step more has been queued: behind what the host then waits for, there is a whole step of work. All
    ranks read the same sums after the same step, so that all stop there.

    Args:
        device: of the sums.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._cast: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque(maxlen=2)
        self._rooms = [torch.empty((), dtype=torch.int64, pin_memory=self.on_gpu) for _ in range(2)]

    def cast(self, votes: torch.Tensor) -> None:
        """Note the sum of a step's votes, an int64 scalar on the device."""
        room, event = self._rooms[0], torch.cuda.Event() if self.on_gpu else None
        self._rooms.reverse()
        room.copy_(votes, non_blocking=True)
        if event is not None:
            event.record()
        self._cast.append((room, event))

    def counted(self, waited: bool) -> int:
        """The largest sum that was not looked at before, or 0.

        Args:
            waited: the device has been waited for since the last was cast, on all ranks: it is looked at too.
        """
        most = 0
        while len(self._cast) > (1 if self.on_gpu and not waited else 0):
            votes, event = self._cast.popleft()
            if event is not None and not event.query():
                event.synchronize()
            most = max(most, int(votes))
        return most
