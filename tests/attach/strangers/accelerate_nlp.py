"""In the shape of Accelerate's nlp example: prepare, accumulate, gather for the metric."""

import fault
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Flatten(), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = TensorDataset(torch.randint(50, (32, 4)), torch.randint(2, (32,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2, shuffle=True))
for epoch in range(2):
    for step, (ids, labels) in enumerate(loader):
        if epoch == 0:
            fault.at(step)
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(ids), labels))
            optimizer.step()
            optimizer.zero_grad()
    predictions = accelerator.gather_for_metrics(model(ids).argmax(-1))
accelerator.end_training()
