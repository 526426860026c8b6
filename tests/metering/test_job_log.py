"""What the ranks of somebody else's job write down: the counts of torch's own CommDebugMode, axes by their names."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from course_lib.launching.launch import launch
from course_lib.metering import job_report
from course_lib.metering.job_log import begin
from tests.torch_versions import FSDP2_ON_CPUS, needs

WIDTH, ROWS, UNITS = 16, 4, 2
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def counts(mode):
    """CommDebugMode's, by the names of the report: of ``c10d._allgather_base_`` this is ``all_gather``."""
    found = Counter()
    for operator, count in mode.get_comm_counts().items():
        (kind,) = [kind for kind in KINDS if kind.replace("_", "") in str(operator).replace("_", "")]
        found[kind] += count
    return found


def sharded_and_split(folder):
    """On 2 x 2 ranks a model that FSDP2 shards over dp and tensor parallelism splits over tp; and calls by hand."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(UNITS))
    )
    for block in model:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tool = begin({"folder": str(folder)})
    with CommDebugMode() as mode:
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        dist.all_reduce(torch.ones(8))
        dist.broadcast(torch.ones(8), 1)
    tool.end(None)
    dist.all_reduce(torch.ones(8))  # not of the job any more
    states = [each for state in optimizer.state.values() for each in state.values()]
    return counts(mode), sum(local_bytes(p) for p in model.parameters()), sum(map(local_bytes, states))


def local_bytes(tensor):
    return tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    returned = launch(sharded_and_split, folder, num_processes=4, device="cpu", timeout=360)
    return returned, job_report.read(folder)


@needs(FSDP2_ON_CPUS)
def test_each_rank_counts_what_torch_counts(job):
    returned, logs = job
    assert [log.rank for log in logs] == [0, 1, 2, 3]
    for log, (theirs, *_) in zip(logs, returned, strict=True):
        assert Counter(call.name for call in log.calls) == theirs and set(theirs) > {"all_gather", "reduce_scatter"}
        assert log.ended and all(call.ended and call.end >= call.start for call in log.calls)


@needs(FSDP2_ON_CPUS)
def test_axes_have_the_names_of_the_mesh_and_the_bytes_of_the_formula(job):
    rows = {(row["axis"], row["collective"]): row for row in job_report.table(job[1])}
    dp, tp = rows["dp", "all_gather"], rows["tp", "all_reduce"]
    assert (dp["groups"], tp["groups"]) == ([(0, 2), (1, 3)], [(0, 1), (2, 3)])
    local = UNITS * (WIDTH * WIDTH // 2 + WIDTH // 2 + WIDTH * WIDTH // 2 + WIDTH) * 4  # of a tp rank, float32
    scattered = rows["dp", "reduce_scatter"]
    assert (scattered["bytes"], scattered["sent"]) == (local, local // 2)
    assert tp["bytes"] >= UNITS * ROWS * WIDTH * 4 and tp["bytes"] % (ROWS * WIDTH) == 0
    reduced = rows["world", "all_reduce"]
    assert (reduced["calls"], reduced["groups"]) == (1, [(0, 1, 2, 3)])
    assert reduced["bytes"] == rows["world", "broadcast"]["bytes"] == 32


@needs(FSDP2_ON_CPUS)
def test_memory_is_that_of_the_optimizer(job):
    for (_, parameters, states), log in zip(*job, strict=True):
        assert len(log.step_ends) == 1
        assert log.held == {"parameters": parameters, "gradients": parameters, "optimizer states": states}
