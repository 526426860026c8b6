"""Live storages, each counted once, with the role of each."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from course_lib.replacing import replaced


@dataclass(eq=False)
class TrackedStorage:
    """A storage that is watched.

    Attributes:
        alive: to the storage, without keeping it.
        kind: what it serves as.
        module: a name of the caller's choice for where it belongs.
        bytes: at the last look.
        certain: the kind is no guess that a later use may overrule.
    """

    alive: weakref.ref
    kind: str
    module: str = ""
    bytes: int = 0
    certain: bool = False


class StorageTable:
    """The storages of tensors that were shown to it, until they are freed.

    Attributes:
        module: where new storages belong of which nothing else is said.

    Args:
        kinds: a storage that serves as several of these counts as the first.
        resized: called with a storage that came, went or was resized, and the change in bytes.
        moved: called with a storage that counts as another kind now, and the kind before.
    """

    module = ""

    def __init__(
        self,
        kinds: Sequence[str],
        resized: Callable[[TrackedStorage, int], None],
        moved: Callable[[TrackedStorage, str], None] = lambda storage, before: None,
    ):
        self.order = {kind: place for place, kind in enumerate(kinds)}
        self._resized, self._moved = resized, moved
        self._storages: dict[int, TrackedStorage] = {}
        self._lock = threading.RLock()  # a storage may be freed on any thread, and within our own calls

    def hold(self, tensor: torch.Tensor, kind: str, module: str = "", certain: bool = False) -> None:
        """Watch a tensor's storages as ``kind``, or as what they are already if that comes first.

        Args:
            tensor: any; of a wrapper, such as a DTensor, what it holds on this rank.
            kind: one of the table's.
            module: where a storage of this kind belongs.
            certain: the caller knows that it is so, whatever comes first.
        """
        for part in local_tensors(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            with self._lock:
                known = self._storages.get(key)
                if known is None:
                    alive = weakref.ref(storage, functools.partial(self.forget, key))
                    known = self._storages[key] = TrackedStorage(alive, kind, module or self.module)
                elif not known.certain and (certain or self.order[kind] < self.order[known.kind]):
                    before, known.kind, known.module = known.kind, kind, module or known.module
                    self._moved(known, before)
                known.certain |= certain
                self._measure(known, storage.nbytes())

    def find(self, tensor: torch.Tensor) -> TrackedStorage | None:
        """The storage of a tensor that is no wrapper, where it is watched."""
        return self._storages.get(tensor.untyped_storage()._cdata)

    def measure_again(self, storage: torch.UntypedStorage) -> None:
        """Measure a storage, where it is watched, again: it was resized."""
        with self._lock:
            if known := self._storages.get(storage._cdata):
                self._measure(known, storage.nbytes())

    def measure_all(self, but: str) -> None:
        """Measure all storages again, but those of one kind."""
        with self._lock:
            for known in list(self._storages.values()):
                storage = known.alive() if known.kind != but else None
                if storage is not None:
                    self._measure(known, storage.nbytes())

    def keep_only(self, tensors: Sequence[torch.Tensor], before: str) -> None:
        """Forget the storages whose kind comes before another one, but those of these tensors."""
        named = {part.untyped_storage()._cdata for tensor in tensors for part in local_tensors(tensor)}
        with self._lock:
            for key in [key for key, known in self._storages.items() if self.order[known.kind] < self.order[before]]:
                if key not in named:
                    self.forget(key)

    def forget(self, key: int, _: Any = None) -> None:
        """Watch a storage no more, by its address: it is freed, or no longer of interest."""
        with self._lock:
            if known := self._storages.pop(key, None):
                self._measure(known, 0)

    def clear(self) -> None:
        """Watch none of them any more, without a word."""
        self._storages.clear()

    def _measure(self, known: TrackedStorage, size: int) -> None:
        change, known.bytes = size - known.bytes, size
        if change:
            self._resized(known, change)


class TrainingStorages(StorageTable):
    """The storages of a training, as its parts come by.

    What is made of them is the affair of those who derive from it.
    """

    def __init__(self, kinds: Sequence[str]):
        super().__init__(kinds, self._resized, self._moved)
        self._parameters: dict[int, weakref.ref] = {}
        self._hooks: list[Any] = []

    def hold_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd's pack hook: saves the tensor, an output without its graph, which would keep itself alive."""
        self.hold(tensor, "activations")
        return tensor if tensor.is_leaf else tensor.detach()

    def hold_handed_over(self, tensors: list[torch.Tensor]) -> None:
        """Watch what a collective is given."""
        for tensor in tensors:
            self.hold(tensor, "communication buffers")

    def hold_parameters(self, module: nn.Module, kind: str = "parameters") -> None:
        """Watch the parameters that a module itself has just now; FSDP2 puts the gathered ones in their place."""
        for parameter in module._parameters.values():
            if parameter is not None:
                self.hold_parameter(parameter, kind)

    def hold_parameter(self, parameter: nn.Parameter, kind: str = "parameters") -> None:
        """Watch a parameter, and its gradients as they come."""
        self.hold(parameter, kind)
        key = id(parameter)
        if key not in self._parameters and parameter.requires_grad:
            self._parameters[key] = weakref.ref(parameter, lambda _: self._parameters.pop(key, None))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulated))

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.hold(parameter.grad, "gradients")

    def _resized(self, storage: TrackedStorage, change: int) -> None:
        """A storage came, went or was resized."""

    def _moved(self, storage: TrackedStorage, before: str) -> None:
        """A storage counts as another kind."""


@contextlib.contextmanager
def resizes(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """While the block runs, ``tell`` is called after each resize of any storage: FSDP takes and frees memory so."""
    resize_ = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize_(storage, size)
        tell(storage)
        return result

    with replaced(torch.UntypedStorage, "resize_", resize):  # no operator: neither hook nor dispatch mode sees it
        yield


def local_tensors(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a tensor's elements on this rank: of a DTensor its local one, of a sparse one two."""
    if tensor.is_sparse:
        return tensor._indices(), tensor._values()
    if type(tensor) in (torch.Tensor, nn.Parameter) or not is_traceable_wrapper_subclass(tensor):
        return (tensor,)
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return tuple(inner for part in parts if isinstance(part, torch.Tensor) for inner in local_tensors(part))
