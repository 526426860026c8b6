"""``course train --profile``: a few steps of all ranks in one trace, and the table of where they went and why."""

import gzip
import json
import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from course_lib.errors import ConfigError
from course_lib.metering import rank_clocks, traces
from course_lib.metering.collective_log import Collective, CollectiveLog
from course_lib.metering.operators import Operator, OperatorCounter
from course_lib.metering.roofline import measure_link, measure_peaks
from course_lib.metering.step_spans import DeviceEvent, HostEvent, RankEvents, parts
from course_lib.metering.step_table import RankTable, StepTable, at_tokens, rows_of
from course_lib.parallel.clock import Phases
from course_lib.training.callbacks.base import Callback
from course_lib.training.checkpoints.run_folder import MONITOR
from course_lib.training.session import Session
from course_lib.writing import write_bytes, write_text

TRACE, TABLE, NUMBERS = "steps.json.gz", "where-the-step-went.md", "where-the-step-went.json"
PHASE = "phase: "
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MarkedPhases(Phases):
    """A trainer's phases, which a profiler sees too.

    Args:
        phases: whose seconds go on.

    Attributes:
        begins: seconds of ``time.perf_counter`` at which phases began, while there is a list.
        counter: is told the phase; None while nothing is counted.
    """

    def __init__(self, phases: Phases):
        super().__init__(phases.clock)
        self.seconds, self._passed = phases.seconds, phases._passed
        self.begins: list[float] | None = None
        self.counter: OperatorCounter | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.counter is not None:
            self.counter.phase = name
        if self.begins is not None:
            self.begins.append(time.perf_counter())
        with record_function(PHASE + name), super().__call__(name):
            yield
        if self.counter is not None:
            self.counter.phase = "between"


class StepProfile(Callback):
    """Records some steps on every rank, counts two before, and writes a trace and a table into ``monitor/``.

    What it does to a step, it does not to the training: the same operators run on the same numbers. Before the first
    step the machine's roofs are measured, some seconds; after the recorded ones the ranks come together.

    Args:
        wait: steps before the profiler starts, 2 or more; the operators of the last two are counted.
        warmup: steps that are profiled and thrown away.
        active: steps that are recorded.
    """

    def __init__(self, wait: int, warmup: int, active: int):
        self.wait, self.warmup, self.active = wait, warmup, active
        self.steps, self.counted = 0, list[Sequence[Operator]]()
        self.table: StepTable | None = None
        self._tokens, self._of_steps = 0, list[int]()

    def on_train_begin(self, trainer: Session) -> None:
        if trainer.device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"profile sees no operators on {trainer.device.type}",
                "use --device cpu, or leave it out",
                cure={"device": "cpu"},
            )
        self.peaks = measure_peaks(trainer.device, DTYPES.get(trainer.precision, torch.float32))
        if trainer.num_processes > 1 and dist.is_initialized():
            self.peaks = replace(self.peaks, link=measure_link(trainer.device))
        trainer.phases = self.phases = MarkedPhases(trainer.phases)
        self._hook = trainer.model.register_forward_pre_hook(self._forward, with_kwargs=True)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (trainer.device.type == "cuda")
        quiet()
        self.profile = profile(
            activities=activities, schedule=schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1)
        )
        self.log = CollectiveLog(trainer.clock)
        self._listening = False
        self.profile.start()
        self._count(trainer)

    def _forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        self._tokens += 0 if ids is None else ids.shape[:2].numel()

    def _count(self, trainer: Session) -> None:
        """End the counting of a step, and begin with the next if that is to be counted."""
        if counter := self.phases.counter:
            counter.__exit__(None, None, None)
            self.counted.append(counter.operators)
            self.phases.counter = None
        if self.wait - 2 <= self.steps < self.wait:
            self.phases.counter = OperatorCounter(trainer.model).__enter__()
            self.phases.counter.phase = "between"

    def on_step_end(self, trainer: Session) -> None:
        self.steps += 1
        self._of_steps.append(self._tokens)
        self._tokens = 0
        first, last = self.wait + self.warmup, self.wait + self.warmup + self.active
        self._count(trainer)
        if self.steps < last:
            if self.steps == first:
                trainer.clock.settle()
            self.profile.step()
            if self.steps == first:
                trainer.ranks.barrier()  # starting the profiler takes one rank longer than another
                self.phases.begins, self._flops = [], trainer.state.flops
                self.log.start()
                self._listening, self._begun = True, time.perf_counter()
        elif self.steps == last:
            trainer.clock.settle()
            window = self._begun, time.perf_counter()
            self._leave()
            with trainer.stopwatch.stopped():
                self.profile.step()
                self._evaluate(trainer, window)

    def _leave(self) -> None:
        if self._listening:
            self.log.stop()
            self._listening = False

    def _evaluate(self, trainer: Session, window: tuple[float, float]) -> None:
        """Bring the ranks' events and tables together. A collective call."""
        ping = torch.zeros(1, device=trainer.device)

        def all_reduce() -> None:
            trainer.ranks.sum(ping)
            trainer.clock.settle()

        stamps = trainer.ranks.gather_objects(rank_clocks.exchange(all_reduce)) if trainer.num_processes > 1 else [[]]
        offset = rank_clocks.offsets(stamps)[trainer.rank]
        collectives = self.log.collectives()
        assert self.phases.begins is not None
        events = read(
            self.profile, trainer.rank, trainer.state.step - self.active, window, self.phases.begins, collectives
        )
        self.phases.begins = None
        recorded = statistics.mean(self._of_steps[-self.active :])
        counted = self._of_steps[self.wait - 2 : self.wait]
        operators = at_tokens(list(zip(counted, self.counted, strict=True)), recorded)
        apart = parts(events, {operator.name for operator in operators if operator.kind != "collective"})
        own = RankTable(
            trainer.rank,
            events.host,
            (window[1] - window[0]) / self.active,
            rows_of(apart, self.active, operators, self.peaks),
            apart.hidden / self.active,
            apart.under_way / self.active,
            self.peaks,
            *offset,
        )
        gathered = trainer.ranks.gather_objects((events, collectives, offset, own))
        last, known = trainer.state.step, trainer.throughput.model is not None
        flops = (trainer.state.flops - self._flops) / self.active if known else None
        self.table = StepTable(
            range(last - self.active + 1, last + 1),
            (counted[0], counted[1], recorded),
            flops,
            trainer.throughput.peak,
            [rank[3] for rank in gathered],
        )
        if trainer.is_main:
            folder = trainer.output_dir / MONITOR
            folder.mkdir(parents=True, exist_ok=True)
            content = json.dumps(traces.of_steps([rank[:3] for rank in gathered]), separators=(",", ":"))
            write_bytes(folder / TRACE, gzip.compress(content.encode(), compresslevel=6, mtime=0))
            write_text(folder / NUMBERS, json.dumps(self.table.as_dict() | {"steps": list(self.table.steps)}, indent=1))
            write_text(folder / TABLE, "# Where the step went, and its bound\n\n" + self.table.markdown() + "\n")

    def on_train_end(self, trainer: Session) -> None:
        self._hook.remove()
        if self.phases.counter:
            self.phases.counter.__exit__(None, None, None)
        self._leave()
        self.profile.stop()
        if self.table is None:
            trainer.say(
                "profile: the run ended before its steps were recorded: it takes "
                f"{self.wait + self.warmup + self.active} steps; lower profile_wait, profile_warmup or "
                "profile_steps"
            )
        else:
            folder = trainer.output_dir / MONITOR
            trainer.say(
                f"where the step went, and its bound\n{self.table.markdown()}\n"
                f"trace of all ranks: {folder / TRACE}, for https://ui.perfetto.dev"
            )


def quiet() -> None:
    """Let torch.profiler's library not write to standard error that it begins and ends."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def read(
    profiled: profile,
    rank: int,
    before: int,
    window: tuple[float, float],
    begins: Sequence[float],
    collectives: Sequence[Collective],
) -> RankEvents:
    """A profiler's events on ``time.perf_counter``'s clock.

    Args:
        profiled: has recorded, with this thread's phases marked.
        rank: this one's number.
        before: steps before the first recorded one.
        window: of the recorded steps.
        begins: seconds at which the phases began, in order.
        collectives: of the window.
    """
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    raw = profiled.profiler.kineto_results.events()
    marks = sorted(
        ((event.start_ns(), event) for event in raw if event.name().startswith(PHASE) and not _on_gpu(event)),
        key=lambda mark: mark[0],
    )
    zero, mark = marks[0]  # the profiler counts from 1970: as seconds in a float that leaves no microseconds
    lag = statistics.median((start - zero) / 1e9 - begin for (start, _), begin in zip(marks, begins, strict=True))
    thread = mark.start_thread_id()
    hosts, devices = list[HostEvent](), list[DeviceEvent]()
    phases, steps = list[tuple[str, float, float]](), list[tuple[float, float]]()
    for event in raw:
        name, start = event.name(), (event.start_ns() - zero) / 1e9 - lag
        end = start + event.duration_ns() / 1e9
        if _on_gpu(event):
            if not event.is_user_annotation():
                devices.append(DeviceEvent(name, event.device_resource_id(), start, end, event.linked_correlation_id()))
        elif name.startswith(PHASE):
            phases.append((name.removeprefix(PHASE), start, end))
        elif name.startswith("ProfilerStep#"):  # whose number counts from the profiler's begin
            steps.append((max(start, window[0]), min(end, window[1])))
        elif not event.is_async() and not name.startswith("cuda") and start < window[1] and end > window[0]:
            hosts.append(HostEvent(name, event.start_thread_id(), start, end, event.correlation_id()))
    flights = [(call.start, min(call.end, window[1]) if call.ended else window[1]) for call in collectives]
    numbered = [(f"step {number}", *step) for number, step in enumerate(sorted(steps), start=before + 1)]
    return RankEvents(
        rank,
        socket.gethostname(),
        window,
        numbered,
        sorted(phases, key=lambda phase: phase[1]),
        thread,
        hosts,
        devices,
        flights,
    )


def _on_gpu(event: Any) -> bool:
    return event.device_type() != torch.autograd.DeviceType.CPU
