"""Work of an answer's operators: FLOPs of matrix products and memory of tensors, on the CPU in one thread."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from course_lib.metering.storages import StorageTable, TrackedStorage


class Work(TorchDispatchMode):
    """Counts while its ``with`` is open, in forward and backward; tensors that were there before do not count.

    Attributes:
        flops: of matrix products.
        largest: elements of the largest storage that was allocated.
        held: bytes of what was allocated and is still there.
        peak: the most that it was since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.largest = self.held = self.peak = 0
        self._storages = StorageTable(("any",), self._resized)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler at the first operator: 2 s in each process of a sandbox

    def begin(self) -> None:
        """The peak and the largest storage are counted from here on."""
        self.peak, self.largest = self.held, 0

    def held_beside(self, tensor: torch.Tensor) -> int:
        """Bytes that are held, less a tensor's own."""
        known = self._storages.find(tensor)
        return self.held - (known.bytes if known else 0)

    def _resized(self, storage: TrackedStorage, change: int) -> None:
        self.held += change
        self.peak = max(self.peak, self.held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2].removesuffix("_")
        product = getattr(torch.ops.aten, name, None) if name.endswith(("mm", "mv")) else None
        if product in flop_registry:
            self.flops += flop_registry[product](*args, **(kwargs or {}), out_val=result)
        elif name in ("mv", "addmv"):
            self.flops += 2 * args[-2].numel()
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in given:
                self._storages.hold(tensor, "any")
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
