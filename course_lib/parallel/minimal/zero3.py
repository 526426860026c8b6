"""ZeRO stage 3: weights are sharded too, and whole only while their module computes.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.3. ``fsdp.py`` has the same with nothing but this stage.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.parallel.minimal.zero1 import TinyBucket
from course_lib.parallel.minimal.zero2 import TinyZeRO2


class TinyZeRO3(TinyZeRO2):
    """Gathers a bucket before its module computes, forward and backward, and frees it after."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    ):
        super().__init__(model, blocks, make_optimizer)
        for bucket, module in zip(self.buckets, [model, *blocks], strict=True):
            bucket.mine.data = bucket.mine.data.clone()  # all that lasts
            self.come_and_go(bucket, module, module is model)

    def come_and_go(self, bucket: TinyBucket, module: nn.Module, root: bool) -> None:
        def come(*_: Any) -> None:
            bucket.flat.untyped_storage().resize_(bucket.flat.nbytes)
            bucket.gather()

        def go(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            self.free(bucket)
            output.register_hook(come)  # again, when the module's backward begins

        module.register_forward_pre_hook(come)
        if not root:
            module.register_forward_hook(go)
        self.free(bucket)

    def free(self, bucket: TinyBucket) -> None:
        bucket.flat.untyped_storage().resize_(0)  # gives the memory back; the tensors stay

    def full(self, bucket: TinyBucket) -> None:
        bucket.reduce()
        self.free(bucket)

    def gather(self) -> None:
        pass  # phase 3 comes with the next forward
