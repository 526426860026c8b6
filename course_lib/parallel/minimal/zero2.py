"""ZeRO stage 2: gradients are sharded too, since a bucket is reduced as soon as backward has filled it.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.2.
"""

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from course_lib.parallel.minimal.zero1 import TinyBucket, TinyZeRO1


class TinyZeRO2(TinyZeRO1):
    """Reduces in the middle of backward, and frees a bucket's whole gradients there."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    ):
        super().__init__(model, blocks, make_optimizer)
        for bucket in self.buckets:
            self.watch(bucket)

    # A bucket per block, and one for the rest: each can leave when it is full.
    def cut(self, model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
        of_blocks = [list(block.parameters()) for block in blocks]
        inside = {weight for weights in of_blocks for weight in weights}
        return [[weight for weight in model.parameters() if weight not in inside], *of_blocks]

    def watch(self, bucket: TinyBucket) -> None:
        missing = set(bucket.weights)

        def arrived(weight: nn.Parameter) -> None:
            missing.remove(weight)
            if not missing:  # the bucket's last gradient, in the middle of backward
                self.full(bucket)
                missing.update(bucket.weights)

        for weight in bucket.weights:
            weight.register_post_accumulate_grad_hook(arrived)

    def full(self, bucket: TinyBucket) -> None:
        bucket.reduce()

    def reduce(self) -> None:
        pass  # phase 1 was over with backward
