"""Stand-ins with which one rank runs a step without the other ranks and without a GPU; see ``simulate.py``."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from course_lib.launching.rank_process import forget_meshes
from course_lib.parallel.torch_engines.tensor_parallel import TorchTensorParallel
from course_lib.replacing import replaced


@contextlib.contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """A default process group in which this process is a rank and nobody is another."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    forget_meshes()
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


class TensorParallelAlone(TorchTensorParallel):
    """One rank of several that are not there: nobody to take weights over from."""

    def start_alike(self) -> None:
        pass


def all_reduce(ranks: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Stand-in for DDP's hook of a bucket, which by itself asks the fake group's work for a result that it has not."""
    averaged = bucket.buffer().div_(ranks)
    dist.all_reduce(averaged)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(averaged)
    return done


@contextlib.contextmanager
def attention_as_on_gpus() -> Iterator[None]:
    """SDPA keeps for its backward pass what fused kernels of GPUs keep, with dropout as without."""
    attention = functional.scaled_dot_product_attention

    def fused(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        **more: Any,
    ) -> torch.Tensor:
        return attention(query, key, value, attn_mask=attn_mask, **more)

    with replaced(functional, "scaled_dot_product_attention", fused):
        yield


@contextlib.contextmanager
def collected() -> Iterator[Callable[[], int]]:
    """Garbage in cycles, as the closures of transformers' masks leave it, goes when told and at no other time."""
    automatic = gc.isenabled()
    gc.disable()
    try:
        yield gc.collect
    finally:
        if automatic:
            gc.enable()
