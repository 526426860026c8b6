"""What watches over a training on GPUs: flight recorder, watchdog, meter, monitor, desync guard and the fault lab."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.config import build
from course_lib.hangs.flight_recorder import FlightRecorder
from course_lib.hangs.rank_state import ENDED, WAITED_FOR, RankState, read_record
from course_lib.hangs.watchdog import Watchdog, read_reports
from course_lib.launching.launch import RankError
from course_lib.lessons.faults import lab
from course_lib.metering import job_log, job_report
from course_lib.metering.meter import Meter
from course_lib.parallel.clock import Clock
from course_lib.training.callbacks import Callback
from course_lib.training.run import train
from tests.gpu import training as t
from tests.gpu.machine import on_gpu_ranks, on_ranks
from tests.long_cases import some

SECONDS, CULPRIT = 6.0, 1  # kernels are the CPU's here, and the cores are taken
RUN = t.STEPS_ALONE | {
    "max_steps": 4,
    "max_train_samples": 60,
    "logging_steps": 4,
    "overwrite_output_dir": True,
    "mixed_precision": "no",
    "desync_steps": 2,
}


# --- a training


def trains(config):
    on_ranks(2, train, config)
    run = Path("out")
    weights = (run / "model" / "model.safetensors").stat().st_size
    return (run / "monitor" / "communication.csv").read_text(), [str(path) for path in run.rglob("hang*")], weights


def test_a_run_with_all_that_watches_it(gpus):
    """The watchdog is on by default; the meter runs in every second step, and the ranks are compared there."""
    watched = {name: value for name, value in RUN.items() if name != "watchdog"}
    config = build(watched | {"communication_steps": 2, "strategy": "ddp", "engine": "torch"})
    csv, hang, weights = gpus.run(trains, config)
    header, *rows = csv.splitlines()
    assert header.endswith("mb_sent") and len(rows) == 4 and not hang
    sent = [float(row.rpartition(",")[2]) for row in rows]
    assert min(sent) > 0.9 * weights / 1e6, "all gradients, in float32"


# --- who is to blame


def all_reduces(x, others):
    dist.all_reduce(x)
    x.sum().item()


def runs_ahead(x, others):
    """By more calls than a record has room for."""
    works = [dist.all_reduce(each, async_op=True) for each in torch.ones(200, 4, device="cuda")]
    for work in works:
        work.wait()
    x.sum().item()


def passes_on(x, others):
    """A pipeline of three stages, of which the outer two share a weight."""
    rank = dist.get_rank()
    for _ in range(3):
        if rank > 0:
            dist.recv(x, rank - 1)
        if rank < 2:
            dist.send(x, rank + 1)
    if rank != CULPRIT:
        dist.all_reduce(x, group=others)
    x.sum().item()


def reduces_in_backward(x, others):
    """DDP waits in C++, where nobody sees it."""
    if not hasattr(reduces_in_backward, "model"):
        reduces_in_backward.model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda())
    reduces_in_backward.model(x).sum().backward()
    reduces_in_backward.model.module.weight.grad.sum().item()


def steps(step):
    dist.init_process_group("nccl")
    x, others = torch.ones(4, device="cuda"), dist.new_group([0, 2])
    step(x, others)
    with Watchdog(SECONDS, "hang") as dog:
        dog.beat(0)
        for number in range(1, 4):
            if dist.get_rank() == CULPRIT and number == 2:
                while True:
                    time.sleep(0.05)
            step(x, others)
            dog.beat(number)


def hangs(step):
    with pytest.raises(RankError):
        on_ranks(3, steps, step)
    return read_reports("hang"), json.loads(Path("hang/hang-rank0.json").read_text())["calls"]


STEPS = [
    (all_reduces, "all_reduce", 2),
    (runs_ahead, "all_reduce", 201),
    (passes_on, None, 4),
    (reduces_in_backward, "all_reduce", None),
]


def crosses():
    """Each rank comes to the other group first, and neither host waits there."""
    dist.init_process_group("nccl")
    x, groups = torch.ones(4, device="cuda"), [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups:
        dist.all_reduce(x, group=group)
    x.sum().item()
    with Watchdog(SECONDS, "hang"):
        for group in groups if dist.get_rank() else reversed(groups):
            dist.all_reduce(x, group=group)
        x.sum().item()


def hangs_across():
    with pytest.raises(RankError):
        on_ranks(2, crosses)
    return read_reports("hang")


@pytest.fixture(scope="module")
def hung(gpus):
    """Reports and calls, by step: all hang at the same time."""
    *found, across = gpus.run_each([*((hangs, (step,), {}) for step, *_ in STEPS), (hangs_across, (), {})], gpus=3)
    return {step: each for (step, *_), each in zip(STEPS, found, strict=True)} | {crosses: across}


@pytest.mark.parametrize(("step", "collective", "sequence"), STEPS)
def test_the_culprit_alone_is_blamed_though_no_wait_holds_the_others_hosts_up(hung, step, collective, sequence):
    reports, calls = hung[step]
    assert [report.rank for report in reports] == [0, 1, 2]
    for report in reports:
        (verdict,) = report.verdicts
        assert (verdict.rank, verdict.what) == (CULPRIT, "elsewhere"), report.summary
        assert sequence in (None, verdict.sequence), report.summary
        assert verdict.collective == collective or (collective is None and verdict.collective in ("send", "recv"))
        assert verdict.file.endswith("test_watching.py")
        assert not report.states[0].ended, "what hangs has not ended"
    own = [call["state"] for call in calls[str(CULPRIT)]]
    assert own and set(own) == {ENDED}, "and what others still wait for, has"


def test_ranks_that_have_issued_everything_in_another_order_wait_for_each_other(hung):
    for report in hung[crosses]:
        verdicts = [(each.rank, each.what, each.sequence, each.collective) for each in report.verdicts]
        assert verdicts == [(0, "behind", 1, "all_reduce"), (1, "behind", 1, "all_reduce")], report.summary


# --- what a recorder sees


def calls_of(record):
    return [
        (call.name, call.state, call.on_gpu) for call in read_record(record.memory[:], 0, 1, "", "running", 0.0).calls
    ]


@on_gpu_ranks(2)
def test_a_call_has_ended_when_the_gpu_has_come_past_it():
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    x.sum().item()
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    record = RankState()
    recorder = FlightRecorder(record)
    recorder.start()
    if rank == 1:
        store.wait(["looked"])  # rank 0 is far ahead
    work = dist.all_reduce(x, async_op=True)
    assert rank == 1 or calls_of(record) == [("all_reduce", 0, True)], "issued"
    work.wait()
    recorder.look()
    assert rank == 1 or calls_of(record) == [("all_reduce", WAITED_FOR, True)], "the wait has returned"
    if rank == 0:
        store.set("looked", "")
    dist.all_reduce(x)
    there = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, torch.zeros_like(x), 1 - rank)]
    for work in dist.batch_isend_irecv(there):
        work.wait()
    dist.barrier()
    x.sum().item()
    torch.cuda.synchronize()
    recorder.look()
    recorder.stop()
    assert calls_of(record) == [(name, ENDED, True) for name in ("all_reduce", "all_reduce", "send", "recv", "barrier")]


# --- the meter


class Metered(Callback):
    """Meters the third step."""

    def __init__(self):
        self.found = {}

    def on_train_begin(self, trainer):
        train_step = trainer.train_step

        def metered(batches):
            if trainer.state.step != 2:
                return train_step(batches)
            with Meter(trainer.wrapped, trainer.optimizer, getattr(trainer.wrapped, "resident", None)) as meter:
                result = train_step(batches)
            # What attention's kernels save for the backward pass is their own affair; and what the step returns on the
            # CPU may be such a buffer itself, where a GPU's is copied to the host.
            self.found |= {
                "peak": {kind: size for kind, size in meter.peak.items() if kind != "activations"},
                "resident": {kind: meter.resident[kind] for kind in ("parameters", "gradients", "optimizer states")},
                "waits": len(meter._waits),
                "spans": {(span.kind, span.name) for span in meter.timeline},
                "collectives": [(c.name, c.bytes, c.dtype, c.ranks, c.sent) for c in meter.collectives],
                "ends": all(meter.start <= c.start <= c.end <= meter.end for c in meter.collectives),
            }
            return result

        trainer.train_step = metered


def measured(config):
    meter = Metered()
    train(config, [meter])
    return meter.found


def measured_on_both(strategy):
    options = RUN | {"strategy": strategy, "engine": "scratch"}
    return [on_ranks(2, measured, build(options | {"device": device}), device=device) for device in ("cpu", "cuda")]


@pytest.mark.parametrize("strategy", some(["ddp", "zero1", "zero2", "zero3", "fsdp"], "zero3"))
def test_the_meter_counts_on_gpus_what_it_counts_on_the_cpu(gpus, strategy):
    on_cpu, on_gpu = gpus.run(measured_on_both, strategy)
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        assert len(cpu["collectives"]) >= 2 and cpu["waits"] and cpu["ends"]
        # How many buffers are there at a time: gloo's thread lets go of one a moment after it was waited for.
        assert min(each["peak"].pop("communication buffers") for each in (cpu, gpu)) > 0
        assert gpu == cpu


def stamps():
    """Stamps of a thread that was never told which GPU it is on; and which GPU's stream each event was put into."""
    recorded = []

    class Noted(torch.cuda.Event):
        def record(self, stream=None):
            recorded.append(None if stream is None else stream.device)
            return super().record(stream)

    def stamp():
        assert torch.cuda.current_device() == 0
        found.append(clock.stamp())

    torch.cuda.Event = Noted
    clock, found = Clock(torch.device("cuda")), []
    thread = threading.Thread(target=stamp)
    thread.start()
    thread.join()
    clock.settle()
    assert 0 <= clock.seconds(found[0]) - clock._began < 10
    return [clock.device, *recorded]


def test_a_stamp_of_any_thread_is_on_the_clocks_gpu(gpus):
    assert gpus.ranks(2, stamps) == [[torch.device("cuda", rank)] * 3 for rank in (0, 1)]


# --- the fault lab


def inspected_and_fixed(name):
    scenario = lab.SCENARIOS[name]
    inspected, fixed = (lab.run(scenario, 3, how, device="cuda") for how in ("inspected", "fixed"))
    return scenario.tool.named(inspected), fixed.error and str(fixed.error), fixed.values


QUICK = ("wrong port", "deadlocked pipeline", "mismatched collectives")


@pytest.mark.parametrize(
    "names",
    [QUICK, *(pytest.param((name,), marks=pytest.mark.long) for name in lab.SCENARIOS if name not in QUICK)],
    ids=" and ".join,
)
def test_the_tools_of_the_fault_lab_name_the_culprit_and_the_cures_work(gpus, names):
    found = gpus.run_each([(inspected_and_fixed, (name,), {}) for name in names], gpus=3)
    for name, (named, error, values) in zip(names, found, strict=True):
        assert named == lab.SCENARIOS[name].culprits, name
        assert error is None and None not in values, name


# --- somebody else's job


def measured_job(folder):
    """Three all-reduces over NCCL, and one that the job's end has to wait for."""
    dist.init_process_group("nccl")
    tool, values = job_log.begin({"folder": str(folder)}), torch.ones(1024, device="cuda")
    for _ in range(3):
        dist.all_reduce(values)
    dist.all_reduce(values, async_op=True)
    tool.end(None)


def test_the_meter_of_a_job_has_the_streams_times(gpus, tmp_path):
    gpus.ranks(2, measured_job, tmp_path)
    logs = job_report.read(tmp_path)
    assert [[(call.name, call.bytes) for call in log.calls] for log in logs] == [[("all_reduce", 4096)] * 4] * 2
    for log in logs:
        assert log.ended and all(call.end is not None and call.end >= call.start for call in log.calls[:3])
