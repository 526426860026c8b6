"""Peers of our trainers in timings: the Hugging Face Trainer, and loops as torch's tutorials write them.

All take the same model, rows, batch, precision, attention, clipping and fused AdamW as ours, and their batches without
a mask, since no row is padded.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.hardware.subject import CLIP, LEARNING_RATE, WEIGHT_DECAY, WORKERS, Subject
from course_lib.config import OptimConfig
from course_lib.training.optimization import make_optimizer


class Windows:
    """Seconds of stretches of steps; the GPU has finished at the beginning and the end of each.

    Args:
        warmup: steps before the first.
        steps: of each.
        count: stretches.
    """

    def __init__(self, warmup: int, steps: int, count: int):
        self.warmup, self.steps, self.count, self.done = warmup, steps, count, 0
        self.stamps: list[float] = []

    @property
    def total(self) -> int:
        """Steps in all."""
        return self.warmup + self.steps * self.count

    @property
    def seconds(self) -> list[float]:
        """Of each stretch."""
        assert len(self.stamps) == self.count + 1, f"{self.done} steps of {self.total}"
        return [end - start for start, end in zip(self.stamps, self.stamps[1:], strict=False)]

    def step(self) -> None:
        """A step has been launched."""
        self.done += 1
        if self.done >= self.warmup and (self.done - self.warmup) % self.steps == 0:
            torch.cuda.synchronize()
            self.stamps.append(time.perf_counter())


class Collate:
    """Batches without a mask."""

    def __init__(self, subject: Subject):
        self.collate = subject.collator()

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.collate(rows)
        return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def hugging_face(subject: Subject, windows: Windows, folder: Path, ranks: int) -> None:
    """The Hugging Face Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tick(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            windows.step()

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=subject.rows,
        max_steps=windows.total,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=subject.precision == "bf16",
        dataloader_num_workers=WORKERS,
        dataloader_pin_memory=True,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    rows = subject.rows_of_tokens(subject.rows * ranks * windows.total).remove_columns("length")
    trainer = Trainer(
        model=subject.model(), args=arguments, train_dataset=rows, data_collator=Collate(subject), callbacks=[Tick()]
    )
    trainer.train()


def plain(subject: Subject, windows: Windows, folder: Path, ranks: int) -> None:
    """One GPU, nothing around the model."""
    _loop(subject, windows, ranks, lambda model: model)


def compiled(subject: Subject, windows: Windows, folder: Path, ranks: int) -> None:
    """The plain loop, or DDP's where there are several ranks, with torch.compile."""
    _loop(subject, windows, ranks, lambda model: torch.compile(_ddp(model) if ranks > 1 else model))


def ddp(subject: Subject, windows: Windows, folder: Path, ranks: int) -> None:
    """torch's DistributedDataParallel."""
    _loop(subject, windows, ranks, _ddp)


def fsdp2(subject: Subject, windows: Windows, folder: Path, ranks: int) -> None:
    """torch's fully_shard, one unit per block, under its own mixed precision."""
    _loop(subject, windows, ranks, lambda model: _fsdp2(model, subject.precision == "bf16"), autocast=False)


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)


def _fsdp2(model: Any, low: bool) -> nn.Module:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _loop(
    subject: Subject, windows: Windows, ranks: int, wrap: Callable[[nn.Module], nn.Module], autocast: bool = True
) -> None:
    """Forward, backward, clip, step."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    model = wrap(subject.model().to(device))
    optimizer = make_optimizer(model, OptimConfig(learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY))
    low = autocast and subject.precision == "bf16"
    for batch in _batches(subject, windows.total, ranks, device):
        with torch.autocast("cuda", torch.bfloat16) if low else contextlib.nullcontext():
            logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        windows.step()
    dist.destroy_process_group()


def _batches(subject: Subject, steps: int, ranks: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    rows = subject.rows_of_tokens(subject.rows * ranks * steps)
    sampler = DistributedSampler(rows, ranks, dist.get_rank())
    loader = DataLoader(
        rows, subject.rows, sampler=sampler, collate_fn=Collate(subject), num_workers=WORKERS, pin_memory=True
    )
    for batch in loader:
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
