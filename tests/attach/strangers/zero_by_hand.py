"""In the shape of a sharded optimizer by hand: reduce to the owner of a parameter, broadcast from it."""

import fault
import torch
import torch.distributed as dist


def train():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    parameters, size = list(model.parameters()), dist.get_world_size()
    optimizer = torch.optim.SGD(parameters[dist.get_rank() :: size], lr=0.1)
    for step in range(5):
        fault.at(step)
        model(torch.randn(4, 8)).sum().backward()
        for number, parameter in enumerate(parameters):
            dist.reduce(parameter.grad, dst=number % size)
        optimizer.step()
        for number, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, src=number % size)
            parameter.grad = None


dist.init_process_group("gloo")
train()
