"""Top-k: of each bucket only the k elements of largest magnitude travel, with their positions; the rest waits here.

The ranks choose different positions, so there is nothing to add up on the way: all get all pairs (an all-gather), and
each adds them up itself, in the same order. That costs 8 k (N - 1) bytes per rank, which grows with N: at a density
k / E of 1 % it is below an all-reduce's 8 (N - 1) / N * E up to N = 100.

Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (arXiv 1704.05021); Stich et al.,
"Sparsified SGD with Memory" (arXiv 1809.07599), algorithm 1.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.errors import ConfigError
from course_lib.parallel.communication.hooks import ErrorFeedback, TwoPhaseReduction, all_gather_bytes
from course_lib.parallel.ddp import Bucket, ReductionHandle


class TopK:
    """Communication hook: the largest elements of a bucket.

    Args:
        density: share of the elements that travel, above 0 and at most 1.
        error_feedback: add what was left out to the next gradient. Without it an element that is never among the
            largest never moves.
    Raises:
        ConfigError: a density out of these bounds.
    """

    def __init__(self, density: float, *, error_feedback: bool):
        if not 0 < density <= 1:
            raise ConfigError(f"top-k with a density of {density:g}", "use a share above 0, at most 1")
        self.density = density
        self.feedback = ErrorFeedback() if error_feedback else None

    def kept(self, elements: int) -> int:
        """k of so many elements: at least 1."""
        return max(1, round(self.density * elements))

    def __call__(self, bucket: Bucket) -> ReductionHandle:
        """Begin the all-gather."""
        flat = bucket.flat
        left_out = self.feedback.add_to(bucket) if self.feedback else None
        # --- phase 1: choose ---
        positions = flat.abs().topk(self.kept(flat.numel()), sorted=False).indices  # (k,) int64
        values = flat[positions]  # (k,)
        if left_out is not None:
            left_out.copy_(flat)[positions] = 0
        # --- phase 2: one message of bytes per rank. int32 positions: a bucket has fewer than 2^31 elements ---
        message = torch.cat([values.view(torch.uint8), positions.int().view(torch.uint8)])
        ranks = dist.get_world_size(bucket.group)
        gathered = message.new_empty(ranks * message.numel())
        first = dist.all_gather_single(gathered, message, group=bucket.group, async_op=True)
        return TwoPhaseReduction(first, partial(self._add_up, flat, gathered.view(ranks, -1), values.nbytes))

    @staticmethod
    def _add_up(flat: Tensor, gathered: Tensor, split: int) -> None:
        """Write the sum of the ranks' pairs into the bucket, rank after rank: the same bits everywhere."""
        flat.zero_()
        for message in gathered:
            # Copies: a view as wider numbers has to begin at a multiple of their size.
            values, positions = message[:split].clone().view(flat.dtype), message[split:].clone().view(torch.int32)
            flat[positions.long()] += values  # a rank names a position once

    def bytes_per_step(self, elements: int, ranks: int, itemsize: int) -> int:
        """Bytes that a rank sends for a bucket of so many elements of ``itemsize`` bytes."""
        return all_gather_bytes(ranks * self.kept(elements) * (itemsize + 4), ranks)

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's error feedback."""
        return self.feedback.state_dict() if self.feedback else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put :meth:`state_dict` back."""
        if self.feedback:
            self.feedback.load_state_dict(state)
