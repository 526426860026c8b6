"""The meter on real ranks: our own calls, DDP, FSDP2 and DeepSpeed are seen, with the right counts, bytes and times."""

import gc
import math
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from course_lib.errors import CourseError, LaunchError
from course_lib.launching import netns
from course_lib.launching.launch import launch
from course_lib.launching.netns import in_own_network
from course_lib.metering.meter import Meter
from tests.ranks import on_ranks
from tests.torch_versions import FSDP2_ON_CPUS, SYNCHRONOUS_IS_TOLD, has, needs

WIDTH, UNITS = 32, 3
PARAMETERS = UNITS * WIDTH * (WIDTH + 1)  # 3168: even, so that two ranks split it without padding
WHOLE, HALF, UNIT = 4 * PARAMETERS, 4 * PARAMETERS // 2, 4 * PARAMETERS // UNITS  # bytes
STEP_COUNTS = 4 * 2 * UNITS  # AdamW keeps one of 4 bytes for each of its tensors
ALL = (0, 1, 2, 3)


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))


def named(meter):
    return [(each.name, each.bytes, each.ranks) for each in meter.collectives]


def one_step(model, optimizer):
    """Of the model in a meter."""
    with Meter(model, optimizer) as meter:
        model(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
    return meter


# What each of four ranks calls below, its payload, its ranks, and what this rank sends of it under the ring model:
# all_reduce 2(N-1)/N, gathers, scatters and exchanges (N-1)/N; broadcast from 1 ends at 0, reduce at 2.
CALLS = [
    ("all_reduce", 384, ALL, 576),
    ("all_reduce", 192, ALL, 288),
    ("all_gather", 384, ALL, 288),
    ("all_gather", 1536, ALL, 1152),
    ("reduce_scatter", 384, ALL, 288),
    ("all_to_all", 384, ALL, 288),
]
PAIR, TRIO = ("all_reduce", 384, (0, 1), 384), ("all_reduce", 384, (1, 2, 3), 512)
OF_RANK = [
    [PAIR, ("send", 384, (0, 3), 384)],
    [PAIR, TRIO, ("send", 384, (1, 2), 384), ("recv", 384, (1, 2), 0)],
    [TRIO, ("send", 384, (2, 1), 384), ("recv", 384, (2, 1), 0)],
    [TRIO, ("recv", 384, (3, 0), 0)],
]


@on_ranks(4)
def test_own_calls_in_order_with_their_payload_and_the_bytes_that_a_ring_sends():
    rank, pair, trio = dist.get_rank(), dist.new_group([0, 1]), dist.new_group([1, 2, 3])
    whole = torch.ones(96)  # 384 bytes: divisible by 2, 3 and 4 ranks
    with Meter() as meter:
        dist.all_reduce(whole)
        dist.all_reduce(whole.bfloat16(), async_op=True).wait()
        dist.all_gather_into_tensor(torch.empty(96), torch.ones(24))
        dist.all_gather([torch.empty(96) for _ in range(4)], whole)
        dist.reduce_scatter_tensor(torch.empty(24), whole)
        dist.all_to_all_single(torch.empty(96), whole)
        dist.broadcast(whole, src=1)
        dist.reduce(whole, dst=2)
        dist.barrier()
        if rank in (0, 1):
            dist.all_reduce(whole, group=pair)
        if rank in (1, 2, 3):
            dist.all_reduce(whole, group=trio)
        if rank == 0:
            dist.send(whole, dst=3)
        if rank == 3:
            dist.recv(whole, src=0)
        if rank in (1, 2):
            there = [dist.P2POp(dist.isend, whole, 3 - rank), dist.P2POp(dist.irecv, torch.empty(96), 3 - rank)]
            for work in dist.batch_isend_irecv(there):
                work.wait()
    dist.all_reduce(whole)  # unseen
    rooted = [("broadcast", 384, ALL, 384 if rank else 0), ("reduce", 384, ALL, 0 if rank == 2 else 384)]
    expected = [*CALLS, *rooted, ("barrier", 0, ALL, 0), *OF_RANK[rank]]
    assert [(each.name, each.bytes, each.ranks, each.sent) for each in meter.collectives] == expected
    assert [each.dtype for each in meter.collectives[:2]] == [torch.float32, torch.bfloat16]
    assert all(each.end >= each.start for each in meter.collectives)
    assert meter.bytes_sent == sum(sent for *_, sent in expected)
    first = {"name": "all_reduce", "dtype": "float32", "ranks": ALL, "calls": 1, "bytes": 384, "sent": 576}
    assert meter.table()[0] == first
    assert meter.total("all_reduce") == sum(size for name, size, *_ in expected if name == "all_reduce")


@on_ranks(2)
def test_a_second_meter_is_refused_and_leaves_nothing_behind():
    with pytest.raises(CourseError, match="a meter is running already"), Meter(), Meter():
        pass
    with Meter() as again:
        dist.all_reduce(torch.ones(96))
    assert named(again) == [("all_reduce", 384, (0, 1))]


@on_ranks(2)
def test_ddp_reduces_four_bytes_per_parameter_and_holds_the_formulas_bytes():
    """Its reducer is C++, and never enters torch.distributed's Python functions."""
    model = chain()
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group([0, 1]))
    optimizer = torch.optim.AdamW(model.parameters())
    with Meter(wrapped, optimizer) as single, wrapped.no_sync():
        wrapped(torch.ones(4, WIDTH)).sum().backward()
    assert named(single) == []
    meter = one_step(wrapped, optimizer)
    assert {name for name, *_ in named(meter)} == {"all_reduce"}
    assert meter.total("all_reduce") == meter.bytes_sent == WHOLE
    spans = [span.name for span in meter.timeline if span.kind == "compute"]
    assert list(dict.fromkeys(spans)) == ["forward", "backward", "step"]
    assert all(span.start <= span.end for span in meter.timeline)
    assert meter.resident["parameters"] == meter.resident["gradients"] == WHOLE
    assert meter.resident["optimizer states"] == 2 * WHOLE + STEP_COUNTS
    assert meter.resident["communication buffers"] == WHOLE  # the reducer's buckets


@needs(FSDP2_ON_CPUS)
@on_ranks(2)
def test_fsdp2_gathers_and_scatters_as_torch_counts_them_and_holds_half_and_a_unit_at_a_time():
    """A unit a layer, and the root without parameters of its own."""
    model, mesh = chain(), init_device_mesh("cpu", (2,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with CommDebugMode() as debug:
        model(torch.ones(4, WIDTH)).sum().backward()
    optimizer.zero_grad()
    meter = one_step(model, optimizer)
    theirs = Counter()
    for operator, count in debug.get_comm_counts().items():
        theirs["gather" if "allgather" in str(operator) else "scatter"] += count
    assert theirs == {"gather": 2 * UNITS, "scatter": UNITS}
    assert (meter.count("all_gather"), meter.count("reduce_scatter")) == (2 * UNITS, UNITS)
    assert (meter.total("all_gather"), meter.total("reduce_scatter")) == (2 * WHOLE, WHOLE)
    assert meter.bytes_sent == 3 * HALF
    assert meter.resident["parameters"] == meter.resident["gradients"] == HALF
    assert meter.resident["optimizer states"] == 2 * HALF + STEP_COUNTS
    assert HALF + UNIT <= meter.peak["parameters"] < HALF + UNITS * UNIT


@on_ranks(2)
def test_overlap_is_zero_when_blocking_and_positive_behind_compute():
    """The same all-reduce waited for at once, and while this rank computes.

    The other rank begins in the midst of that, so none has ended before, however busy the machine is.
    """
    payload, matrix, rank = torch.ones(1 << 20), torch.ones(300, 300), dist.get_rank()
    dist.all_reduce(payload)
    with Meter() as blocking:
        dist.all_reduce(payload)
        with blocking.compute("product"):
            matrix @ matrix
    with Meter() as inside, inside.compute("product"):
        dist.all_reduce(payload)
        matrix @ matrix
    hidden, store = [Meter(), Meter()], dist.distributed_c10d._get_default_store()
    for first, meter in enumerate(hidden):
        with meter:
            if rank != first:
                store.wait([f"rank {first} computes in turn {first}"])
            work = dist.all_reduce(payload, async_op=True)
            with meter.compute("product"):
                store.set(f"rank {rank} computes in turn {first}", "")
                matrix @ matrix
            work.wait()
    # Before, what the rank does between a call and its wait counts as overlap.
    for meter in (blocking, inside) if has(SYNCHRONOUS_IS_TOLD) else (blocking,):
        assert (meter.overlap_seconds, meter.exposed_seconds) == (0, meter.communication_seconds)
        assert meter.communication_seconds > 0
    assert 0 < hidden[rank].overlap_seconds <= hidden[rank].communication_seconds


@on_ranks(2)
def test_functional_collectives_are_seen_with_their_waits():
    """Which DTensor issues; gloo tells the end of a reduce-scatter only by the wait."""
    payload, group = torch.ones(64), list(range(2))
    with Meter() as meter, meter.compute("all"):
        funcol.all_reduce(payload, "sum", group).sum()
        funcol.reduce_scatter_tensor(payload, "sum", 0, group).sum()
    assert [(each.name, each.end >= each.start) for each in meter.collectives] == [
        ("all_reduce", True),
        ("reduce_scatter", True),
    ]
    assert meter.overlap_seconds < meter.communication_seconds
    with Meter() as pending:
        work = dist.reduce_scatter_tensor(torch.empty(32), payload, async_op=True)
    work.wait()
    assert math.isnan(pending.collectives[0].end) and pending.timeline[0].end <= pending.end


def held(meter, part):
    """Bytes now, and at the most."""
    return meter.resident[part], meter.peak[part]


def test_storages_are_counted_once():
    model = nn.ModuleDict({"embed": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    with Meter(model) as meter:
        pass
    assert meter.resident["parameters"] == 10 * 8 * 4


@pytest.mark.parametrize(("rows", "grad"), [(10, True), (20, True), (20, False)])
def test_activations_are_counted_while_they_live(rows, grad):
    """Two layers of 8 columns: each Tanh saves its output, and so does the second Linear, the same storage."""
    deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    with torch.set_grad_enabled(grad), Meter(deep) as meter:
        out = deep(torch.ones(rows, 8)).sum()
        if grad:
            out.backward()
        gc.collect()
    assert held(meter, "activations") == (0, 2 * rows * 8 * 4 if grad else 0)


@on_ranks(2)
def test_buffers_are_counted_while_they_live_and_a_view_adds_nothing():
    parameters = [torch.ones(10), torch.ones(6)]
    parts = {"parameters": [*parameters, parameters[0][2:5]], "communication buffers": [torch.ones(100)]}
    with Meter(nn.Linear(8, 8), resident=lambda: parts) as meter:
        dist.all_reduce(torch.ones(1000))
        parts["communication buffers"][0].untyped_storage().resize_(0)
    assert held(meter, "parameters") == (64, 64) and held(meter, "communication buffers") == (0, 400)
    with Meter() as meter:
        sent = torch.ones(50)
        dist.all_reduce(sent)
        dist.all_reduce(sent.view(5, 10))
        sent.untyped_storage().resize_(0)
    assert held(meter, "communication buffers") == (0, 200)


def crossing(numel):
    """Ring bytes of all ranks for one big all-reduce, and the kernel's count of them."""
    dist.init_process_group("gloo")
    payload = torch.ones(numel)
    dist.all_reduce(payload)
    dist.barrier()  # every rank's last transfer has ended
    wire = []
    for _ in range(3):
        with Meter() as meter:
            dist.barrier()  # no rank's transfer begins before every rank's stretch
            dist.all_reduce(payload)
            dist.barrier()
        wire.append(meter.wire_bytes)
    # The least: on a busy machine TCP sends some packets twice.
    return meter.bytes_sent * dist.get_world_size(), min(wire, key=lambda each: each or 0), meter.wire_reason


def test_bytes_on_the_wire_are_the_rings_or_there_is_a_reason():
    shared = launch(crossing, 1 << 10, num_processes=2, timeout=240)
    assert all(wire is None and "shared" in reason for _, wire, reason in shared)
    try:
        own = in_own_network(launch, crossing, 3 << 19, num_processes=3, timeout=240)
    except LaunchError as refused:
        assert "namespace" in str(refused)
        return
    for ring, wire, reason in own:
        assert ring == 4 * (3 << 19) * 4  # three ranks, each 4/3 of the payload of 4 bytes an element
        assert reason == "" and wire == pytest.approx(ring, rel=0.03)


def tcp_settings():
    return {
        name: int(path.read_text())
        for name in netns.TCP_SETTINGS
        if (path := Path("/proc/sys/net/ipv4", name)).exists()
    }


def test_nothing_is_sent_twice_in_ones_own_network():
    """Loopback loses nothing: what TCP sends again after some idle time of a busy machine would be counted twice."""
    before = tcp_settings()
    within = in_own_network(tcp_settings)
    assert within == {name: netns.TCP_SETTINGS[name] for name in before} and len(within) >= 1
    assert tcp_settings() == before != within, "the caller's network is as it was"


def test_what_fails_in_its_own_network_fails_for_the_caller():
    with pytest.raises((ZeroDivisionError, LaunchError)):
        in_own_network(lambda: 1 // 0)


def test_what_is_printed_there_reaches_the_callers_stream_and_a_daemon_is_not_awaited(capsys):
    """A notebook's stream is none that a fork can write to: there each line took a second, and was lost."""

    def print_and_leave():
        print("heard")
        return subprocess.Popen(["sleep", "1000"]).pid

    os.kill(in_own_network(print_and_leave), signal.SIGKILL)
    assert capsys.readouterr().out == "heard\n"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_is_seen_at_every_stage(ranks, stage):
    from tests.forked_process import import_deepspeed

    import_deepspeed()
    ranks(2, timeout=880)(through_deepspeed, stage)


def through_deepspeed(stage):
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    from course_lib.training.engines.with_deepspeed import leave_shared_memory_operator_out

    leave_shared_memory_operator_out()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ.pop("ACCELERATE_USE_CPU", None)
    zero = {"stage": stage, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_optimization": zero}
    plugin = DeepSpeedPlugin(hf_ds_config=config | {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9})
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = chain()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):  # the first step allocates and traces
        with Meter(model, optimizer) as meter:
            accelerator.backward(model(torch.ones(2, WIDTH)).sum())
            optimizer.step()
            optimizer.zero_grad()
    moved = Counter()
    for each in meter.collectives:
        if each.dtype == torch.float32 and each.bytes > 100:
            moved[each.name] += each.bytes
    if stage == 3:
        assert moved["reduce_scatter"] == WHOLE <= moved["all_gather"]
        assert meter.resident["parameters"] == HALF < meter.peak["parameters"]
    else:
        assert moved["all_reduce"] + moved["reduce_scatter"] == WHOLE
        assert moved["all_gather"] == meter.resident["parameters"] == WHOLE
    # the fp32 masters of this rank's half, and Adam's two moments of them
    assert 3 * HALF <= meter.resident["optimizer states"] < 3 * HALF + 64
    assert {span.name for span in meter.timeline if span.kind == "compute"} == {"forward", "backward", "step"}
