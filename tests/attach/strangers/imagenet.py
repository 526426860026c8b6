"""In the shape of torch's ImageNet example: workers, an accuracy that is reduced after each epoch."""

import fault
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


def train(loader, model, criterion, optimizer, first):
    model.train()
    for i, (images, target) in enumerate(loader):
        fault.at(first + i)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return first + len(loader)


def validate(loader, model):
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == target).sum() for images, target in loader)
    dist.all_reduce(right)
    return right


def main():
    dist.init_process_group("gloo", init_method="env://")
    data = TensorDataset(torch.randn(24, 3, 8, 8), torch.randint(4, (24,)))
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, num_workers=2, sampler=sampler)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 4)
    )
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        step = train(loader, model, torch.nn.CrossEntropyLoss(), optimizer, step)
        validate(loader, model)


if __name__ == "__main__":
    main()
