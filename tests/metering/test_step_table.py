"""Where a step went, from made events: each moment belongs to one thing, on a CPU and on a GPU; clocks; the file."""

import math

import pytest
import torch

from course_lib.metering.collective_log import Collective
from course_lib.metering.intervals import common, without
from course_lib.metering.operators import Operator
from course_lib.metering.rank_clocks import Offset, offsets
from course_lib.metering.roofline import Peaks
from course_lib.metering.step_spans import EXPOSED, HOST, DeviceEvent, HostEvent, Parts, RankEvents, parts
from course_lib.metering.step_table import RankTable, StepTable, at_tokens, rows_of
from course_lib.metering.traces import MOST, of_steps

PEAKS = Peaks({"float32": 1e9}, memory=1e8, launch=1e-5, device="cpu", threads=1, link=1e7)
PHASES = [("data", 0.0, 1.0), ("forward", 1.0, 5.0), ("backward", 5.0, 8.0), ("optimizer", 8.0, 9.0)]
OPERATORS = {"addmm", "mm", "add", "copy_"}


def events(hosts, devices=(), flights=(), rank=0):
    return RankEvents(rank, "here", (0.0, 10.0), [("step 1", 0.0, 10.0)], PHASES, 7, hosts, devices, flights)


def by_phase(divided):
    """Seconds of each thing; all of them are the step's ten."""
    assert sum(divided.seconds.values()) == pytest.approx(10)
    found = {}
    for (phase, name), seconds in divided.seconds.items():
        found.setdefault(phase, {})[name] = pytest.approx(seconds)
    return found


def host(name, start, end, number=0, thread=7):
    return HostEvent(name, thread, start, end, number)


def test_on_a_cpu_the_outermost_operator_has_the_time():
    hosts = [
        host("aten::linear", 1, 3),
        host("aten::addmm", 1.5, 3),
        host("aten::copy_", 2, 2.5),  # inside: addmm's own
        host("aten::never_counted", 3, 4),
        host("aten::its_part", 3.2, 3.4),
        host("AddmmBackward0", 5, 7),
        host("aten::mm", 5.5, 6.5),
        host("aten::mm", 5, 9, thread=8),
    ]
    divided = parts(events(hosts, flights=[(6, 7.5), (9.5, 12)]), OPERATORS)
    assert by_phase(divided) == {
        "data": {HOST: 1},
        "forward": {"addmm": 1.5, "never_counted": 1, HOST: 1.5},
        "backward": {"mm": 1, EXPOSED: 1, HOST: 1},
        "optimizer": {HOST: 1},
        "between": {EXPOSED: 0.5, HOST: 0.5},
    }
    assert (divided.hidden, divided.under_way) == (0.5, 2.0)


def test_on_a_gpu_the_kernel_has_the_time_and_its_operator_the_name():
    hosts = [
        host("aten::addmm", 1, 1.1, 11),
        host("aten::copy_", 1.02, 1.05, 12),
        host("aten::mm", 5, 5.1, 13, thread=8),
    ]
    kernels = [
        DeviceEvent("gemm", 7, 4, 6, 11),
        DeviceEvent("memcpy", 8, 5.5, 6.5, 12),  # overlaps on another stream
        DeviceEvent("gemm", 7, 7, 8.5, 13),
        DeviceEvent("ncclDevKernel_AllReduce", 9, 6, 7, 0),
        DeviceEvent("nobody's", 7, 9.5, 9.75, 99),
    ]
    divided = parts(events(hosts, kernels), OPERATORS)
    assert by_phase(divided) == {
        "data": {HOST: 1},
        "forward": {HOST: 3, "addmm": 2.5},  # in forward, since that started it
        "backward": {EXPOSED: 0.5, "mm": 1.5},
        "optimizer": {HOST: 0.5},
        "between": {"nobody's": 0.25, HOST: 0.75},
    }
    assert (divided.hidden, divided.under_way) == (0.5, 1.0)


def test_rows_add_up_to_the_step_and_stand_beside_their_roofs():
    seconds = {("data", HOST): 2.0, ("forward", "addmm"): 4.0, ("forward", "add"): 1.0, ("optimizer", "add"): 2.0}
    seconds["backward", EXPOSED] = 1.0
    counted = [
        Operator("addmm", "m", "forward", "matmul", "float32", 2, 10**9, 10**6),
        Operator("add", "m", "forward", "pointwise", "float32", 5, 10**6, 2 * 10**7),
        Operator("all_reduce", "m", "backward", "collective", "float32", 1, 0, 10**7),
    ]
    rows = {(row.phase, row.group): row for row in rows_of(Parts(seconds, 0.5, 1.5), 2, counted, PEAKS)}
    assert sum(row.seconds for row in rows.values()) == 5.0
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    matmul = rows["forward", "matrix products"]
    assert (matmul.seconds, matmul.bound, matmul.floor, matmul.flops) == (2.0, "compute", 1.0, 10**9)
    assert rows["forward", "pointwise and norms"].bound == "memory" and rows["optimizer", "update"].seconds == 1.0
    assert (rows["backward", EXPOSED].bound, rows["backward", EXPOSED].floor) == ("link", 1.0)

    ranks = [RankTable(rank, "here", 5.0, list(rows.values()), 0.25, 0.75, PEAKS, 0.0, 1e-5) for rank in (0, 1)]
    table = StepTable([4, 5], (100, 100, 100), 1e9, None, ranks)
    assert table.mfu == 1e9 / 5.0 / 2e9
    text = table.markdown()
    assert "| forward    | matrix products" in text and "| whole step" in text and "MFU 10.0%" in text
    assert table.as_dict()["ranks"][1]["rows"][1]["phase"] == "forward"


def test_counts_at_other_tokens_lie_on_the_line_through_two_steps():
    def step(tokens):  # weights of 4,000 bytes, and 8 a token
        return [
            Operator("addmm", "m", "forward", "matmul", "float32", 1, 50 * tokens, 4000 + 8 * tokens),
            Operator("add_", "", "optimizer", "pointwise", "float32", 1, 7, 70),
        ]

    assert at_tokens([(100, step(100)), (300, step(300))], 220) == step(220)
    assert at_tokens([(100, step(100)), (100, step(100))], 220) == step(100)


def test_clocks_that_differ_are_found_within_their_bound():
    true, rounds = [0.0, 1234.5, -0.25], 20
    generator = torch.Generator().manual_seed(0)
    stamps = [[] for _ in true]
    for number in range(rounds):
        came = [number + delay for delay in (torch.rand(3, generator=generator) * 1e-3).tolist()]
        left = [max(came) + delay for delay in (torch.rand(3, generator=generator) * 1e-3).tolist()]
        for rank, own in enumerate(true):
            stamps[rank].append((came[rank] + own, left[rank] + own))
    divided = offsets(stamps)
    assert divided[0] == Offset(0, 0)
    for offset, own in zip(divided, true, strict=True):
        assert abs(offset.seconds - own) <= offset.error + 1e-9 and offset.error < 1e-3
    assert offsets([[], []]) == [Offset(0, 0)] * 2 and offsets([stamps[0], stamps[0][:]])[1].seconds == 0


def test_the_file_has_a_process_a_rank_on_the_first_ones_clock_and_a_bound_on_its_size():
    many = [host(f"aten::{number}", number * 1e-6, number * 1e-6 + 1e-7) for number in range(MOST + 50)]
    calls = [
        Collective("all_reduce", 64, torch.float32, (0, 1), 6.0, 7.0, 64),
        Collective("all_reduce", 64, torch.float32, (0, 1), 6.5, math.nan, 64),
    ]
    second = events([host("aten::mm", 5, 6)], [DeviceEvent("gemm", 7, 6, 7, 0)], rank=1)
    written = of_steps([(events(many), calls, Offset(0, 0)), (second, calls, Offset(2.0, 1e-5))])["traceEvents"]
    spans = [event for event in written if event["ph"] == "X"]
    assert sum(event["pid"] == 0 for event in spans) == MOST + 2
    (mm,) = [event for event in spans if event["name"] == "aten::mm"]
    assert (mm["pid"], mm["ts"], mm["dur"]) == (1, 5e6, 1e6)  # its clock is two seconds ahead
    threads = [event["args"]["name"] for event in written if event["name"] == "thread_name" and event["pid"] == 1]
    assert threads == ["phases", "host, training", "GPU, stream 7", "collectives: world", "collectives: world (2)"]
    collectives = [event for event in spans if event["cat"] == "collective" and event["pid"] == 1]
    assert [event["args"]["ended"] for event in collectives] == [True, False]


def test_lists_of_intervals():
    left, right = [(0, 2), (3, 5), (8, 9)], [(1, 4), (4.5, 8.5)]
    assert common(left, right) == [(1, 2), (3, 4), (4.5, 5), (8, 8.5)]
    assert without(left, right) == [(0, 1), (4, 4.5), (8.5, 9)]
    assert without([(0, 10)], [(1, 2), (3, 4)]) == [(0, 1), (2, 3), (4, 10)]
