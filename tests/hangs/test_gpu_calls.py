"""Calls in a GPU's queue, without a GPU: when they end, what stands before them, and what NCCL says of them."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from course_lib.hangs import backend_records, watchdog
from course_lib.hangs.diagnosis import diagnose
from course_lib.hangs.pending_calls import AHEAD, Pending
from course_lib.hangs.rank_state import ENDED, ISSUED, WAITED_FOR
from course_lib.hangs.watchdog import Watchdog, read_reports
from course_lib.metering import collective_hooks, graph_captures
from course_lib.metering.collective_log import CollectiveLog
from tests.hangs.snapshots import blamed, call, rank
from tests.torch_versions import ERRORS_OF_BACKENDS, needs

GPU = torch.device("cuda", 0)


def gpu_call(serial, sequence=1, name="all_reduce", state=WAITED_FOR, waited=None, **fields):
    """Waited for at once, unless `waited` says something else."""
    waited = serial if waited is None and state == WAITED_FOR else waited or 0
    place = {"serial": serial, "at": float(serial), "line": serial, "step": 0, "on_gpu": True, "waited": waited}
    return call(sequence, name, state, **place | fields)


def gpu_p2p(serial, kind, source, target, state=WAITED_FOR, waited=None, **fields):
    peer = target if kind == "send" else source
    return gpu_call(serial, 1, kind, state, waited, stream=f"0:{source}>{target}:{kind}", peer=peer, **fields)


# --- who is to blame --------------------------------------------------------------------------------------------------


def test_a_host_that_is_ahead_waits_in_the_first_call_that_has_not_ended():
    ended = gpu_call(1, 1, state=ENDED)
    ahead = rank(0, ended, *(gpu_call(n, n) for n in range(2, 9)))
    assert blamed(ahead, rank(1, ended)) == [(1, "elsewhere", "all_reduce", 2, 71)]


def crossed(**fields):
    """Two ranks that issue the calls of two groups in another order each."""
    return [
        rank(number, *(gpu_call(n, stream=stream, **fields) for n, stream in enumerate(order, start=1)))
        for number, order in enumerate(("ab", "ba"))
    ]


def test_calls_stand_in_a_gpus_queue_where_a_stream_waits_for_them():
    assert blamed(*crossed()) == [(0, "behind", "all_reduce", 1, 1), (1, "behind", "all_reduce", 1, 1)]
    assert blamed(*crossed(on_gpu=False)) == [], "a CPU's calls stand in no queue"
    assert blamed(*crossed(state=ISSUED)) == [], "those that no stream waits for stand before none of another group"
    first, second = gpu_call(1, 1, state=ISSUED), gpu_call(2, 2, state=ISSUED)
    assert blamed(rank(0, first, second), rank(1, first)) == [], "of its own group it does, and to it both have come"


def test_a_wait_counts_from_where_it_was_made():
    """Two calls were under way when rank 0 waited for the first: the second does not stand behind it."""
    both = rank(0, gpu_call(1, stream="a", waited=2), gpu_call(2, stream="b", ranks=(0, 2), waited=2))
    first = rank(1, gpu_call(1, stream="a", state=ENDED))
    assert blamed(both, first, rank(2)) == [(2, "elsewhere", "all_reduce", 1, 72)]
    at_once = rank(0, gpu_call(1, stream="a"), gpu_call(2, stream="b", ranks=(0, 2)))
    third = rank(2, gpu_call(1, stream="b", ranks=(0, 2)))
    assert blamed(at_once, rank(1), third) == [(1, "elsewhere", "all_reduce", 1, 71)]


def both_send_first(**fields):
    return [rank(n, gpu_p2p(1, "send", n, 1 - n, **fields), gpu_p2p(2, "recv", 1 - n, n, **fields)) for n in range(2)]


def test_sends_before_receives_deadlock_on_a_gpu_though_all_are_issued():
    assert blamed(*both_send_first()) == [(0, "behind", "send", 1, 1), (1, "behind", "send", 1, 1)]
    assert blamed(*both_send_first(batch=1, waited=2)) == [], "those of a batch run side by side"


def test_a_send_that_nobody_waits_for_holds_up_what_stands_behind_it():
    send, other = (gpu_p2p(1, "send", number, 1 - number, state=ISSUED) for number in range(2))
    assert blamed(rank(0, send, gpu_p2p(2, "recv", 1, 0)), rank(1, other)) == [(1, "elsewhere", "send", 1, 71)]
    assert blamed(rank(0, send), rank(1)) == [(1, "elsewhere", None, None, 71)]


SPINNING = [((True, False), {1: "elsewhere"}), ((False, True), {0: "elsewhere"})]
SPINNING += [((each, each), {0: "behind", 1: "behind"}) for each in (True, False)]


@pytest.mark.parametrize(("spins", "culprits"), SPINNING)
def test_in_a_circle_the_rank_whose_host_does_not_wait_for_its_gpu_is_the_one(spins, culprits):
    """Stage 1 was to send a gradient back, and its host does something else; its GPU waits for the next activation."""
    stages = [rank(n, gpu_p2p(1, "recv", 1 - n, n), spins=spins[n]) for n in range(2)]
    assert {verdict.rank: verdict.what for verdict in diagnose(stages)} == culprits


# --- when calls end ---------------------------------------------------------------------------------------------------


class Event:
    """What torch.cuda.Event is to those who ask."""

    made, reached = 0, False

    def __init__(self):
        Event.made += 1

    def record(self, stream):
        assert stream == "current of cuda:0"
        self.reached = False

    def query(self):
        assert not graph_captures._under_way, "a capture would be spoilt"
        return self.reached


@pytest.fixture
def gpu(monkeypatch):
    """Stand-ins for torch.cuda; whether a graph is being captured."""
    capturing = SimpleNamespace(now=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.now)
    monkeypatch.setattr(Event, "made", 0)
    return capturing


def reach(calls):
    """The GPU comes to the first one's event."""
    next(iter(calls._on_gpu.values()))[0].reached = True


class Work:
    done = False

    def is_completed(self):
        return self.done


def test_a_synchronous_call_ends_when_its_event_is_reached_and_events_are_used_again(gpu):
    calls = Pending()
    for serial in range(1, 50):
        assert calls.add(serial, None, GPU) and calls.on_gpu(serial) and calls.ended(4) == []
        reach(calls)
        assert calls.ended(4) == [serial] and not calls.on_gpu(serial) and not calls
    assert Event.made == 1
    assert not calls.add(50, None, None), "on the CPU a call without a Work has ended"


def test_a_call_that_was_waited_for_has_not_ended_before_its_gpu_has_come_past_it(gpu):
    calls, work = Pending(), Work()
    calls.add(1, work, GPU)
    calls.add(2, work, GPU)  # of the same batch
    assert calls.waiting(work) == [1, 2] and not calls.waited(work)
    work.done = True  # nobody asks it any more, nor holds its tensors
    assert calls.ended(4) == [] and work not in [asked for asked, *_ in calls._on_gpu.values()]
    reach(calls)
    assert calls.ended(4) == [1, 2]
    on_cpu = Work()
    calls.add(3, on_cpu, None)
    assert calls.waiting(on_cpu) == [3] and calls.waited(on_cpu), "on the CPU the wait is the end"


def test_a_rank_far_ahead_asks_for_a_few_and_forgets_the_oldest(gpu, monkeypatch):
    calls, asked = Pending(), []
    for serial in range(1, AHEAD + 11):
        calls.add(serial, None, GPU)
    assert not calls.on_gpu(10) and calls.on_gpu(11)
    monkeypatch.setattr(Event, "query", lambda event: asked.append(event))
    calls.ended(4)
    assert len(asked) == 4


def test_a_gpu_that_has_failed_ends_nothing_and_raises_nothing_here(gpu, monkeypatch):
    def fails(event):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    calls = Pending()
    calls.add(1, None, GPU)
    monkeypatch.setattr(Event, "query", fails)
    assert calls.ended(4) == [] and not calls


def test_in_a_capture_nothing_is_recorded_and_nobody_asks(gpu):
    calls, begun, go_on = Pending(), threading.Event(), threading.Event()

    def refuses(graph):
        raise RuntimeError("no capture")

    begin = graph_captures.beginning(lambda graph: begun.set())
    end = graph_captures.ending(lambda graph: None)
    graph = SimpleNamespace()
    calls.add(1, None, GPU)
    reach(calls)
    with graph_captures.may_ask() as may:  # whoever asks is waited for
        assert may
        thread = threading.Thread(target=lambda: (begin(graph), go_on.wait()))
        thread.start()
        assert not begun.wait(0.2)
    assert begun.wait(600)
    gpu.now = True
    assert not calls.add(2, None, GPU) and not calls.add(3, Work(), GPU), "a graph's calls are not under way"
    assert calls.ended(4) == [], "the answer has to wait"
    go_on.set()
    thread.join()
    end(graph)
    assert calls.ended(4) == [1]
    with pytest.raises(RuntimeError, match="no capture"):
        graph_captures.beginning(refuses)(graph)
    with graph_captures.may_ask() as may:
        assert may


def test_the_tap_tells_captures_and_batches_and_leaves_nothing_behind(monkeypatch):
    """A batch's calls are told when it is closed, with the batch's Work; a call alone at once."""
    told, works = [], {"single": "a Work", "closed": "the batch's Work"}
    monkeypatch.setattr(dist.ProcessGroup, "_start_coalescing", lambda group, device: None)
    monkeypatch.setattr(dist.ProcessGroup, "_end_coalescing", lambda group, device: works["closed"])
    monkeypatch.setattr(dist.Work, "unbox", staticmethod(lambda boxed: works[boxed]))
    before = torch.cuda.CUDAGraph.capture_begin, dist.ProcessGroup._start_coalescing, dist.Work.wait
    listener = SimpleNamespace(
        issuing=lambda operator, args: (args[0], collective_hooks.batch()),
        issued=lambda note, work: told.append((*note, work)),
    )
    collective_hooks.listen(listener)
    try:
        monkeypatch.setattr(torch.ops.c10d.send.default, "redispatch", lambda keyset, *args: args[1], raising=False)
        passing = collective_hooks._passing("send")
        everything = torch._C._dispatch_keyset_full()
        passing(everything, "first", "single")
        group = dist.ProcessGroup.__new__(dist.ProcessGroup)
        dist.ProcessGroup._start_coalescing(group, None)
        passing(everything, "second", None)
        passing(everything, "third", "single")  # a Work of its own in a batch would pass for ended
        assert len(told) == 1 and collective_hooks.batch() > 0
        assert dist.ProcessGroup._end_coalescing(group, None) == works["closed"]
        passing(everything, "fourth", None)
        assert torch.cuda.CUDAGraph.capture_begin is not before[0]
    finally:
        collective_hooks.leave(listener)
    batched = told[1][1], "the batch's Work"
    assert told == [("first", 0, "a Work"), ("second", *batched), ("third", *batched), ("fourth", 0, None)]
    assert before == (torch.cuda.CUDAGraph.capture_begin, dist.ProcessGroup._start_coalescing, dist.Work.wait)


# --- what is measured of them -----------------------------------------------------------------------------------------


def test_a_call_without_a_work_ends_in_its_stream_and_was_waited_for():
    stretches, stamps = [], iter(("end", "end on the CPU"))
    clock = SimpleNamespace(stamp=lambda device: next(stamps))
    traffic = CollectiveLog(clock, lambda tensors: None, lambda begin, end: stretches.append((begin, end)))
    on_gpu, on_cpu = (SimpleNamespace(start="start", end=None) for _ in range(2))
    traffic._follow(on_gpu, {"tensors": [torch.ones(2).as_subclass(OnGPU)]}, None)
    traffic._follow(on_cpu, {"tensors": [torch.ones(2)]}, None)
    assert (on_gpu.end, on_cpu.end) == ("end", "end on the CPU")
    assert stretches == [("start", "end")], "a barrier that has ended stood still for nobody"


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = GPU


# --- what NCCL says ---------------------------------------------------------------------------------------------------


NCCL, GLOO, NONE = {"entries": [{"profiling_name": "nccl:all_reduce"}]}, {"entries": [1]}, {"version": "2.10"}


@pytest.mark.parametrize(
    ("nccl", "gloo", "told"),
    [
        (NCCL, GLOO, NCCL | {"gloo": GLOO}),
        (NCCL, NONE, NCCL),
        (NCCL, NCCL, NCCL),  # one and the same
        (NONE, GLOO, GLOO),
        (None, GLOO, GLOO),  # a build without NCCL
        (None, NONE, None),
        (None, None, None),
    ],
)
def test_the_records_are_nccls_where_the_build_has_them(monkeypatch, nccl, gloo, told):
    for name in backend_records.RECORDERS:
        monkeypatch.delattr(_distributed_c10d, name, raising=False)
    for name, records in (("_dump_nccl_trace_json", nccl), ("_dump_fr_trace_json", gloo)):
        if records:
            monkeypatch.setattr(_distributed_c10d, name, lambda *_, found=records: json.dumps(found), raising=False)
    assert backend_records.backend_records() == told


def group_that_says(error):
    backend = SimpleNamespace(get_error=lambda: getattr(torch._C._distributed_c10d.ErrorType, error))
    made = {torch.device("cpu"): SimpleNamespace(), torch.device("cuda"): backend}
    return SimpleNamespace(_device_types=list(made), _get_backend=made.get)


@needs(ERRORS_OF_BACKENDS)
def test_nccls_error_is_read_and_groups_that_have_none_to_tell_are_passed_over():
    fine, silent = group_that_says("SUCCESS"), SimpleNamespace(_device_types=[torch.device("cpu")])
    assert backend_records.backend_error([fine, silent]) is None
    assert backend_records.backend_error([fine, group_that_says("COMM_ERROR")]) == "COMM_ERROR"


def test_the_watchdog_reports_as_soon_as_nccl_has_noted_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(watchdog, "backend_error", lambda: "COMM_ERROR")
    monkeypatch.setattr(watchdog, "backend_records", lambda: {"entries": [1]})
    with Watchdog(600, tmp_path, ends=False, holds_sigterm=False) as dog:
        assert dog._reported.wait(80)
    (report,) = read_reports(tmp_path)
    assert report.backend_error == "COMM_ERROR" and report.summary.endswith("NCCL reports COMM_ERROR")
    assert "NCCL reports COMM_ERROR" in (tmp_path / "hang-rank0.txt").read_text()
    assert json.loads((tmp_path / "hang-rank0.json").read_text())["backend"] == {"entries": [1]}
