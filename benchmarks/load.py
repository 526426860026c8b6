"""Long runs: what 10,000 steps leave behind, what 10 million rows need, and what comparing the ranks costs.

    python benchmarks/load.py
    python benchmarks/load.py steps comparison

Writes benchmarks/load-PART.md for each of steps, rows and comparison; about an hour on two cores, most of it for
tokenizing the rows.
"""

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.harness import HERE, STEPS_ALONE, options, publish, table
from course_lib.config import build
from course_lib.launching.launch import launch
from course_lib.training.callbacks import Callback
from course_lib.training.callbacks.guards import guards
from course_lib.training.run import build_trainer

MIB = 2**20
AT_ONCE = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
"""The environment of a process whose allocators give back at once what is freed: its memory is what is in use."""
TINY = STEPS_ALONE | {
    "model": "tiny-bert",
    "training_type": "accelerated",
    "device": "cpu",
    "max_train_samples": 96,
    "max_eval_samples": 8,
    "max_length": 8,
    "batch_size": 2,
    "logging_steps": 50,
}
KEEPING = {"eval_steps": 250, "save_steps": 250, "save_total_limit": 1}


def smallest_model(folder: Path) -> str:
    """A folder with a BERT of one layer and 32 features and its tokenizer: a step is mostly what stands around it."""
    from transformers import BertConfig, BertForSequenceClassification

    from course_lib.modeling import presets

    tokenizer = presets.build("tiny-bert", ["a few words to make a vocabulary of"], 64)[1]
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=3,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# --- what many steps leave behind -------------------------------------------------------------------------------------


def held() -> tuple[int, int, int, int]:
    """What this process holds now: bytes of memory that no file backs, file descriptors, threads, processes."""
    process = psutil.Process()
    return anonymous_bytes(), process.num_fds(), process.num_threads(), len(process.children(recursive=True))


def anonymous_bytes() -> int:
    """Memory of this process that is not a cached page of a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Holdings(Callback):
    """Notes every so many steps what the process holds, as a function tells it."""

    def __init__(self, every: int, look: Callable[[], tuple[int, ...]]):
        self.every, self.look, self.seen = every, look, list[tuple[int, ...]]()

    def on_step_end(self, trainer: Any) -> None:
        if trainer.state.step % self.every == 0:
            self.seen.append((trainer.state.step, *self.look()))


def train(
    folder: str,
    steps: int,
    every: int,
    changed: dict[str, Any],
    look: Callable[[], tuple[int, ...]] = held,
    more: Sequence[Callback] = (),
) -> list[tuple[int, ...]]:
    """Many steps of a tiny model on this rank, evaluations and checkpoints among them; what was held when."""
    torch.set_num_threads(1)
    Path(folder).mkdir(parents=True, exist_ok=True)
    config = build(TINY | KEEPING | {"output_dir": folder, "max_steps": steps} | changed)
    notes = Holdings(every, look)
    trainer = build_trainer(config, [*guards(config), *more, notes])[0]
    trainer.train()
    trainer.engine.close()
    return notes.seen


@dataclass(frozen=True)
class Slopes:
    """What a step leaves behind on one rank, by least squares over the steps after warm-up."""

    memory: float
    """Bytes per step."""
    files: float
    """File descriptors per step."""
    threads: float
    processes: float


def slopes(seen: list[tuple[int, ...]], warm_up: int) -> Slopes:
    """A straight line through what was held after each of the steps beyond ``warm_up``."""
    later = np.array([each for each in seen if each[0] > warm_up], float)
    return Slopes(*np.polyfit(later[:, 0], later[:, 1:], 1)[0])


# --- what many rows need ----------------------------------------------------------------------------------------------


def write_rows(folder: Path, rows: int) -> int:
    """One Parquet file, which a validation split is to be cut from; gives the bytes of its text."""
    folder.mkdir(parents=True, exist_ok=True)
    schema, size = pa.schema({"text": pa.string(), "label": pa.string()}), 0
    with pq.ParquetWriter(folder / "train.parquet", schema) as out:
        for start in range(0, rows, 5_000):
            numbers = range(start, min(start + 5_000, rows))
            texts = [f"row {i} says that word {i * 7919 % 10007} is like word {i % 977}" for i in numbers]
            size += sum(map(len, texts))
            out.write_table(pa.table({"text": texts, "label": [f"class {i % 3}" for i in numbers]}, schema))
    return size


def stream(folder: Path, task: str, batches: int) -> dict[str, float]:
    """Load, tokenize, order and read so many batches; the peak of memory of each phase above that at the start, MiB.

    Memory counts that no file backs: pages of a memory-mapped file are the system's to drop.
    """
    import datasets

    from course_lib.data import DataConnector, DataProcessor
    from course_lib.data.batching import GlobalBatchSampler, training_loader
    from course_lib.data.cache import column
    from course_lib.modeling import presets

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    config = build({"dataset": str(folder), "task": task, "max_length": 16}).data
    tokenizer = presets.build("tiny-bert", ["row 1 says that word 2 is like word 3"], 64)[1]
    give_back()
    with Peak() as peak:
        text = DataConnector(config).load()
        peak.mark("load")
        processor = DataProcessor(config, tokenizer)
        processed = processor.process(text)
        peak.mark("tokenize")
        rows = processed.splits["train"]
        sampler = GlobalBatchSampler(column(rows, "length"), 32)
        loader = iter(training_loader(rows, sampler, processor.collator()))
        for _ in range(batches):
            next(loader)
        peak.mark("train")
    return peak.found


def give_back() -> None:
    """Give what is free, and kept to be used again, back to the system: Python's, Arrow's and the C library's."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # only glibc has it


class Peak:
    """The peak of this process's anonymous memory, phase by phase, in MiB above that at the start."""

    def __enter__(self) -> "Peak":
        self.start = self.highest = anonymous_bytes()
        self.found: dict[str, float] = {}
        self.done = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.watcher.join()

    def _watch(self) -> None:
        while not self.done.wait(0.005):
            self.highest = max(self.highest, anonymous_bytes())

    def mark(self, phase: str) -> None:
        """A phase has ended."""
        self.found[phase] = (max(self.highest, anonymous_bytes()) - self.start) / MIB
        self.highest = anonymous_bytes()


def streamed(rows: int, task: str, environment: dict[str, str], batches: int = 2000) -> tuple[float, dict[str, float]]:
    """MiB of text, and :func:`stream`'s peaks, in a process of its own with an empty cache, deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        size = write_rows(Path(folder, "data"), rows)
        code = (
            f"from pathlib import Path; from benchmarks.load import stream; "
            f"import json; print(json.dumps(stream(Path({folder!r}, 'data'), {task!r}, {batches})))"
        )
        environment = os.environ | environment | {"HF_HOME": str(Path(folder, "cache")), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=HERE.parent, check=True, capture_output=True, text=True, env=environment
        )
        return size / MIB, json.loads(done.stdout.splitlines()[-1])


# --- what comparing the ranks costs -----------------------------------------------------------------------------------


def comparison_seconds(check: str, steps: int) -> tuple[float, float]:
    """On this rank, medians: seconds of a step without a comparison, and of a comparison, of a 6-layer MiniLM."""
    from course_lib.training.callbacks.desync import AgreementCheck

    with tempfile.TemporaryDirectory() as folder:
        larger = {"model": "minilm", "max_length": 64, "batch_size": 8, "output_dir": folder}
        config = build(TINY | larger | {"max_steps": steps, "desync_check": check})
        taken: list[float] = []

        class Timed(AgreementCheck):
            def _compare(self, trainer: Any, when: str) -> None:
                start = time.perf_counter()
                super()._compare(trainer, when)
                taken.append(time.perf_counter() - start)

        guard = Timed(config)
        guard.every = 1
        trainer = build_trainer(config, [guard])[0]
        trainer.train()
        phases = sum(trainer.phases.seconds.values()) / steps
        trainer.engine.close()
        return phases, statistics.median(taken[1:])


def steps(args: Namespace) -> Iterator[str]:
    """What many steps leave behind."""
    yield (
        f"{args.steps:,} steps of a BERT of one layer on 2 ranks, an evaluation and a checkpoint every 250; least "
        "squares over the second half."
    )
    with tempfile.TemporaryDirectory() as folder:
        changed = {"model": smallest_model(Path(folder, "model"))}
        seen = launch(
            train, str(Path(folder, "run")), args.steps, 50, changed, num_processes=2, timeout=7200, stream=False
        )
    found = [slopes(of_rank, args.steps // 2) for of_rank in seen]
    yield table(
        "rank | bytes per step | files | threads | processes",
        [
            (rank, f"{of.memory:.0f}", f"{of.files:.4f}", f"{of.threads:.4f}", f"{of.processes:.4f}")
            for rank, of in enumerate(found)
        ],
    )


def rows(args: Namespace) -> Iterator[str]:
    """What many rows need."""
    yield (
        "Peak of memory that no file backs, above that of a process which has imported everything, in MiB, by "
        "phase; each in a process of its own with an empty cache. One Parquet file; a tenth of its rows is cut "
        "off as the validation split. *In use* is what is allocated, measured with allocators that give back at "
        "once what is freed; *taken* is what a process has from the system with the usual ones, which keep some "
        "of it to be used again."
    )
    found = []
    for memory, environment in {"in use": AT_ONCE, "taken": {}}.items():
        for task in ("classification", "causal_lm"):
            for count in (args.rows // 10, args.rows):
                size, peaks = streamed(count, task, environment)
                found.append((memory, task, f"{count:,}", *(f"{mib:.0f}" for mib in (size, *peaks.values()))))
                print(*found[-1], sep=" | ", flush=True)
    yield table("memory | task | rows | text | load | tokenize | 2,000 batches", found)


def comparison(args: Namespace) -> Iterator[str]:
    """What comparing the ranks costs."""
    yield "MiniLM on 2 ranks, 8 rows of at most 64 tokens each."
    found = []
    for check in ("sampled", "full"):
        step, compared = launch(comparison_seconds, check, 30, num_processes=2, timeout=600, stream=False)[0]
        found.append((check, f"{step * 1000:.1f}", f"{compared * 1000:.2f}", f"{compared / step:.3f} %"))
    yield table("hash | step, ms | comparison, ms | share at every 100 steps", found)


PARTS = {"steps": steps, "rows": rows, "comparison": comparison}


def main() -> None:
    """Measure, and write a table of each part."""
    which = {"nargs": "*", "metavar": "part", "help": f"{', '.join(PARTS)}; all of them unless named"}
    args = options(__doc__, parts=which, steps=10_000, rows=10_000_000)
    if unknown := set(args.parts) - set(PARTS):
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    for part in args.parts or PARTS:
        publish(f"load-{part}", f"Load: {part}", ("torch", "datasets"), *PARTS[part](args))


if __name__ == "__main__":
    main()
