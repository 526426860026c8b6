"""Start this very command again as N ranks, through Accelerate's launcher."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from signal import SIGINT

import torch

from course_lib.errors import EXIT_FAILED, EXIT_INTERRUPTED, LaunchError

CLI = Path(__file__).resolve().parents[1] / "cli.py"


def relaunch(num_processes: int, arguments: Sequence[str], *, use_cpu: bool) -> int:
    """Run ``cli.py arguments`` on that many ranks of this machine, and return their exit code.

    Args:
        num_processes: ranks to start.
        arguments: the command line after the program's name.
        use_cpu: keep off the GPUs.
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
        # "multi_gpu" is what Accelerate calls one process a device; with this it keeps the CPU.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_processes)
                                                 if hasattr(os, "sched_getaffinity") else 1))
    # The ranks report their own errors; the launcher's account of them would bury that line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    launcher = launch_command_parser().parse_args([
        "--multi_gpu", "--num_processes", str(num_processes), "--num_machines", "1", "--main_process_port", "0",
        "--mixed_precision", "no", "--dynamo_backend", "no", str(CLI), *arguments])
    try:
        launch_command(launcher)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else EXIT_FAILED
    except SignalException as stopped:
        return EXIT_INTERRUPTED if stopped.sigval == SIGINT else 128 + stopped.sigval
    return 0
