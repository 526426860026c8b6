"""In the shape of torch's tensor-parallel tutorial: parallelize_module over a mesh with a name."""

import fault
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.net2 = torch.nn.Linear(10, 32), torch.nn.Linear(32, 5)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x)))


mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
tp_model = parallelize_module(ToyModel(), mesh["tp"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
optimizer = torch.optim.AdamW(tp_model.parameters(), lr=0.25, foreach=False)
for i in range(5):
    fault.at(i)
    torch.manual_seed(i)
    tp_model(torch.rand(20, 10)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
