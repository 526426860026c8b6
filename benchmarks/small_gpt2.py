"""The training that ``meter_overhead.py`` and ``watchdog.py`` time: a GPT-2 of 4 layers under DDP or FSDP2."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

BATCH, TOKENS = 4, 64


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, GPT2Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


ENGINES = {"DDP": nn.parallel.DistributedDataParallel, "FSDP2": sharded}


def training(engine: str, width: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model of hidden size ``width``, its optimizer, and a function that trains one step on random tokens.

    ``engine`` is a key of ``ENGINES``; the process group has to stand.
    """
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_positions=TOKENS, n_embd=width, n_layer=4, n_head=4)
    model = ENGINES[engine](GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(512, (BATCH, TOKENS))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
