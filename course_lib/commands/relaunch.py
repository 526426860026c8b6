"""Start this very command again as N ranks, through Accelerate's launcher."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGINT

import torch

from course_lib.errors import EXIT_FAILED, EXIT_HUNG, EXIT_INTERRUPTED, EXIT_RESUME, LaunchError
from course_lib.hangs.report import HANG_FOLDER, has_report
from course_lib.launching.cores import usable_cores
from course_lib.launching.interrupts import NOTE

CLI = Path(__file__).resolve().parents[1] / "cli.py"
GRACE = 100
"""Seconds between a signal and SIGKILL; schedulers commonly give a job 120 in all."""


def relaunch(num_processes: int, arguments: Sequence[str], *, use_cpu: bool, output_dir: Path | None = None) -> int:
    """Run ``cli.py arguments`` on that many ranks of this machine, and return their exit code.

    SIGINT, SIGTERM and SIGUSR1 are passed on to the ranks, which have GRACE seconds to save and end.

    Args:
        num_processes: ranks to start.
        arguments: the command line after the program's name.
        use_cpu: keep off the GPUs.
        output_dir: the run's folder, which tells whether ranks that were asked to stop left a checkpoint, and whether
            those that ended with a dead or stopped one left a report.
    Raises:
        LaunchError: there are fewer GPUs than ranks.
    """
    gpus = 0 if use_cpu else torch.cuda.device_count()
    if gpus and num_processes > gpus:
        raise LaunchError(f"num_processes is {num_processes}, and this machine has {gpus} GPUs",
                          f"use --num_processes {gpus}, or --device cpu")
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not gpus:
        # "multi_gpu" is what Accelerate calls one process per device; with this it keeps the CPU.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    else:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as worker.py does
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_processes)))
    # The ranks report their own errors; the launcher's account of them would bury that line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGINT,SIGTERM,SIGHUP,SIGQUIT,SIGUSR1"  # PET_X: torchrun's option X
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    launcher = launch_command_parser().parse_args([
        "--multi_gpu", "--num_processes", str(num_processes), "--num_machines", "1", "--main_process_port", "0",
        "--mixed_precision", "no", "--dynamo_backend", "no", str(CLI), *arguments])
    started = time.time()
    try:
        launch_command(launcher)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        return EXIT_HUNG if output_dir and has_report(output_dir / HANG_FOLDER, started) else EXIT_FAILED
    except SignalException as stopped:
        if stopped.sigval == SIGINT:
            return EXIT_INTERRUPTED
        return EXIT_RESUME if output_dir and (output_dir / NOTE).exists() else 128 + stopped.sigval
    return 0
