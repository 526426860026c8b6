"""In the shape of transformers' run_clm.py: a Trainer over a small GPT-2."""

import fault
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Blocks(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.arange(8)
        return {"input_ids": ids, "labels": ids}


class Watched(Trainer):
    def training_step(self, *args, **kwargs):
        fault.at(self.state.global_step)
        return super().training_step(*args, **kwargs)


model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8))
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    max_steps=6,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    ddp_backend="gloo",
)
Watched(model, arguments, train_dataset=Blocks()).train()
