"""Set-up of a process group before its first use: a device for its fastest transport, and a first barrier."""

import torch
import torch.distributed as dist


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Device of a tensor for the group's fastest way: the current GPU where it has NCCL, else the CPU."""
    if "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def meet(group: dist.ProcessGroup) -> None:
    """Let all ranks of a new group form its communicator; a collective call.

    NCCL forms it in the group's first collective or batch of messages, which then all ranks have to make
    (torch.distributed.batch_isend_irecv). Where the first might be a batch between some of them, they meet before.
    """
    device = device_of(group)
    if device.type == "cuda" and group.size() > 1:
        dist.all_reduce(torch.zeros((), device=device), group=group)
