"""The simulated device is itself as a GPU is: kernels, host syncs, pinned memory, NCCL's works and collectives."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from tests.gpu.machine import OnGPUsError, on_gpu_ranks

pytestmark = pytest.mark.simulated("it looks at the simulated device itself")


def counted():
    import gpu_sim

    x, counts = torch.ones(4, device="cuda"), []
    for work in (
        lambda: x + 1,
        lambda: x.view(2, 2),
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: x[x > 0],
        lambda: torch._foreach_mul_([x, x.clone()], 2),
        lambda: torch.cuda.synchronize(),
    ):
        kernels, syncs = gpu_sim.kernels(), gpu_sim.host_syncs()
        work()
        counts.append((gpu_sim.kernels() - kernels, gpu_sim.host_syncs() - syncs))
    with gpu_sim.tracing_syncs() as syncs:
        x.tolist()
    return counts, [sync.what for sync in syncs], syncs[0].where


def test_kernels_and_host_syncs_are_counted(gpus):
    counts, traced, where = gpus.run(counted)
    assert counts == [(1, 0), (0, 0), (1, 1), (1, 1), (3, 1), (3, 0), (0, 1)]
    assert traced == ["copy device to host"]
    assert where.startswith(__file__)


def pinned():
    import gpu_sim

    x, host, event = torch.arange(4.0, device="cuda"), torch.zeros(4, pin_memory=True), torch.cuda.Event()
    syncs = gpu_sim.host_syncs()
    host.copy_(x, non_blocking=True)
    event.record()
    assert host.tolist() != [0.0, 1.0, 2.0, 3.0] and gpu_sim.host_syncs() == syncs
    event.synchronize()
    assert host.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_copy_to_pinned_memory_is_there_when_the_host_has_waited(gpus):
    gpus.run(pinned)


@on_gpu_ranks(2)
def test_a_synchronous_collective_has_no_work_and_without_a_wait_there_is_garbage():
    x, options = torch.ones(4, device="cuda"), dist.AllreduceOptions()
    options.asyncOp = False
    assert dist.group.WORLD.allreduce([x], options) is None
    work = dist.all_reduce(x, async_op=True)
    assert (x * 1)[0] > 1e29
    work.wait()
    assert x.tolist() == [4.0] * 4


def every_collective(device):
    """What each brings to this rank; of the two ranks' reductions to a root, what it brings there."""
    rank = dist.get_rank()
    x = torch.arange(4.0, device=device) + rank

    def filled(*shape):
        return torch.full(shape, -1.0, device=device)

    seen = {"sum": x.clone(), "max": x.clone(), "broadcast": x.clone(), "reduced": x.clone()}
    seen |= {"gathered": filled(8), "list": [filled(4), filled(4)], "scattered": filled(2), "exchanged": filled(4)}
    seen |= {"uneven": filled(6 if rank else 2), "dealt": filled(4), "collected": [filled(4), filled(4)]}
    dist.all_reduce(seen["sum"])
    dist.all_reduce(seen["max"], dist.ReduceOp.MAX)
    dist.broadcast(seen["broadcast"], 1)
    dist.reduce(seen["reduced"], 1)
    dist.all_gather_into_tensor(seen["gathered"], x)
    dist.all_gather(seen["list"], x)
    dist.reduce_scatter_tensor(seen["scattered"], x)
    dist.all_to_all_single(seen["exchanged"], x)
    dist.all_to_all_single(seen["uneven"], x, [3, 3] if rank else [1, 1], [1, 3])
    dist.scatter(seen["dealt"], None if rank else [x, x + 10], src=0)
    dist.gather(x, None if rank else seen["collected"], dst=0)
    dist.barrier()
    return {name: value for name, value in seen.items() if name != "reduced" or rank == 1}


@on_gpu_ranks(2, backend="cpu:gloo,cuda:nccl")
def test_every_collective_brings_what_gloo_brings():
    found, wanted = every_collective("cuda"), every_collective("cpu")
    assert_close(found, wanted, check_device=False, rtol=0, atol=0)
    mean, x = torch.empty(2, device="cuda"), torch.arange(4.0, device="cuda")
    dist.reduce_scatter_tensor(mean, x + dist.get_rank(), dist.ReduceOp.AVG)
    assert_close(mean, found["scattered"] / 2)
    parts = [torch.empty(2, device="cuda") for _ in range(2)]
    dist.all_to_all(parts, list((x + dist.get_rank()).chunk(2)))
    assert_close(torch.cat(parts), found["exchanged"])
    with dist._coalescing_manager(device=mean.device, async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(mean)
    manager.wait()
    assert x.tolist() == [0.0, 2.0, 4.0, 6.0] and mean.tolist() == [3.0, 5.0]


@on_gpu_ranks(2, bound=True)
def test_a_group_bound_to_a_device():
    import gpu_sim

    rank = dist.get_rank()
    x = torch.full((4,), float(rank), device="cuda")
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    dist.all_reduce(x)
    assert x.tolist() == [0.0] * 4 and gpu_sim.findings() == []


def test_what_takes_too_long_is_ended(gpus):
    with pytest.raises(OnGPUsError, match="not done after"):
        gpus.run(eval, "__import__('time').sleep(60)", timeout=1)
