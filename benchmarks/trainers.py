"""Our trainers beside the Hugging Face Trainer: the same model, rows, batch and precision.

    python benchmarks/trainers.py speed                # samples/s in interleaved pairs, medians and ratios
    python benchmarks/trainers.py accuracy             # test accuracy of both at their own settings, 3 seeds
    python benchmarks/trainers.py speed --only identical --repeats 3        # some of the settings

Writes benchmarks/trainers-speed.md or trainers-accuracy.md. Every figure is of one process with all cores, forked for
it alone, so that no trainer meets what another set for the process. Each run of ours has a run of the Hugging Face
Trainer directly beside it, before it and after it by turns, so that a drift of the machine meets both.

`identical`: fp32, the same rows in the same batches and order, padded to the longest row of each, torch's kernels and
allocator, AdamW (fused) with the same decay and clipping; without dropout both give the same losses, which is checked
first. `identical, fast kernels` has `--cpu_kernels fast` besides, all else the same. `defaults`: those of this course
(rows grouped by length, bf16 where the hardware multiplies it) beside those of the Hugging Face Trainer, with each kind
of kernels: the accelerated trainer has the fast ones by default, training_type basic torch's.

Seconds are of the clock on the wall; beside other work the CPU-seconds, which are given too, are steadier.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from course_lib.config import Config, build
from course_lib.data import DataConnector, DataProcessor
from course_lib.data.batching import GlobalBatchSampler
from course_lib.modeling import load
from course_lib.system import machine
from course_lib.system.seeding import seed_everything
from course_lib.training.callbacks import Callback
from course_lib.training.callbacks.guards import guards
from course_lib.training.callbacks.monitoring import monitors
from course_lib.training.run import build_trainer
from course_lib.writing import write_text

HERE = Path(__file__).parent
COMMON = {
    "model": "minilm",
    "batch_size": 32,
    "max_length": 64,
    "progress_bar": False,
    "save_steps": 0,
    "eval_steps": 0,
    "keep_best": False,
    "device": "cpu",
    "logging_steps": 10,
}
IDENTICAL = {"group_by_length": False, "mixed_precision": "no", "cpu_kernels": "torch"}
TRAINERS = {"BasicTrainer": "basic", "AcceleratedTrainer": "accelerated"}
SETTINGS: dict[str, dict[str, Any]] = {
    "identical": IDENTICAL,
    "identical, fast kernels": IDENTICAL | {"cpu_kernels": "fast"},
    "defaults, torch's kernels": {"cpu_kernels": "torch"},
    "defaults, fast kernels": {"cpu_kernels": "fast"},
}
WARMUP = 4


class Rate(NamedTuple):
    """Samples per second of the clock on the wall, and per second that the process's threads computed."""

    wall: float
    cpu: float


class Stopwatch:
    """Times the steps after the warm-up."""

    def start(self) -> None:
        self.began = time.perf_counter(), time.process_time()

    def rate(self, samples: int) -> Rate:
        return Rate(samples / (time.perf_counter() - self.began[0]), samples / (time.process_time() - self.began[1]))


class Clock(Callback):
    """The rate of one of our trainers, and its losses."""

    def __init__(self) -> None:
        self.watch, self.losses = Stopwatch(), []  # type: ignore[var-annotated]

    def on_step_end(self, trainer) -> None:
        if trainer.state.step == WARMUP:
            self.watch.start()
            self.samples = trainer.state.samples
        elif trainer.state.finished:
            self.rate = self.watch.rate(trainer.state.samples - self.samples)

    def on_log(self, trainer, line) -> None:
        self.losses += [line["loss"]] if "loss" in line else []


class HfClock(TrainerCallback):
    """The same of the Hugging Face Trainer."""

    def __init__(self) -> None:
        self.watch, self.losses = Stopwatch(), []  # type: ignore[var-annotated]

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == WARMUP:
            self.watch.start()
        elif state.global_step == state.max_steps:
            self.rate = self.watch.rate(args.per_device_train_batch_size * (state.max_steps - WARMUP))

    def on_log(self, args, state, control, logs, **kwargs):
        self.losses += [logs["loss"]] if "loss" in logs else []


def apart(function: Callable, *args, **options) -> Any:
    """What a function returns in a process of its own."""
    with get_context("fork").Pool(1) as pool:
        return pool.apply(function, args, options)


def without_dropout(model: nn.Module) -> None:
    """Let a model drop nothing."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def ours(kind: str, steps: int, seed: int, drop: bool = True, **options) -> Clock:
    """One of our trainers, with the callbacks that `course train` has except for its tracker."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        run = {"training_type": kind, "max_steps": steps, "seed": seed, "output_dir": folder}
        config = build(COMMON | options | run)
        trainer, _ = build_trainer(config, [*guards(config), *monitors(config), clock])
        trainer.eval_loaders.clear()
        if not drop:
            without_dropout(trainer.model)
        trainer.train()
        trainer.engine.close()
    return clock


def prepared(config: Config):
    """Model, tokenized splits and collator, as our trainers get them."""
    text = DataConnector(config.data, config.run.seed).load()
    seed_everything(config.run.seed)
    loaded = load(
        config.model,
        "classification",
        label_names=text.label_names,
        texts=[],
        seed=config.run.seed,
        max_length=config.data.max_length,
    )
    processor = DataProcessor(config.data, loaded.tokenizer, max_positions=loaded.max_positions)
    return loaded, processor.process(text), processor


def hugging_face(
    steps: int,
    seed: int,
    identical: bool = False,
    drop: bool = True,
    logging_steps: int = 10,
    epochs: int | None = None,
) -> tuple[HfClock, float | None]:
    """The Hugging Face Trainer, and its test accuracy after whole epochs.

    Args:
        steps: of the optimizer; -1 for whole epochs.
        seed: of everything random.
        identical: take our trainers' rows in our order, and decay the weights as they do; else its own defaults.
        drop: keep the model's dropout.
        logging_steps: steps between two logged losses.
        epochs: how many, where ``steps`` is -1; None: accuracy is not measured.
    """
    from transformers import DataCollatorWithPadding

    loaded, data, _ = prepared(build(COMMON | {"seed": seed}))
    train, more = data.splits["train"], {}
    if identical:
        sampler = GlobalBatchSampler(train["length"], COMMON["batch_size"], seed=seed, group_by_length=False)
        train = train.select([int(row) for batch in sampler.global_batches(0) for row in batch]).flatten_indices()
        more = {"train_sampling_strategy": "sequential", "weight_decay": build({}).optim.weight_decay}
    if not drop:
        without_dropout(loaded.model)
    clock = HfClock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            learning_rate=5e-5,
            max_steps=steps,
            num_train_epochs=epochs or 1,
            seed=seed,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="steps",
            logging_steps=logging_steps,
            **more,
        )
        unused = [c for c in train.column_names if c not in ("input_ids", "attention_mask", "labels")]
        trainer = Trainer(
            model=loaded.model,
            args=arguments,
            callbacks=[clock],
            train_dataset=train.remove_columns(unused),
            data_collator=DataCollatorWithPadding(loaded.tokenizer),
        )
        with contextlib.redirect_stdout(None):  # it prints each logged line, between ours
            trainer.train()
        if epochs is None:
            return clock, None
        output = trainer.predict(data.splits["test"].remove_columns(unused))
        return clock, float((output.predictions.argmax(-1) == output.label_ids).mean())


def largest_difference(steps: int) -> float:
    """Between the losses of the Hugging Face Trainer and of ours at identical settings without dropout, in nats."""
    theirs = apart(hugging_face, steps, 0, identical=True, drop=False, logging_steps=1)[0].losses
    differences = [0.0]
    for kind in TRAINERS.values():
        own = apart(ours, kind, steps, 0, drop=False, **IDENTICAL | {"logging_steps": 1}).losses
        differences += [abs(a - float(b)) for a, b in zip(own, theirs, strict=True)]
    return max(differences)


def flops_a_token() -> float:
    """Matrix FLOPs of forward and backward per token."""
    config = build(COMMON)
    loaded, data, processor = prepared(config)
    rows = data.splits["train"].select(range(256))
    batch = processor.collator()([rows[i] | {"ignore": False, "mask_seed": (0, 0, i)} for i in range(256)])
    counter = FlopCounterMode(display=False)
    with counter:
        loaded.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.sum().backward()
    return counter.get_total_flops() / batch["input_ids"].numel()


def mean_tokens() -> float:
    """Of a row of the training split, without padding."""
    return statistics.mean(prepared(build(COMMON))[1].splits["train"]["length"])


def pair(kind: str, options: dict[str, Any], identical: bool, steps: int, seed: int) -> tuple[Rate, Rate]:
    """The Hugging Face Trainer's rates and ours, in two processes one after the other, who is first by turns."""

    def theirs() -> Rate:
        return apart(hugging_face, steps, seed, identical)[0].rate

    if seed % 2:
        own = apart(ours, kind, steps, seed, **options).rate
        return theirs(), own
    peer = theirs()
    return peer, apart(ours, kind, steps, seed, **options).rate


def speed(repeats: int, steps: int, only: str) -> None:
    """Measure every pair of runs, and write the table after each repeat."""
    systems = {
        f"{trainer}, {name}": (kind, options, name.startswith("identical"))
        for name, options in SETTINGS.items()
        if only in name
        for trainer, kind in TRAINERS.items()
    }
    difference = largest_difference(2 * WARMUP)
    print(f"identical settings without dropout: losses differ by {difference:.1e} nats", flush=True)
    about = [
        f"Identical settings without dropout: the losses of {2 * WARMUP} steps differ by {difference:.1e} nats at "
        f"most. {steps - WARMUP} steps of 32 rows were timed in each run, after {WARMUP} others."
    ]
    name, dtype = ("bf16", torch.bfloat16) if machine.native_bf16("cpu") else ("fp32", torch.float32)
    rate, per_token, tokens = apart(machine.matmul_rate, dtype, seconds=1.0), apart(flops_a_token), apart(mean_tokens)
    load: list[float] = []
    pairs: dict[str, list[tuple[Rate, Rate]]] = {system: [] for system in systems}
    for repeat in range(repeats):
        for system, (kind, options, identical) in systems.items():
            peer, own = pair(kind, options, identical, steps, repeat)
            pairs[system].append((peer, own))
            load.append(os.getloadavg()[0])
            print(
                f"{system}: {own.wall:.1f} beside {peer.wall:.1f} samples/s, {own.wall / peer.wall:.2f} times; "
                f"per CPU-second {own.cpu:.1f} beside {peer.cpu:.1f}, {own.cpu / peer.cpu:.2f} times; "
                f"load {load[-1]:.1f}",
                flush=True,
            )
        best = max(statistics.median(own.wall for _, own in both) for both in pairs.values())
        write(
            "speed",
            "\n".join(
                [
                    *speed_rows(pairs, repeat + 1),
                    "",
                    *about,
                    (f"Load of the machine (mean of a minute, these runs included): {spread(load)}."),
                    "",
                    (
                        f"The defaults train in {name} here. Limit: {per_token / 1e6:.1f} MFLOP of matrix products "
                        f"per token (forward and backward), {tokens:.1f} tokens per row without padding, "
                        f"{rate / 1e9:.0f} GFLOP/s measured here in {name} for a 1024×1024 product: the fastest row "
                        f"does its useful products at {100 * best * tokens * per_token / rate:.0f} % of that rate."
                    ),
                ]
            ),
        )


def speed_rows(pairs: dict[str, list[tuple[Rate, Rate]]], repeats: int) -> list[str]:
    """A row for each system, and how often each of ours was ahead."""
    lines = [
        f"| trainer | samples/s, median of {repeats} (min–max) | Hugging Face Trainer's, in the same pairs | "
        "ratio, median of pairs (min–max) | ratio per CPU-second |",
        "|---|---|---|---|---|",
    ]
    for system, both in pairs.items():
        ratios, per_cpu = ([getattr(own, kind) / getattr(peer, kind) for peer, own in both] for kind in Rate._fields)
        walls = " | ".join(spread([pair[i].wall for pair in both]) for i in (1, 0))
        lines.append(f"| {system} | {walls} | {spread(ratios, 2)} | {spread(per_cpu, 2)} |")
    return lines


def write(what: str, table: str) -> None:
    """Keep a table."""
    text = f"# Trainers: {what}\n\n{machine.measured_on('torch', 'transformers', 'accelerate')}\n\n{table}\n"
    write_text(HERE / f"trainers-{what}.md", text)
    print(text, flush=True)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median, and least and largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def our_accuracy(kernels: str, seed: int, epochs: int) -> float:
    """Test accuracy of AcceleratedTrainer at this course's defaults, with torch's kernels or fast ones."""
    with tempfile.TemporaryDirectory() as folder:
        run = {"num_epochs": epochs, "seed": seed, "output_dir": folder, "cpu_kernels": kernels}
        trainer, _ = build_trainer(build(COMMON | run))
        trainer.train()
        return trainer.evaluate("test")["accuracy"]


def accuracy(seeds: int, epochs: int, keep: Path | None) -> None:
    """The table of test accuracies: neither the order of rows grouped by length nor other kernels may cost any.

    Args:
        seeds: how many; each gives one run of each trainer.
        epochs: of each run.
        keep: a JSON file that gets each run's accuracy as it ends; those that it has are not run again.
    """
    systems: dict[str, Callable[[int], float]] = {
        "Hugging Face Trainer": lambda seed: apart(hugging_face, -1, seed, epochs=epochs)[1],
        "AcceleratedTrainer, defaults (fast kernels)": lambda seed: apart(our_accuracy, "fast", seed, epochs),
        "AcceleratedTrainer, torch's kernels": lambda seed: apart(our_accuracy, "torch", seed, epochs),
    }
    lines = [f"| seed | {' | '.join(systems)} |", "|---" * (1 + len(systems)) + "|"]
    found: dict[str, list[float]] = {name: [] for name in systems}
    kept = json.loads(keep.read_text()) if keep and keep.exists() else {}
    for seed in range(seeds):
        for name, measure in systems.items():
            run = f"seed {seed}, {epochs} epochs, {name}"
            if run not in kept:
                kept[run] = round(measure(seed), 4)
                if keep:
                    write_text(keep, json.dumps(kept, indent=1))
            found[name].append(kept[run])
            print(f"{run}: {kept[run]:.4f}", flush=True)
        lines.append(f"| {seed} | " + " | ".join(f"{values[-1]:.4f}" for values in found.values()) + " |")
    means = " | ".join(f"{statistics.mean(values):.4f}" for values in found.values())
    write(
        "accuracy",
        "\n".join(
            [
                *lines,
                f"| mean | {means} |",
                "",
                (f"{epochs} epochs, batch 32, learning rate 5e-5, linear to 0, the last weights."),
            ]
        ),
    )


def main() -> None:
    """Run one of the two and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "accuracy"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", default="", metavar="TEXT", help="of speed: settings whose name has this text")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="of accuracy: a JSON file by which an interrupted table goes on")
    args = parser.parse_args()
    logging.set_verbosity_error()
    if args.what == "speed":
        speed(args.repeats, args.steps, args.only)
    else:
        accuracy(args.seeds, args.epochs, args.keep)


if __name__ == "__main__":
    main()
