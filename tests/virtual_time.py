"""Time that passes only where a test lets it: each rank has a clock of its own, and messages carry it to the others.

A rank's clock goes on when the rank sleeps, and jumps to a message's time where it takes one that was sent later than
it is (Lamport, Time, Clocks, and the Ordering of Events in a Distributed System, 1978). So what is measured is who
waits for whom, exactly, on real ranks with real messages, however busy the machine is. A clock counts microseconds:
whole numbers, which a float32 holds exactly up to 16 s.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from course_lib.parallel.clock import Clock
from course_lib.parallel.pipeline.p2p import P2PChannel


class VirtualTime:
    """This rank's clock; a fork of the process has one of its own."""

    def __init__(self):
        self.now = 0

    def sleep(self, seconds):
        self.now += round(seconds * 1e6)

    def seconds(self):
        return self.now / 1e6

    def meet(self):
        """All ranks' clocks show what the latest of them does."""
        latest = torch.tensor(self.now)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        self.now = int(latest)

    def module(self, **more):
        """In the place of the module ``time``."""
        return SimpleNamespace(**({"sleep": self.sleep, "perf_counter": self.seconds} | more))

    def distributed(self):
        """In the place of torch.distributed: a rank that comes early to a collective waits for the last one."""

        def met(name):
            def call(*args, **kwargs):
                self.meet()
                return getattr(dist, name)(*args, **kwargs)

            return call

        return SimpleNamespace(**(vars(dist) | {name: met(name) for name in ("all_reduce", "barrier")}))

    def of_stamps(self, monkeypatch):
        """The course's own clock shows this one."""
        monkeypatch.setattr(Clock, "stamp", lambda clock, device=None: self.seconds())

    def in_messages(self, monkeypatch):
        """What the stages of a pipeline send each other is the time at which they sent it."""
        hand_over, take = P2PChannel.hand_over, P2PChannel.take

        def with_its_time(channel, user, tensors):
            hand_over(
                channel,
                user,
                tuple(torch.full_like(tensor, self.now).requires_grad_(tensor.requires_grad) for tensor in tensors),
            )

        def not_before_it_was_sent(channel, user):
            tensors = take(channel, user)
            self.now = max([self.now, *(int(tensor.max()) for tensor in tensors)])
            return tensors

        monkeypatch.setattr(P2PChannel, "hand_over", with_its_time)
        monkeypatch.setattr(P2PChannel, "take", not_before_it_was_sent)
