"""Layers split over GPUs, by ours and by torch's: as one process on a CPU."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.parallel.topology import RankGrid
from course_lib.parallel.torch_engines.tensor_parallel import TorchTensorParallel
from course_lib.training.engines import process_group
from tests.parallel import tensor_cases as cases


def ours(model, **options):
    return TensorParallel(model, dist.group.WORLD, **options)


def torchs(model, **options):
    return TorchTensorParallel(model, init_device_mesh("cuda", (dist.get_world_size(),)), **options)


SPLIT = [
    (engine, kind, options)
    for engine in (ours, torchs)
    for kind, options in (
        ("gpt2", {}),
        ("gpt2", {"sequence": True}),
        ("bert", {"sequence": True}),
        ("llama", {"split_vocabulary": False}),
    )
] + [(ours, "llama", {"sequence": True})]


def join():
    torch.set_num_threads(1)
    process_group.use_own_gpu()
    dist.init_process_group(process_group.GPU_BACKENDS)
    return torch.device("cuda", torch.cuda.current_device())


def on_the_cpu(tensors):
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def findings():
    import gpu_sim

    return [str(each) for each in gpu_sim.findings()]


def split_over_all():
    device, found = join(), []
    for engine, kind, options in SPLIT:
        model = engine(cases.build(kind).to(device), **options)
        loss = cases.loss_of(model, {name: each.to(device) for name, each in cases.batch(kind).items()})
        loss.backward()
        gradients, weights = on_the_cpu(model.whole_gradients()), on_the_cpu(model.whole_weights())
        found.append(cases.differences(loss.cpu(), gradients, weights, *cases.oracle(kind)))
    return found, findings()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_split_model_is_the_whole_one(gpus, ranks):
    for found, alarms in gpus.ranks(ranks, split_over_all):
        assert alarms == []
        for case, each in zip(SPLIT, found, strict=True):
            assert each["scale"] > 0.01 and max(each["loss"], each["gradients"], each["weights"]) < 2e-6, (case, each)


def on_a_mesh():
    from torch.distributed.tensor import Shard, distribute_tensor

    device, grid = join(), RankGrid(2, 1, 2)
    mesh = grid.mesh(grid.groups())
    rows = distribute_tensor(torch.arange(8.0, device=device), mesh["tp"], [Shard(0)])
    return mesh.device_type, rows.to_local().device.type, rows.full_tensor().cpu().tolist(), findings()


def test_a_grid_of_gpus_is_a_mesh_of_gpus(gpus):
    for kind, local, whole, alarms in gpus.ranks(4, on_a_mesh):
        assert (kind, local, alarms) == ("cuda", "cuda", []) and whole == list(range(8))
