"""Subject of memory and speed measurements: a GPT-2 on rows of random tokens, for trainers and plain loops."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from transformers import GPT2LMHeadModel

from benchmarks.hardware.findings import Settings
from benchmarks.harness import STEPS_ALONE
from course_lib.config import build
from course_lib.data.processing import Collator, ProcessedData
from course_lib.lessons.lab_gpt2 import gpt2
from course_lib.modeling.loading import LoadedModel
from course_lib.modeling.recomputing import recompute_activations
from course_lib.planning import memory, models
from course_lib.planning.models import Model
from course_lib.planning.plan import Plan
from course_lib.training.callbacks import Callback
from course_lib.training.trainer import Trainer

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
WORKERS = 2
"""Processes that collate, a rank."""
FILLED = 0.6
"""Share of a GPU that the largest micro-batch may be predicted to fill: the prediction is what is being tried."""


@dataclass(frozen=True)
class Subject:
    """A model's sizes and its batch.

    Attributes:
        rows: of a micro-batch, on each GPU.
        precision: of the matmuls, by autocast: ``bf16`` or ``no``.
    """

    layers: int
    width: int
    heads: int
    tokens: int
    vocabulary: int
    rows: int
    precision: str

    @property
    def known(self) -> Model:
        """As the planner knows it."""
        sizes = {"n_layer": self.layers, "n_embd": self.width, "n_head": self.heads, "n_positions": self.tokens}
        more = {"model_type": "gpt2", "vocab_size": self.vocabulary, "resid_pdrop": 0.0}
        return models.from_config(sizes | more, "GPT-2")

    @property
    def described(self) -> str:
        """For a report."""
        known = self.known
        return (
            f"GPT-2 of {self.layers} blocks of width {self.width} ({known.parameters / 1e6:.1f} M parameters), "
            f"{self.tokens} tokens per row, {self.rows} rows per GPU, "
            f"{'bf16' if self.precision == 'bf16' else 'fp32'}, no dropout, SDPA"
        )

    def model(self) -> GPT2LMHeadModel:
        """The model in fp32 on the CPU; the same weights on every call."""
        sizes = self.layers, self.width, self.tokens, self.vocabulary
        return gpt2(*sizes, heads=self.heads, attn_implementation="sdpa", use_cache=False).train()

    def rows_of_tokens(self, count: int) -> datasets.Dataset:
        """So many rows of random tokens, as :class:`ProcessedData` has them."""
        tokens = np.random.default_rng(0).integers(0, self.vocabulary, count * self.tokens, dtype=np.int32)
        ends = np.arange(0, (count + 1) * self.tokens, self.tokens, dtype=np.int32)
        return datasets.Dataset(
            pa.table(
                {"input_ids": pa.ListArray.from_arrays(ends, tokens), "length": np.full(count, self.tokens, np.int32)}
            )
        )

    def collator(self, device_type: str = "cpu") -> Collator:
        """Makes batches of the rows, which are all of one length."""
        return Collator("causal_lm", pad_token_id=0)

    def plan(self, strategy: str, engine: str, ranks: int, precision: str, checkpointing: bool = False) -> Plan:
        """A run of it as the planner has it."""
        stage = 3 if strategy == "fsdp" else int(strategy[-1]) if strategy.startswith("zero") else 0
        return Plan(
            self.tokens,
            engine={"ddp": "ddp", "fsdp": "fsdp"}.get(strategy, "deepspeed"),
            stage=stage,
            data=ranks,
            micro_batch=self.rows,
            checkpointing="full" if checkpointing else "none",
            precision="fp32" if precision == "no" else precision,
        )


def choose(settings: Settings) -> Subject:
    """GPT-2 as it was published, with the most rows that the GPU should hold.

    Raises:
        RuntimeError: it holds not even one.
    """
    precision = "bf16" if settings.bf16 else "no"
    if settings.tiny or settings.simulated:
        return Subject(2, 64, 4, 64, 512, 4, precision)
    for rows in (16, 8, 4, 2, 1):
        subject = Subject(12, 768, 12, 1024, 50257, rows, precision)
        # In fp32, copied, and with buckets that gradients wait in, it takes most.
        held = memory.estimate(subject.known, subject.plan("ddp", "torch", 2, "no"))
        if held.total < FILLED * settings.memory:
            return subject
    raise RuntimeError(f"{settings.memory / 2**30:.1f} GiB are too little for one row of GPT-2")


def trainer(
    subject: Subject,
    folder: Path,
    steps: int,
    ranks: int,
    callbacks: Iterable[Callback],
    checkpointing: bool = False,
    **options: Any,
) -> Trainer:
    """One of the course's trainers over it, without evaluation, checkpoints, logged lines and guards."""
    config = build(
        STEPS_ALONE
        | {
            "task": "causal_lm",
            "max_length": subject.tokens,
            "batch_size": subject.rows,
            "group_by_length": False,
            "num_workers": WORKERS,
            "mixed_precision": subject.precision,
            "device": "cuda",
            "max_steps": steps,
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "lr_scheduler": "constant",
            "max_grad_norm": CLIP,
            "logging_steps": 10**6,
            "output_dir": str(folder),
        }
        | options
    )
    model = subject.model()
    if checkpointing:
        recompute_activations(model)
    folder.mkdir(parents=True, exist_ok=True)
    rows = subject.rows_of_tokens(subject.rows * ranks * steps)
    data = ProcessedData({"train": rows}, None, "causal_lm", "random tokens")
    loaded = LoadedModel(model, None, "new weights", subject.tokens)  # type: ignore[arg-type]
    # It is asked for its collator alone.
    return Trainer(config, loaded, data, subject, callbacks)  # type: ignore[arg-type]
