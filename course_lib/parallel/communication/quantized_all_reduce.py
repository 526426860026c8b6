"""All-reduce of numbers in 8 or 4 bits: codes travel, sums are made in float32.

Codes of different scales cannot be added, so a ring would round at each of its N - 1 hops. Instead, two exchanges, and
each number is rounded twice, whatever N is::

    all-to-all    rank i gets part i of every rank, quantized; adds the N parts up in float32
    all-gather    rank i's sum, quantized once more, to all

A rank sends 2 (N - 1) / N times the quantized bytes: about a quarter of a float32 all-reduce for 8 bits, an eighth
for 4.

Source: Wang et al., "ZeRO++" (arXiv 2306.10209), section 3.3 (the all-to-all in place of a ring); Dettmers et al.,
"8-bit Optimizers" (arXiv 2110.02861) for the blocks.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.parallel.communication.block_quantization import check, dequantize, quantize, quantized_bytes
from course_lib.parallel.communication.hooks import TwoPhaseReduction, all_gather_bytes
from course_lib.parallel.ddp import Bucket, ReductionHandle


class QuantizedAllReduce:
    """Communication hook: the bucket's sum in 8 or 4 bits an element.

    Args:
        bits: 8 or 4.
        block: numbers that share a scale; 256, say, which adds an eighth of a bit to each.
    Raises:
        ConfigError: other bits, or a block of odd size.
    """

    def __init__(self, bits: int, block: int):
        check(bits, block)
        self.bits, self.block = bits, block

    def __call__(self, bucket: Bucket) -> ReductionHandle:
        """Begin to sum a bucket."""
        return self.sum(bucket.flat, bucket.group)

    def sum(self, flat: Tensor, group: dist.ProcessGroup | None) -> ReductionHandle:
        """Begin to sum a tensor over the ranks, in place: the all-to-all is under way when this returns.

        Args:
            flat: (E,), floating point; the result has the same bits on all ranks.
            group: the ranks to sum over; None: all ranks.
        """
        ranks = dist.get_world_size(group)
        # --- phase 1: N parts of whole blocks, the last ones padded with zeros; quantized, part i goes to rank i ---
        padded = flat.new_zeros(ranks * self.part(flat.numel(), ranks))
        padded[: flat.numel()] = flat
        outgoing = quantize(padded.view(ranks, -1), self.bits, self.block)  # (N, bytes)
        incoming = torch.empty_like(outgoing)
        first = dist.all_to_all_single(incoming, outgoing, group=group, async_op=True)
        return TwoPhaseReduction(first, partial(self._second_half, flat, incoming, group))

    def _second_half(self, flat: Tensor, incoming: Tensor, group: dist.ProcessGroup | None) -> None:
        # --- phase 2: N versions of this rank's part, added up in float32 ---
        summed = dequantize(incoming, self.bits, self.block).sum(0, keepdim=True)  # (1, E / N)
        # --- phase 3: quantized again, and to all. The owner too takes what it has sent, so that all have the same ---
        own = quantize(summed, self.bits, self.block).view(-1)
        gathered = torch.empty_like(incoming)
        dist.all_gather_single(gathered.view(-1), own, group=group)
        flat.copy_(dequantize(gathered, self.bits, self.block).view(-1)[: flat.numel()])

    def part(self, elements: int, ranks: int) -> int:
        """Elements of each rank's part: whole blocks."""
        return -(-elements // (ranks * self.block)) * self.block

    def bytes_per_step(self, elements: int, ranks: int) -> int:
        """Bytes that a rank sends for so many elements."""
        packed = quantized_bytes(self.part(elements, ranks), self.bits, self.block)
        return 2 * all_gather_bytes(ranks * packed, ranks)
