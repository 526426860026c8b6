"""The simulated device is itself as a GPU is: memory, events, the clock, random streams, forks, NCCL's works."""

import pytest

from tests.gpu.machine import OnGPUsError


def _memory():
    import torch

    before = torch.cuda.memory_allocated()
    x = torch.zeros(1000, device="cuda")
    y = x * 2
    held = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    del y
    z = torch.empty(250, device="cuda:1")
    return (
        held,
        torch.cuda.memory_allocated() - before,
        torch.cuda.max_memory_allocated() - before,
        torch.cuda.memory_allocated(1),
        z.device.index,
    )


def test_memory_is_counted_on_each_device(gpus):
    assert gpus.run(_memory) == (8000, 4000, 8000, 1000, 1)


def _kernels():
    import gpu_sim
    import torch

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
    counts, traced, where = gpus.run(_kernels)
    assert counts == [(1, 0), (0, 0), (1, 1), (1, 1), (3, 1), (3, 0), (0, 1)]
    assert traced == ["copy device to host"]
    assert where.startswith(__file__)


def _clock():
    import time

    import torch

    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    start.record()
    for _ in range(50):
        x.add_(1)
    end.record()
    reached, launched = end.query(), time.perf_counter() - began
    end.synchronize()
    return launched, reached, time.perf_counter() - began, start.elapsed_time(end), x.tolist()


def test_the_host_runs_ahead_of_the_devices_clock(gpus):
    launched, reached, waited, elapsed, values = gpus.run(_clock, environment={"GPU_SIM_KERNEL_US": "10000"})
    assert values == [51.0] * 4 and (not reached or launched >= 0.49)
    assert elapsed >= 499.9 and waited >= 0.49  # 50 kernels of 10 ms; launching may take as long as this machine likes
    assert waited >= launched


def _random():
    import torch

    torch.manual_seed(3)
    cpu = torch.rand(2)
    torch.manual_seed(3)
    torch.rand(3, device="cuda")
    torch.nn.functional.dropout(torch.ones(5, device="cuda"), 0.5)
    untouched = torch.equal(torch.rand(2), cpu)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    again = torch.rand(4, device="cuda")
    torch.cuda.manual_seed_all(3)
    one, other = torch.rand(4, device="cuda:0"), torch.rand(4, device="cuda:1")
    return untouched, torch.equal(first, again), torch.equal(one.cpu(), other.cpu())


def test_each_gpu_has_a_random_stream_of_its_own(gpus):
    assert gpus.run(_random) == (True, True, True)


def loaded_onto_the_gpu(folder):
    """What `torch.load` puts onto a GPU by its storages."""
    import torch

    saved = {"ones": torch.ones(3, 2), "counts": torch.arange(5)[1:3]}
    torch.save(saved, folder / "saved.pt")
    there = torch.load(folder / "saved.pt", map_location="cuda", weights_only=True)
    return {name: (str(tensor.device), tensor.tolist()) for name, tensor in there.items()}


def test_a_file_is_loaded_onto_a_gpu(gpus, tmp_path):
    assert gpus.run(loaded_onto_the_gpu, tmp_path, gpus=1) == {
        "ones": ("cuda:0", [[1.0, 1.0]] * 3),
        "counts": ("cuda:0", [1, 2]),
    }


def _pinned():
    import gpu_sim
    import torch

    x = torch.arange(4.0, device="cuda")
    host = torch.zeros(4, pin_memory=True)
    syncs = gpu_sim.host_syncs()
    host.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    too_soon, unsynced = host.tolist(), gpu_sim.host_syncs() == syncs
    event.synchronize()
    return too_soon, unsynced, host.tolist()


def test_a_copy_to_pinned_memory_is_there_when_the_host_has_waited(gpus):
    too_soon, unsynced, at_last = gpus.run(_pinned)
    assert unsynced and too_soon != at_last and at_last == [0.0, 1.0, 2.0, 3.0]


def _backward_then_fork():
    import os

    import torch

    (torch.ones(2, requires_grad=True) * 2).sum().backward()  # on the CPU
    receiver, sender = os.pipe()
    if os.fork() == 0:
        try:
            (torch.ones(2, requires_grad=True) * 2).sum().backward()
            os.write(sender, b"it went")
        except RuntimeError as error:
            os.write(sender, str(error).encode())
        os._exit(0)
    os.wait()
    return os.read(receiver, 4000).decode()


def test_after_a_backward_a_fork_has_none(gpus):
    assert "fork-based multiprocessing" in gpus.run(_backward_then_fork)


def _ranks(function, *args, ranks=2, **kwargs):
    from course_lib.launching.launch import launch

    return launch(
        function, *args, num_processes=ranks, device="cuda", start_method="fork", timeout=240, stream=False, **kwargs
    )


def _works():
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    x = torch.ones(4, device="cuda")
    options = dist.AllreduceOptions()
    options.asyncOp = False
    synchronous = dist.group.WORLD.allreduce([x], options)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return synchronous is None, x.tolist(), dist.get_backend()


def test_a_synchronous_collective_has_no_work(gpus):
    for none, values, backend in gpus.run(_ranks, _works):
        assert none and values == [4.0] * 4 and backend == "nccl"


def _all_kinds():
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4.0, device="cuda") + rank

    def filled(*shape):
        return torch.full(shape, -1.0, device="cuda")

    seen = {}
    for name, op in {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}.items():
        y = x.clone()
        dist.all_reduce(y, op)
        seen[name] = y
    seen["gathered"] = filled(4 * ranks)
    dist.all_gather_into_tensor(seen["gathered"], x)
    seen["list"] = [filled(4) for _ in range(ranks)]
    dist.all_gather(seen["list"], x)
    seen["scattered"] = filled(4 // ranks)
    dist.reduce_scatter_tensor(seen["scattered"], x)
    seen["scattered avg"] = filled(4 // ranks)
    dist.reduce_scatter_tensor(seen["scattered avg"], x, dist.ReduceOp.AVG)
    seen["exchanged"] = filled(4)
    dist.all_to_all_single(seen["exchanged"], x)
    seen["uneven"] = filled(2 if rank == 0 else 6)
    dist.all_to_all_single(seen["uneven"], x, [1, 1] if rank == 0 else [3, 3], [1, 3])
    seen["exchanged list"] = [filled(2) for _ in range(ranks)]
    dist.all_to_all(seen["exchanged list"], list(x.chunk(ranks)))
    seen["broadcast"] = x.clone()
    dist.broadcast(seen["broadcast"], 1)
    seen["reduced"] = x.clone()
    dist.reduce(seen["reduced"], 1)
    seen["dealt"] = filled(4)
    dist.scatter(seen["dealt"], [x, x + 10] if rank == 0 else None, src=0)
    seen["collected"] = [filled(4) for _ in range(ranks)] if rank == 0 else None
    dist.gather(x, seen["collected"], dst=0)
    with dist._coalescing_manager(device=torch.device("cuda", rank), async_ops=True) as manager:
        seen["coalesced"] = [x.clone(), x.clone() * 2]
        for each in seen["coalesced"]:
            dist.all_reduce(each)
    manager.wait()
    dist.barrier()
    if rank == 0:
        seen["reduced"] = seen["uneven"] = None  # what is left on another rank than the root is nobody's
    return torch.utils._pytree.tree_map(lambda t: t.tolist() if isinstance(t, torch.Tensor) else t, seen)


def test_every_collective_brings_what_gloo_brings(gpus):
    first, second = gpus.run(_ranks, _all_kinds)
    a, b = [0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]
    total, mean = [1.0, 3.0, 5.0, 7.0], [0.5, 1.5, 2.5, 3.5]
    for seen in (first, second):
        assert (seen["sum"], seen["avg"], seen["max"]) == (total, mean, b)
        assert (seen["gathered"], seen["list"], seen["broadcast"]) == (a + b, [a, b], b)
        assert seen["coalesced"] == [total, [2 * each for each in total]]
    assert (first["scattered"], second["scattered"]) == (total[:2], total[2:])
    assert (first["scattered avg"], second["scattered avg"]) == (mean[:2], mean[2:])
    assert (first["exchanged"], second["exchanged"]) == ([0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0])
    assert second["uneven"] == [1.0, 2.0, 3.0, 2.0, 3.0, 4.0]
    assert (first["exchanged list"], second["exchanged list"]) == ([[0.0, 1.0], [1.0, 2.0]], [[2.0, 3.0], [3.0, 4.0]])
    assert second["reduced"] == total and (first["dealt"], second["dealt"]) == (a, [10.0, 11.0, 12.0, 13.0])
    assert first["collected"] == [a, b]


def _bound_to_a_device():
    import gpu_sim
    import torch
    import torch.distributed as dist

    rank = int(__import__("os").environ["RANK"])
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    x = torch.full((4,), float(rank), device="cuda")
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    dist.all_reduce(x)
    return x.tolist(), gpu_sim.findings()


def test_a_group_bound_to_a_device(gpus):
    assert gpus.run(_ranks, _bound_to_a_device) == [([0.0] * 4, [])] * 2


def _poison():
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    x = torch.ones(4, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    too_soon = (x * 1).tolist()
    work.wait()
    return too_soon, x.tolist()


def test_what_has_not_been_waited_for_is_garbage(gpus):
    for too_soon, then in gpus.run(_ranks, _poison):
        assert too_soon[0] > 1e29 and then == [2.0] * 4


def test_what_a_function_raises_is_raised_here(gpus):
    with pytest.raises(OnGPUsError, match="ZeroDivisionError"):
        gpus.run(eval, "1 / 0")
    with pytest.raises(OnGPUsError, match="not done after"):
        gpus.run(eval, "__import__('time').sleep(60)", timeout=1)
