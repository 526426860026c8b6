"""Notes what happens on a rank, in order: collectives as they are issued, waits for them, and what an observer adds."""

import os
import time
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from course_lib.metering.collective_log import CollectiveLog, Transfer
from course_lib.parallel.clock import Clock


class Recorder(CollectiveLog):
    """The order of events, while its ``with`` is open.

    Attributes:
        events: ``all_reduce 4096`` when a collective of so many bytes is issued (``send 4096 to 1``, ``recv 4096
            from 1``), ``wait`` when a thread has waited for one, and what `note` was given.
        announces: descriptor that each collective is written to as well before it is passed on, a line with its dtype;
            None: nowhere.
    """

    announces: ClassVar[int | None] = None

    def __init__(self) -> None:
        self.events: list[str] = []
        super().__init__(Clock(torch.device("cpu")), lambda tensors: None, lambda begin, end: self.note("wait"))

    def note(self, event: str) -> None:
        """Add an event."""
        self.events.append(event)

    def _describe(self, operator: str, named: dict[str, Any]) -> Transfer:
        transfer = super()._describe(operator, named)
        peer = {"send": " to {}", "recv": " from {}"}.get(transfer.name, "").format(transfer.ranks[-1])
        self.note(f"{transfer.name} {transfer.bytes}{peer}")
        if self.announces is not None:
            os.write(self.announces, f"{transfer.name} {transfer.bytes} {transfer.dtype}\n".encode())
        return transfer

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


class Others(Recorder):
    """Lets this rank be slow until each other rank has to wait for it, or has gone on without: no sleep is long enough.

    Open on all ranks while the answer runs.

    Attributes:
        stage: of the answer; what was said in one stage does not count in the next.
    """

    PATIENCE = 8.0
    """Seconds after which `wait` gives up on a rank that waits in no collective."""

    def __init__(self, world_size: int, rank: int):
        super().__init__()
        self.store = dist.PrefixStore("others", dist.distributed_c10d._get_default_store())
        self.others, self.rank = [other for other in range(world_size) if other != rank], rank
        self.stage = "begin"

    def note(self, event: str) -> None:
        """Also tells the others: who issues a collective waits for them."""
        super().note(event)
        self.say()

    def say(self) -> None:
        """This rank waits, or has gone on."""
        self.store.set(f"{self.stage} {self.rank}", "")

    def wait(self) -> None:
        """Return when all others have said so."""
        until = time.monotonic() + self.PATIENCE
        keys = [f"{self.stage} {other}" for other in self.others]
        while not all(self.store.check([key]) for key in keys) and time.monotonic() < until:
            time.sleep(0.005)
