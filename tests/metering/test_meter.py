"""The meter on real ranks: our own calls, DDP, FSDP2 and DeepSpeed are seen, with the right counts, bytes and times."""

import gc
import math
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

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
from tests.torch_versions import FSDP2_ON_CPUS, SYNCHRONOUS_IS_TOLD, has, needs

WIDTH, UNITS = 32, 3
PARAMETERS = UNITS * WIDTH * (WIDTH + 1)  # 3168: even, so that two ranks split it without padding


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))


def named(meter):
    return [(each.name, each.bytes, each.ranks) for each in meter.collectives]


def own_calls():
    """What a rank issues through Python, by two groups of four ranks."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    trio = dist.new_group([1, 2, 3])
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
    assert all(c.end >= c.start for c in meter.collectives), [c for c in meter.collectives if math.isnan(c.end)]
    with Meter() as after:
        pass
    dist.all_reduce(whole)
    assert not after.collectives
    try:
        with Meter(), Meter():
            pass
    except CourseError as error:
        refusal = str(error)
    with Meter() as again:  # the refusal left nothing behind
        dist.all_reduce(whole)
    return {
        "seen": named(meter),
        "sent": [c.sent for c in meter.collectives],
        "refusal": refusal,
        "dtypes": [c.dtype for c in meter.collectives[:2]],
        "bytes_sent": meter.bytes_sent,
        "again": named(again),
        "table": meter.table()[0],
        "total": meter.total("all_reduce"),
    }


def replicated():
    """DDP: its reducer is C++, and never enters torch.distributed's Python functions."""
    model = chain()
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group([0, 1]))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(4, WIDTH)
    with Meter(wrapped, optimizer) as single, wrapped.no_sync():
        wrapped(batch).sum().backward()
    with Meter(wrapped, optimizer) as meter:
        wrapped(batch).sum().backward()
        optimizer.step()
    kinds = [span.name for span in meter.timeline if span.kind == "compute"]
    return {
        "without": named(single),
        "seen": named(meter),
        "sent": meter.bytes_sent,
        "resident": meter.resident,
        "compute": list(dict.fromkeys(kinds)),
        "spans": [(s.start, s.end) for s in meter.timeline],
    }


def sharded():
    """FSDP2, a unit a layer and the root without parameters of its own."""
    model = chain()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(4, WIDTH)
    debug = CommDebugMode()
    with debug:
        model(batch).sum().backward()
    optimizer.zero_grad()
    with Meter(model, optimizer) as meter:
        model(batch).sum().backward()
        optimizer.step()
    counts = {str(op).rpartition(".")[-1]: count for op, count in debug.get_comm_counts().items()}
    return {
        "oracle": counts,
        "gathered": meter.count("all_gather"),
        "scattered": meter.count("reduce_scatter"),
        "bytes": (meter.total("all_gather"), meter.total("reduce_scatter")),
        "sent": meter.bytes_sent,
        "resident": meter.resident,
        "peak": meter.peak,
    }


def overlapping():
    """The same all-reduce waited for at once, and while this rank computes.

    The other rank begins in the midst of that, so none has ended before, however busy the machine is.
    """
    payload, matrix = torch.ones(1 << 20), torch.ones(300, 300)
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
            if dist.get_rank() != first:
                store.wait([f"rank {first} computes in turn {first}"])
            work = dist.all_reduce(payload, async_op=True)
            with meter.compute("product"):
                store.set(f"rank {dist.get_rank()} computes in turn {first}", "")
                matrix @ matrix
            work.wait()
    return [
        (m.overlap_seconds, m.communication_seconds, m.exposed_seconds)
        for m in (blocking, inside, hidden[dist.get_rank()])
    ]


def functional():
    """The functional collectives, which DTensor issues; gloo tells the end of a reduce-scatter only by the wait."""
    payload, group = torch.ones(64), list(range(dist.get_world_size()))
    with Meter() as meter, meter.compute("all"):
        funcol.all_reduce(payload, "sum", group).sum()
        funcol.reduce_scatter_tensor(payload, "sum", 0, group).sum()
    with Meter() as pending:
        work = dist.reduce_scatter_tensor(torch.empty(32), payload, async_op=True)
    work.wait()
    return {
        "seen": [c.name for c in meter.collectives],
        "ended": [c.end >= c.start for c in meter.collectives],
        "overlap": meter.overlap_seconds < meter.communication_seconds,
        "never": pending.collectives[0].end,
        "span": pending.timeline[0].end <= pending.end,
    }


def kept():
    """Bytes resident, of tensors whose sizes are known."""
    found: dict[str | int, Any] = {}
    model = nn.ModuleDict({"embed": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    with Meter(model) as meter:
        pass
    found["tied"] = meter.resident
    deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    for rows in (10, 20):
        with Meter(deep) as meter:
            deep(torch.ones(rows, 8)).sum().backward()
            gc.collect()
        found[rows] = meter.resident["activations"], meter.peak["activations"]
    with torch.no_grad(), Meter(deep) as meter:
        deep(torch.ones(20, 8))
    found["no_grad"] = meter.peak["activations"]
    parts = {"parameters": [torch.ones(10), torch.ones(6)], "communication buffers": [torch.ones(100)]}
    parts["parameters"].append(parts["parameters"][0][2:5])  # a view adds nothing
    with Meter(deep, resident=lambda: parts) as meter:
        dist.all_reduce(torch.ones(1000))
        parts["communication buffers"][0].untyped_storage().resize_(0)
    found["engine"] = meter.resident, meter.peak
    with Meter() as meter:
        sent = torch.ones(50)
        dist.all_reduce(sent)
        again = sent.view(5, 10)
        dist.all_reduce(again)
        del again
        sent.untyped_storage().resize_(0)
    found["buffers"] = meter.resident["communication buffers"], meter.peak["communication buffers"]
    return found


def two_ranks():
    dist.init_process_group("gloo")
    return {
        "ddp": replicated(),
        "fsdp": sharded() if has(FSDP2_ON_CPUS) else None,
        "overlap": overlapping(),
        "kept": kept(),
        "functional": functional(),
    }


@pytest.fixture(scope="module")
def four():
    return launch(own_calls, num_processes=4, timeout=240)


@pytest.fixture(scope="module")
def two():
    return launch(two_ranks, num_processes=2, timeout=240)


def test_own_calls_in_order_with_their_payload(four):
    all_four = (0, 1, 2, 3)
    common: list[tuple] = [
        ("all_reduce", 384, all_four),
        ("all_reduce", 192, all_four),
        ("all_gather", 384, all_four),
        ("all_gather", 1536, all_four),
        ("reduce_scatter", 384, all_four),
        ("all_to_all", 384, all_four),
        ("broadcast", 384, all_four),
        ("reduce", 384, all_four),
        ("barrier", 0, all_four),
    ]
    pair, trio = ("all_reduce", 384, (0, 1)), ("all_reduce", 384, (1, 2, 3))
    own: list[list[tuple]] = [
        [pair, ("send", 384, (0, 3))],
        [pair, trio, ("send", 384, (1, 2)), ("recv", 384, (1, 2))],
        [trio, ("send", 384, (2, 1)), ("recv", 384, (2, 1))],
        [trio, ("recv", 384, (3, 0))],
    ]
    for rank in range(4):
        assert four[rank]["seen"] == common + own[rank]
        assert four[rank]["dtypes"] == [torch.float32, torch.bfloat16]
        assert four[rank]["table"] == {
            "name": "all_reduce",
            "dtype": "float32",
            "ranks": all_four,
            "calls": 1,
            "bytes": 384,
            "sent": 576,
        }
        assert four[rank]["total"] == 384 + 192 + sum(size for name, size, _ in own[rank] if name == "all_reduce")


def test_bytes_sent_under_the_ring_model(four):
    # all_reduce 2(N-1)/N, gathers, scatters and exchanges (N-1)/N; broadcast from 1 ends at 0, reduce at 2.
    first = [576, 288, 288, 1152, 288, 288]
    broadcast, reduce = [0, 384, 384, 384], [384, 384, 0, 384]
    tail = [[384, 384], [384, 512, 384, 0], [512, 384, 0], [512, 0]]
    for rank in range(4):
        assert four[rank]["sent"] == [*first, broadcast[rank], reduce[rank], 0, *tail[rank]]
        assert four[rank]["bytes_sent"] == sum(four[rank]["sent"])


def test_a_second_meter_is_refused_and_leaves_nothing_behind(four):
    assert "a meter is running already" in four[0]["refusal"]
    assert four[0]["again"] == [("all_reduce", 384, (0, 1, 2, 3))]


def test_ddp_reduces_four_bytes_per_parameter(two):
    for rank in two:
        found = rank["ddp"]
        assert found["without"] == []  # no_sync
        assert {name for name, _, _ in found["seen"]} == {"all_reduce"}
        assert sum(size for _, size, _ in found["seen"]) == 4 * PARAMETERS == found["sent"]
        assert found["compute"] == ["forward", "backward", "step"]
        assert all(start <= end for start, end in found["spans"])


def test_ddp_holds_the_formulas_bytes(two):
    resident = two[0]["ddp"]["resident"]
    steps = 4 * 2 * UNITS  # AdamW keeps a step count of 4 bytes for each of its tensors
    assert resident["parameters"] == resident["gradients"] == 4 * PARAMETERS
    assert resident["optimizer states"] == 8 * PARAMETERS + steps
    assert resident["communication buffers"] == 4 * PARAMETERS  # the reducer's buckets


@needs(FSDP2_ON_CPUS)
def test_fsdp2_gathers_and_scatters_as_torch_counts_them(two):
    for rank in two:
        found = rank["fsdp"]
        assert found["gathered"] == sum(n for op, n in found["oracle"].items() if "allgather" in op) == 2 * UNITS
        assert found["scattered"] == sum(n for op, n in found["oracle"].items() if "reduce_scatter" in op) == UNITS
        assert found["bytes"] == (2 * 4 * PARAMETERS, 4 * PARAMETERS)
        assert found["sent"] == 3 * 4 * PARAMETERS // 2


@needs(FSDP2_ON_CPUS)
def test_fsdp2_holds_half_and_gathers_a_unit_at_a_time(two):
    for rank in two:
        resident, peak = rank["fsdp"]["resident"], rank["fsdp"]["peak"]
        half, unit = 4 * PARAMETERS // 2, 4 * PARAMETERS // UNITS
        assert resident["parameters"] == resident["gradients"] == half
        assert resident["optimizer states"] == 2 * half + 4 * 2 * UNITS
        assert half + unit <= peak["parameters"] < half + UNITS * unit


def test_overlap_is_zero_when_blocking_and_positive_behind_compute(two):
    for rank in two:
        blocking, inside, hidden = rank["overlap"]
        # Before, what the rank does between a call and its wait counts as overlap.
        for overlap, communication, exposed in (blocking, inside) if has(SYNCHRONOUS_IS_TOLD) else (blocking,):
            assert overlap == 0 and exposed == communication > 0
        assert 0 < hidden[0] <= hidden[1]


def test_functional_collectives_are_seen_with_their_waits(two):
    for rank in two:
        found = rank["functional"]
        assert found["seen"] == ["all_reduce", "reduce_scatter"]
        assert found["ended"] == [True, True] and found["overlap"] and found["span"]
        assert math.isnan(found["never"])


def test_storages_are_counted_once_and_while_they_live(two):
    found = two[0]["kept"]
    assert found["tied"]["parameters"] == 10 * 8 * 4
    # Two layers of 8 columns: each Tanh saves its output, and so does the second Linear, the same storage.
    assert found[10] == (0, 2 * 10 * 8 * 4)
    assert found[20] == (0, 2 * 20 * 8 * 4)
    assert found["no_grad"] == 0
    now, peak = found["engine"]
    assert (now["parameters"], peak["parameters"]) == (64, 64)
    assert (now["communication buffers"], peak["communication buffers"]) == (0, 400)
    assert found["buffers"] == (0, 200)


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


def through_deepspeed():
    """Stages 1, 2 and 3 on the same ranks, one after the other."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    from course_lib.training.engines.with_deepspeed import leave_shared_memory_operator_out

    leave_shared_memory_operator_out()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ.pop("ACCELERATE_USE_CPU", None)
    found = {}
    for stage in (1, 2, 3):
        AcceleratorState._reset_state(reset_partial_state=True)
        zero = {"stage": stage, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5}
        if stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
        plugin = DeepSpeedPlugin(
            hf_ds_config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 1,
                "zero_optimization": zero,
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            }
        )
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
        model = chain()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for _ in range(2):  # the first step allocates and traces
            with Meter(model, optimizer) as meter:
                accelerator.backward(model(torch.ones(2, WIDTH)).sum())
                optimizer.step()
                optimizer.zero_grad()
        floats = [each for each in meter.collectives if each.dtype == torch.float32 and each.bytes > 100]
        found[stage] = {
            "moved": {
                name: sum(c.bytes for c in floats if c.name == name)
                for name in ("all_reduce", "all_gather", "reduce_scatter")
            },
            "resident": meter.resident,
            "peak": meter.peak,
            "compute": {span.name for span in meter.timeline if span.kind == "compute"},
        }
    return found


def test_deepspeed_is_seen_at_every_stage():
    ranks = launch(through_deepspeed, num_processes=2, timeout=880)
    whole, half = 4 * PARAMETERS, 4 * PARAMETERS // 2
    for found in ranks:
        assert sorted(found) == [1, 2, 3]
        for stage in (1, 2):
            assert found[stage]["moved"]["all_gather"] == whole
            assert found[stage]["moved"]["all_reduce"] + found[stage]["moved"]["reduce_scatter"] == whole
            assert found[stage]["resident"]["parameters"] == whole
        assert found[3]["moved"]["reduce_scatter"] == whole
        assert found[3]["moved"]["all_gather"] >= whole
        assert found[3]["resident"]["parameters"] == half
        assert found[3]["peak"]["parameters"] > half
        for stage in found:
            # the fp32 masters of this rank's half, and Adam's two moments of them
            assert 3 * half <= found[stage]["resident"]["optimizer states"] < 3 * half + 64
            assert found[stage]["compute"] == {"forward", "backward", "step"}
