"""In the shape of torch's DDP series: a Trainer class, a DistributedSampler, torchrun."""

import os

import fault
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, data, optimizer):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.model, self.data, self.optimizer = DDP(model), data, optimizer

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(source), targets).backward()
        self.optimizer.step()

    def train(self, epochs):
        step = 0
        for epoch in range(epochs):
            self.data.sampler.set_epoch(epoch)
            for source, targets in self.data:
                fault.at(step)
                self.run_batch(source, targets)
                step += 1


dist.init_process_group("gloo")
rows = TensorDataset(torch.randn(32, 20), torch.randn(32, 1))
net = torch.nn.Linear(20, 1)
loader = DataLoader(rows, batch_size=4, shuffle=False, sampler=DistributedSampler(rows))
Trainer(net, loader, torch.optim.SGD(net.parameters(), lr=1e-3)).train(2)
dist.destroy_process_group()
