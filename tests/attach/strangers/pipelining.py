"""In the shape of torch's pipelining tutorial: a stage per rank, ScheduleGPipe."""

import fault
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
part = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
x, y = torch.randn(4, 8), torch.randn(4, 8)
for step in range(5):
    fault.at(step)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y)
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
dist.destroy_process_group()
