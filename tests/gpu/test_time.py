"""What is reported as time is true on a GPU: of a device whose kernels take a time of their own while the host runs on.

``GPU_SIM_KERNEL_US`` gives the simulated device a clock: so long each kernel takes after the one before. It is so long
that the host is ahead by most of a step: what is not waited for is then measured too short by a large factor. A busy
machine can make the host the slower one, so that nothing here is held to be shorter than something.
"""

import contextlib
import itertools
import time
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState

from course_lib.config import build
from course_lib.lessons.basic_loop import lab as step_profile
from course_lib.modeling import presets
from course_lib.parallel.clock import Phases
from course_lib.parallel.pipeline import executor
from course_lib.parallel.pipeline.schedules import make
from course_lib.training.callbacks import Callback
from course_lib.training.run import build_trainer, train
from tests.gpu import training as t

KERNEL = 1e-3  # seconds
SLOW = {"GPU_SIM_KERNEL_US": "1000"}
BASE = t.STEPS_ALONE | {"max_steps": 4, "logging_steps": 2, "max_train_samples": 96}


class Lap(NamedTuple):
    """A look of the trainer's at its stopwatch."""

    before: float
    """Seconds on the wall clock, just before."""
    after: float
    least: float
    """Seconds that evaluation and saving, which are left out, have taken so far, at least."""
    most: float
    kernels: int
    """Of the device so far, except for what is left out."""


class WallClock(Callback):
    """Each logged line, and the last lap before it."""

    def __init__(self):
        self.lines, self.least, self.most, self.kernels_left_out = [], 0.0, 0.0, 0

    def on_step_end(self, trainer):
        if trainer.state.step == 1:
            self.watch(trainer.stopwatch)

    def watch(self, stopwatch):
        import gpu_sim

        lap, stopped = stopwatch.lap, stopwatch.stopped

        def look():
            before = time.perf_counter()
            seconds = lap()
            kernels = gpu_sim.kernels() - self.kernels_left_out
            self.lap = Lap(before, time.perf_counter(), self.least, self.most, kernels)
            return seconds

        @contextlib.contextmanager
        def leave_out():
            outside, kernels = time.perf_counter(), gpu_sim.kernels()
            with stopped():
                inside = time.perf_counter()
                yield
                self.least += time.perf_counter() - inside
            self.most += time.perf_counter() - outside
            self.kernels_left_out += gpu_sim.kernels() - kernels

        stopwatch.lap, stopwatch.stopped = look, leave_out

    def on_log(self, trainer, line):
        if "loss" in line:
            self.lines.append((self.lap, line))


def steps_of(options):
    """The laps with the logged lines, and the summary."""
    torch.set_num_threads(1)
    watched = WallClock()
    summary = train(build(BASE | options), [watched])
    return watched.lines, summary


@pytest.mark.parametrize(
    "options", [{"training_type": "basic"}, {}, {"training_type": "basic", "eval_steps": 3, "save_steps": 3}]
)
def test_throughput_is_that_of_the_wall_clock(gpus, options):
    lines, summary = gpus.run(steps_of, options, gpus=1, environment=SLOW)
    (begin, first), (end, last) = lines
    seconds = last["seconds"] - first["seconds"]
    least = end.before - begin.after - (end.most - begin.most)
    most = end.after - begin.before - (end.least - begin.least)
    assert least - 1e-3 <= seconds <= most + 1e-3, "lines have milliseconds"
    assert seconds > 0.9 * (end.kernels - begin.kernels) * KERNEL > 0.2, "the device was waited for"
    samples, tokens = (
        last[name] * last["seconds"] - first[name] * first["seconds"]
        for name in ("samples_per_second", "tokens_per_second")
    )
    assert samples == pytest.approx(8, rel=0.01) and tokens > samples, "two steps of four rows"
    assert (end.least > 0) == ("save_steps" in options)
    assert summary["train"]["samples_per_second"] == pytest.approx(16 / summary["train"]["seconds"], rel=0.01)
    assert summary["train"]["seconds"] >= last["seconds"] > 0.9 * end.kernels * KERNEL


def phases_of(options):
    """What the summary says of the training, and the kernels that the device was given in each phase."""
    import gpu_sim

    kernels, timed = Counter(), Phases.__call__

    @contextlib.contextmanager
    def counted(phases, name):
        with timed(phases, name):
            before = gpu_sim.kernels()
            yield
            kernels[name] += gpu_sim.kernels() - before

    Phases.__call__ = counted
    _, summary = steps_of(options)
    return summary["train"], kernels


def test_the_phases_are_those_of_the_device(gpus):
    told, kernels = gpus.run(phases_of, {"training_type": "basic"}, gpus=1, environment=SLOW)
    phases = told["phases"]
    assert set(phases) == {"data", "forward", "backward", "optimizer"}
    assert sum(phases.values()) < 1.01 * told["seconds"]
    for name in ("forward", "backward", "optimizer"):
        assert phases[name] > 0.9 * kernels[name] * KERNEL > 0.1, name


def metered(function):
    """Seconds until the device has done what a function queues, its kernels' own, and what it returns."""
    import gpu_sim

    torch.cuda.synchronize()
    start, kernels = time.perf_counter(), gpu_sim.kernels()
    found = function()
    torch.cuda.synchronize()
    return time.perf_counter() - start, (gpu_sim.kernels() - kernels) * KERNEL, found


def by_turns():
    torch.set_num_threads(1)
    trainer = build_trainer(build(BASE | {"training_type": "basic"}))[0]
    batches = [trainer.ranks.to_device(batch) for batch in itertools.islice(trainer.train_loader, 2)]
    trainer.train_step(batches[:1])
    trainer.clock.settle()
    turns = metered(lambda: step_profile.seconds_by_turns(trainer, {"one": batches, "other": batches}))
    watched = metered(lambda: step_profile.watch_memory(trainer, batches)[0])
    return turns, watched


def test_turns_and_timelines_are_timed_on_the_device(gpus):
    found = gpus.run(by_turns, gpus=1, environment=SLOW)
    (took, kernels, turns), (watched_took, watched_kernels, moments) = found
    assert 0.9 * kernels < sum(sum(turn.values()) for way in turns.values() for turn in way) < 1.01 * took
    assert 0.9 * watched_kernels < moments[-1].seconds < 1.01 * watched_took
    assert [each.seconds for each in moments] == sorted(each.seconds for each in moments)


def on_stages():
    """Of the second pass of a rank's stage: its spans, and the seconds of the kernels of its computations."""
    import gpu_sim

    state = PartialState()
    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(40))).to(state.device)
    engine = executor.PipelineExecutor(
        make("gpipe", ranks=2, microbatches=2),
        {dist.get_rank(): layers},
        lambda output, target: output.sum(),
        device=state.device,
    )
    batch, kernels, compute = torch.zeros(4, 4, device=state.device), [], executor._RowRun.compute

    def counted(run, action):
        before = gpu_sim.kernels()
        compute(run, action)
        kernels.append(gpu_sim.kernels() - before)

    executor._RowRun.compute = counted
    engine.step(batch, targets=batch)
    torch.cuda.synchronize()
    kernels.clear()
    spans = engine.step(batch, targets=batch).spans
    dist.barrier()
    return [span.end - span.start for span in spans], [each * KERNEL for each in kernels]


def test_spans_of_a_pipeline_are_the_devices(gpus):
    for spans, kernels in gpus.ranks(2, on_stages, environment=SLOW):
        assert len(spans) == len(kernels) == 4
        for span, took in zip(spans, kernels, strict=True):
            assert span > 0.9 * took > 0.01


def named(device_name, options):
    torch.cuda.get_device_name = lambda device=None: device_name
    return steps_of(options)


def test_mfu_is_model_flops_by_the_datasheets_peak(gpus):
    """tiny-bert by hand: blocks of 4 h² + 2 h f weights, 6 FLOPs each per token, and 12 h s for attention."""
    options = {"training_type": "basic", "mixed_precision": "bf16"}
    lines, summary = gpus.run(named, "NVIDIA H100 80GB HBM3", options, gpus=1)
    told, sizes = summary["train"], presets.TINY["tiny-bert"].sizes
    hidden, ffn, blocks = (sizes[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    tokens, pairs = token_counts(options)
    flops = blocks * (6 * (4 * hidden**2 + 2 * hidden * ffn) * tokens + 12 * hidden * pairs)
    assert told["tokens"] == tokens
    assert told["mfu"] == pytest.approx(flops / told["seconds"] / 989e12, rel=0.02)
    assert told["tokens_per_second"] == pytest.approx(tokens / told["seconds"], rel=0.02)
    assert told["mfu_note"] == "of 989 TFLOP/s per GPU: H100, bf16, dense"
    assert all(0 < line["mfu"] < 1 for _, line in lines)


def token_counts(options):
    """Tokens of the rows of a run's four steps, and the sum of the squares of the rows' lengths."""
    trainer = build_trainer(build(BASE | options | {"device": "cpu", "mixed_precision": "no"}))[0]
    lengths = [
        len(trainer.data.splits["train"][int(row)]["input_ids"])
        for rows in itertools.islice(trainer.sampler.global_batches(0), 4)
        for row in rows
    ]
    return sum(lengths), sum(length**2 for length in lengths)


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "Graphics 3000"])
def test_unknown_hardware_has_no_mfu(gpus, name):
    lines, summary = gpus.run(named, name, {"training_type": "basic", "max_steps": 2}, gpus=1)
    assert summary["train"]["mfu"] is None and summary["train"]["mfu_note"] == f"no MFU: unknown hardware {name}"
    assert not any("mfu" in line for _, line in lines) and lines[0][1]["tokens_per_second"] > 0
