"""What goes wrong in a stranger's script on rank 1, in its third step; by the variable FAULT."""

import os
import signal
import time

import torch
import torch.distributed as dist


def at(step):
    if step == 2 and os.environ["RANK"] == "1":
        fault = os.environ.get("FAULT")
        if fault == "sleeps":
            time.sleep(600)
        elif fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "odd one":
            dist.all_reduce(torch.ones(7, 5))
