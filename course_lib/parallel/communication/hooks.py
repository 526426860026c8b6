"""Base of compressing communication hooks: a reduction that goes on when it is waited for, and error feedback."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.errors import ConfigError
from course_lib.parallel.ddp import Bucket, ReductionHandle


@runtime_checkable
class StatefulHook(Protocol):
    """A communication hook of :class:`~course_lib.parallel.ddp.DataParallel` that remembers something between steps.

    What it remembers may be different on every rank; training goes on exactly only if each rank gets its own back.
    """

    def __call__(self, bucket: Bucket) -> ReductionHandle: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class TwoPhaseReduction:
    """A reduction whose first collective is under way, and whose rest follows when someone waits for it.

    The first collective of each bucket runs while backward computes. The others begin at its end, in the order of the
    buckets, which is the same on all ranks.

    Args:
        first: the collective under way.
        rest: what to do with its result; further collectives are called and awaited there.
    """

    def __init__(self, first: dist.Work, rest: Callable[[], None]):
        self.first, self.rest = first, rest

    def wait(self) -> None:
        """Return when the bucket holds the result."""
        self.first.wait()
        self.rest()


class ErrorFeedback:
    """Remainder that compression left out of a gradient on this rank, added to the next one.

    So nothing is lost, only late: after T steps, all that was sent and what is still here add up to all T gradients.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); Karimireddy et al.,
    "Error Feedback Fixes SignSGD" (arXiv 1901.09847), algorithm 2.

    Attributes:
        left_out: by the name of a bucket's first parameter, (E,) of the bucket's dtype.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, Tensor] = {}

    def add_to(self, bucket: Bucket) -> Tensor:
        """Add what is left of earlier steps to a bucket, in place.

        Returns:
            (E,), where what this step leaves out is to be written.
        Raises:
            ConfigError: what was loaded is of other buckets.
        """
        key = next(iter(bucket.views))
        left_out = self.left_out.setdefault(key, torch.zeros_like(bucket.flat))
        if left_out.shape != bucket.flat.shape:
            raise ConfigError(
                f"error feedback of {left_out.numel()} elements for a bucket of {bucket.flat.numel()} from `{key}` on",
                "go on with the model and bucket size that it was saved with",
            )
        bucket.flat += left_out
        return left_out

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's; each rank has its own."""
        return {f"left_out.{name}": left_out for name, left_out in self.left_out.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put it back, on the device that it is given on."""
        self.left_out = {
            name.removeprefix("left_out."): left_out.clone()
            for name, left_out in state.items()
            if name.startswith("left_out.")
        }


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Bytes that each of N ranks sends in a ring all-reduce of so many bytes: 2 (N - 1) / N of them."""
    return round(2 * (ranks - 1) / ranks * size)


def all_gather_bytes(size: int, ranks: int) -> int:
    """Bytes that each of N ranks sends where so many are gathered, scattered or exchanged: (N - 1) / N of them."""
    return round((ranks - 1) / ranks * size)
