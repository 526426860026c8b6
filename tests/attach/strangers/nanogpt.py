"""In the shape of nanoGPT's train.py: a flat script, gradient accumulation by require_backward_grad_sync."""

import os

import fault
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

init_process_group(backend="gloo")
ddp_rank, accumulation = int(os.environ["RANK"]), 4
torch.manual_seed(1337 + ddp_rank)
data = torch.randint(64, (1000,))


def get_batch():
    ix = torch.randint(len(data) - 9, (4,))
    return torch.stack([data[i : i + 8] for i in ix]), torch.stack([data[i + 1 : i + 9] for i in ix])


model = DDP(torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)))
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
X, Y = get_batch()
for iter_num in range(6):
    fault.at(iter_num)
    for micro_step in range(accumulation):
        model.require_backward_grad_sync = micro_step == accumulation - 1
        loss = torch.nn.functional.cross_entropy(model(X).flatten(0, 1), Y.flatten()) / accumulation
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
destroy_process_group()
