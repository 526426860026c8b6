"""Run a function on N ranks of this machine, from a notebook or a script.

Like ``accelerate.notebook_launcher`` it forks the ranks (a second or so: nothing is imported anew) and tells each its
place by the environment; where there are GPUs they are forked from a clean process that has imported everything
(`course_lib.launching.forks`), and where fork does not serve, as on macOS, they are spawned. The caller then watches
them: it labels what they print, takes their return values, finds the first cause of a failure, and ends them all.
"""

import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore

from course_lib import torch_names  # noqa: F401
from course_lib.errors import LaunchError
from course_lib.launching import forks, openmp
from course_lib.launching.launch_environment import check_loopback
from course_lib.launching.output import LabelledOutput
from course_lib.launching.rank_process import RankEnds, RankJob
from course_lib.launching.supervisor import RankError, RanksHung, RankSupervisor, close

__all__ = ["RankError", "RanksHung", "launch"]

START_METHODS = ("fork", "forkserver", "spawn")
MOST_SERVED = 80
"""Ranks that one fork server can start: three pipes each, and one message carries 253 descriptors."""


def launch(
    function: Callable[..., Any],
    *args: Any,
    num_processes: int = 2,
    timeout: float = 600.0,
    device: str = "auto",
    start_method: str | None = None,
    stream: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every one of N ranks, and return what each returned, by rank.

    Each rank has the environment of a process group, so that ``Accelerator()`` and
    ``torch.distributed.init_process_group()`` find the N ranks: over gloo on the CPU, or one GPU each. (On a CPU
    Accelerate's ``PartialState()`` finds them, under every launcher, only as ``PartialState(cpu=True)``.)

    Args:
        function: also one defined in a notebook cell.
        *args: its positional arguments.
        num_processes: ranks; one rank runs in a process of its own too.
        timeout: seconds until ranks that still run are ended, without those in which one of them waits for a core.
        device: ``cpu``, ``cuda``, or ``auto``: the GPUs where there are enough, else the CPU.
        start_method: ``fork``: the ranks inherit the caller's memory. ``forkserver``: they are forked from a clean
            process, made at the first launch, and ``spawn``: each is a new Python; the function goes to them by
            cloudpickle, with the caller's environment, working directory, number of threads and torch's random state
            of this moment, and of modules that the caller has changed they see nothing. Default: fork on Linux, but
            forkserver where there are GPUs or an old OpenMP, and spawn on macOS.
        stream: show what the ranks print, line by line, each labelled with its rank.
        **kwargs: the function's keyword arguments.
    Raises:
        CourseError: a rank raised it; it is raised here as it was.
        RankError: a rank raised something else, or died.
        RanksHung: the time was over.
        LaunchError: so many ranks cannot be started here.
    """
    device, start_method = _check(num_processes, device, start_method)
    call = functools.partial(function, *args, **kwargs)
    sent = call if start_method == "fork" else forks.Parcel.of(call)
    if start_method == "forkserver":
        forks.serve()
    own, theirs = _pipes(num_processes)
    # Here, as torchrun has it, so that all ranks are guests of their store, and none is its host.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = RankJob(sent, theirs, store.port, device)
    watch = RankSupervisor(own, timeout, LabelledOutput(num_processes, stream))
    try:
        try:
            for process in _started(job, num_processes, start_method):
                watch.processes.append(process)
        finally:
            close(theirs)  # now the pipes end when their ranks do
        watch.watch()
    finally:
        watch.end()
        del store  # a traceback would keep it, and its port
    return watch.results(timeout)


def _check(num_processes: int, device: str, start_method: str | None) -> tuple[str, str]:
    """Device and start method, or the reason why it cannot be done."""
    if sys.platform == "win32":
        raise LaunchError("ranks cannot be started on Windows itself", "work in WSL 2")
    if num_processes < 1:
        raise LaunchError(f"num_processes is {num_processes}", "ask for at least 1")
    if "RANK" in os.environ:
        raise LaunchError(f"this process is rank {os.environ['RANK']} of a launch already", "call launch() outside it")
    check_loopback()
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus >= num_processes else "cpu"
        if gpus and device == "cpu":
            print(f"{num_processes} ranks on {gpus} GPUs: they run on the CPU")
        elif kind := forks.unused_accelerator():
            print(f"the course does not know devices of type {kind}: the ranks run on the CPU")
    if device not in ("cpu", "cuda"):
        raise LaunchError(f"unknown device {device!r}", "use auto, cpu or cuda")
    if device == "cuda" and gpus < num_processes:
        raise LaunchError(f"asked for {num_processes} ranks on GPUs, and there are {gpus}", 'use device="cpu"')
    if start_method not in (None, *START_METHODS):
        raise LaunchError(f"unknown start_method {start_method!r}", "leave it out, or use fork, forkserver or spawn")
    if start_method == "fork" and (reason := forks.why_not_fork(device)):
        raise LaunchError(
            f"ranks that are forked from this process could not train ({reason})",
            "leave start_method out, or fork before the first backward, optimizer step or use of a GPU",
        )
    start_method = start_method or forks.default_start_method()
    if start_method == "forkserver" and num_processes > MOST_SERVED:
        raise LaunchError(
            f"asked for {num_processes} ranks, and a fork server starts {MOST_SERVED} at most",
            'use start_method="spawn"',
        )
    return device, start_method


def _pipes(num_processes: int) -> tuple[list[RankEnds], tuple[RankEnds, ...]]:
    """The caller's and the ranks' ends of a control, an output and a stacks pipe each."""
    pairs = [
        (multiprocessing.Pipe(duplex=True), multiprocessing.Pipe(duplex=False), multiprocessing.Pipe(duplex=False))
        for _ in range(num_processes)
    ]
    return [RankEnds(*(p[0] for p in ends)) for ends in pairs], tuple(RankEnds(*(p[1] for p in ends)) for ends in pairs)


def _started(job: RankJob, num_processes: int, start_method: str) -> Iterator[BaseProcess]:
    """Start the ranks, one after the other."""
    if start_method == "fork":
        openmp.end_threads()
    context = multiprocessing.get_context(start_method)
    with forks.without_main() if start_method == "forkserver" else contextlib.nullcontext():
        for rank in range(num_processes):
            process = context.Process(target=job, args=(rank,))  # type: ignore[attr-defined]
            process.start()
            yield process
