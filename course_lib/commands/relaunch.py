"""Start this very command again as N ranks: forked from this process on CPUs, by Accelerate's launcher on GPUs."""

import argparse
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from course_lib.commands import once
from course_lib.commands.crowding import crowding
from course_lib.commands.options import importing
from course_lib.config import Config
from course_lib.errors import EXIT_FAILED, EXIT_HUNG, EXIT_INTERRUPTED, EXIT_RESUME, LaunchError
from course_lib.hangs.report import HANG_FOLDER, has_report
from course_lib.launching.cores import usable_cores
from course_lib.launching.interrupts import NOTE

if TYPE_CHECKING:
    from course_lib.launching.forked_ranks import RanksEnded

CLI = Path(__file__).resolve().parents[1] / "cli.py"
GRACE = 100
"""Seconds between a signal and SIGKILL; schedulers commonly give a job 120 in all."""


def relaunch(
    num_processes: int,
    args: argparse.Namespace,
    config: Config,
    *,
    output_dir: Path | None = None,
    trained: bool = False,
) -> int:
    """Run the command on that many ranks of this machine, and return their exit code.

    SIGINT, SIGTERM and SIGUSR1 are passed on to the ranks, which have GRACE seconds to save and end.

    Args:
        num_processes: ranks to start.
        args: the parsed command line; each rank calls `args.main(args.argv)`.
        config: what the command line says.
        output_dir: the run's folder, which tells whether ranks that were asked to stop left a checkpoint, and whether
            those that ended with a dead or stopped one left a report.
        trained: the model has to be a folder.
    Raises:
        LaunchError: there are fewer GPUs than ranks.
        DataError: there is no such data set.
        ModelError: there is no such model.
    """
    # Before torch is imported: it and NumPy read the number of their threads once.
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, usable_cores() // num_processes)
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    with importing():
        import psutil
        import torch

        from course_lib.launching import forked_ranks, forks
        from course_lib.system import machine

    gpus = 0 if config.run.device == "cpu" else torch.cuda.device_count()
    if gpus and num_processes > gpus:
        raise LaunchError(
            f"num_processes is {num_processes}, and this machine has {gpus} GPUs",
            f"use --num_processes {gpus}, or --device cpu",
            cure={"num_processes": str(gpus)},
        )
    if not gpus:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    else:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as rank_process.py does
    look_for_inputs(config, trained)
    free = min(psutil.virtual_memory().available, machine.cgroup_memory_limit() or sys.maxsize)
    warning = None if gpus else crowding(num_processes, usable_cores(), free)
    if warning:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    started = time.time()
    with once.said_once():
        if gpus or sys.platform == "darwin" or forks.why_not_fork("cpu"):
            ended = start_anew(num_processes, args.argv)
        else:
            import_what_ranks_need(config)
            ended = forked_ranks.run_forked(
                functools.partial(args.main, args.argv), num_processes, threads=threads, grace=GRACE
            )
    if ended.signal == signal.SIGINT:
        return EXIT_INTERRUPTED
    if ended.signal is not None:
        return EXIT_RESUME if output_dir and (output_dir / NOTE).exists() else 128 + ended.signal
    if ended.code < 0:
        return EXIT_HUNG if output_dir and has_report(output_dir / HANG_FOLDER, started) else EXIT_FAILED
    return ended.code


def look_for_inputs(config: Config, trained: bool) -> None:
    """Find the data set and the model before ranks are started, which would all look in vain.

    Raises:
        DataError: there is no such data set.
        ModelError: there is no such model.
    """
    with importing():
        from course_lib.data import sources
        from course_lib.data.cache import progress_bars
        from course_lib.modeling import loading, model_sources, presets

    with progress_bars(config.run.progress_bar):
        sources.find(config.data)
    if trained:
        loading.check_trained(config.model.model)
    elif config.model.model not in presets.TINY:
        model_sources.locate(config.model)


def import_what_ranks_need(config: Config) -> None:
    """Import once what each rank would import: most of what its start costs."""
    with importing():
        from course_lib.commands import report  # noqa: F401
        from course_lib.training import run  # noqa: F401
        from course_lib.training.engines import engine_class

        engine_class(config)


def start_anew(num_processes: int, arguments: Sequence[str]) -> "RanksEnded":
    """Start ``cli.py arguments`` as ranks that are new interpreters, by Accelerate's launcher."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from course_lib.launching.forked_ranks import SIGNALS, RanksEnded

    # The ranks report their own errors; the launcher's account of them would bury that line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # PET_X: torchrun's option X
    os.environ["PET_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in SIGNALS)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    # "multi_gpu" is what Accelerate calls one process per device; with ACCELERATE_USE_CPU it keeps the CPU.
    options = ["--multi_gpu", "--num_processes", str(num_processes), "--num_machines", "1", "--main_process_port", "0"]
    options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher = launch_command_parser().parse_args([*options, str(CLI), *arguments])
    try:
        launch_command(launcher)
    except ChildFailedError as error:
        return RanksEnded(code=error.get_first_failure()[1].exitcode)
    except SignalException as stopped:
        return RanksEnded(signal=stopped.sigval)
    return RanksEnded()
