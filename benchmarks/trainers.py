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

import contextlib
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from benchmarks.harness import STEPS_ALONE, options, publish, spread, table
from course_lib.config import Config, build
from course_lib.data import DataConnector, DataProcessor
from course_lib.data.batching import GlobalBatchSampler
from course_lib.system import machine
from course_lib.system.seeding import seed_everything
from course_lib.training.callbacks import Callback
from course_lib.training.callbacks.guards import guards
from course_lib.training.callbacks.monitoring import monitors
from course_lib.training.run import build_trainer, load_base

COMMON = STEPS_ALONE | {"model": "minilm", "batch_size": 32, "max_length": 64, "device": "cpu", "logging_steps": 10}
IDENTICAL = {"group_by_length": False, "mixed_precision": "no", "cpu_kernels": "torch"}
TRAINERS = {"BasicTrainer": "basic", "AcceleratedTrainer": "accelerated"}
SETTINGS: dict[str, dict[str, Any]] = {
    "identical": IDENTICAL,
    "identical, fast kernels": IDENTICAL | {"cpu_kernels": "fast"},
    "defaults, torch's kernels": {"cpu_kernels": "torch"},
    "defaults, fast kernels": {"cpu_kernels": "fast"},
}
WARMUP = 4
PACKAGES = ("torch", "transformers", "accelerate")


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
        self.watch, self.losses = Stopwatch(), list[float]()

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
        self.watch, self.losses = Stopwatch(), list[float]()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == WARMUP:
            self.watch.start()
        elif state.global_step == state.max_steps:
            self.rate = self.watch.rate(args.per_device_train_batch_size * (state.max_steps - WARMUP))

    def on_log(self, args, state, control, logs, **kwargs):
        self.losses += [float(logs["loss"])] if "loss" in logs else []


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
    loaded = load_base(config, text)
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
        differences += [abs(a - b) for a, b in zip(own, theirs, strict=True)]
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


def speed(args: Namespace) -> None:
    """Measure every pair of runs, and write the table after each repeat."""
    systems = {
        f"{trainer}, {name}": (kind, settings, name.startswith("identical"))
        for name, settings in SETTINGS.items()
        if args.only in name
        for trainer, kind in TRAINERS.items()
    }
    difference = largest_difference(2 * WARMUP)
    print(f"identical settings without dropout: losses differ by {difference:.1e} nats", flush=True)
    name, dtype = ("bf16", torch.bfloat16) if machine.native_bf16("cpu") else ("fp32", torch.float32)
    rate, per_token, tokens = apart(machine.matmul_rate, dtype, seconds=1.0), apart(flops_a_token), apart(mean_tokens)
    load: list[float] = []
    pairs: dict[str, list[tuple[Rate, Rate]]] = {system: [] for system in systems}
    for repeat in range(args.repeats):
        for system, (kind, settings, identical) in systems.items():
            peer, own = pair(kind, settings, identical, args.steps, repeat)
            pairs[system].append((peer, own))
            load.append(os.getloadavg()[0])
            print(
                f"{system}: {own.wall:.1f} beside {peer.wall:.1f} samples/s, {own.wall / peer.wall:.2f} times; "
                f"per CPU-second {own.cpu:.1f} beside {peer.cpu:.1f}, {own.cpu / peer.cpu:.2f} times; "
                f"load {load[-1]:.1f}",
                flush=True,
            )
        best = max(statistics.median(own.wall for _, own in both) for both in pairs.values())
        publish(
            "trainers-speed",
            "Trainers: speed",
            PACKAGES,
            table(
                f"trainer | samples/s, median of {repeat + 1} (min–max) | Hugging Face Trainer's, in the same pairs | "
                "ratio, median of pairs (min–max) | ratio per CPU-second",
                speed_rows(pairs),
            ),
            f"Identical settings without dropout: the losses of {2 * WARMUP} steps differ by {difference:.1e} nats at "
            f"most. {args.steps - WARMUP} steps of 32 rows were timed in each run, after {WARMUP} others.\n"
            f"Load of the machine (mean of a minute, these runs included): {spread(load, 1)}.",
            f"The defaults train in {name} here. Limit: {per_token / 1e6:.1f} MFLOP of matrix products "
            f"per token (forward and backward), {tokens:.1f} tokens per row without padding, "
            f"{rate / 1e9:.0f} GFLOP/s measured here in {name} for a 1024×1024 product: the fastest row "
            f"does its useful products at {100 * best * tokens * per_token / rate:.0f} % of that rate.",
        )


def speed_rows(pairs: dict[str, list[tuple[Rate, Rate]]]) -> Iterator[tuple]:
    """Rates of both, and how often each of ours was ahead."""
    for system, both in pairs.items():
        by_clock, by_cpu = ([getattr(own, kind) / getattr(peer, kind) for peer, own in both] for kind in Rate._fields)
        peers, ours = (spread([run.wall for run in runs], 1) for runs in zip(*both, strict=True))
        yield system, ours, peers, spread(by_clock, 2), spread(by_cpu, 2)


def our_accuracy(kernels: str, seed: int, epochs: int) -> float:
    """Test accuracy of AcceleratedTrainer at this course's defaults, with torch's kernels or fast ones."""
    with tempfile.TemporaryDirectory() as folder:
        run = {"num_epochs": epochs, "seed": seed, "output_dir": folder, "cpu_kernels": kernels}
        trainer, _ = build_trainer(build(COMMON | run))
        trainer.train()
        return trainer.evaluate("test")["accuracy"]


def accuracy(args: Namespace) -> None:
    """The table of test accuracies: neither the order of rows grouped by length nor other kernels may cost any."""
    systems: dict[str, Callable[[int], float]] = {
        "Hugging Face Trainer": lambda seed: apart(hugging_face, -1, seed, epochs=args.epochs)[1],
        "AcceleratedTrainer, defaults (fast kernels)": lambda seed: apart(our_accuracy, "fast", seed, args.epochs),
        "AcceleratedTrainer, torch's kernels": lambda seed: apart(our_accuracy, "torch", seed, args.epochs),
    }
    found: list[list[float]] = []
    for seed in range(args.seeds):
        found.append([measure(seed) for measure in systems.values()])
        print(f"seed {seed}, {args.epochs} epochs: {dict(zip(systems, found[-1], strict=True))}", flush=True)
    means = [statistics.mean(column) for column in zip(*found, strict=True)]
    rows = [(row, *(f"{value:.4f}" for value in values)) for row, values in [*enumerate(found), ("mean", means)]]
    publish(
        "trainers-accuracy",
        "Trainers: accuracy",
        PACKAGES,
        table(f"seed | {' | '.join(systems)}", rows),
        f"{args.epochs} epochs, batch 32, learning rate 5e-5, linear to 0, the last weights.",
    )


def main() -> None:
    """Run one of the two and write its table."""
    args = options(
        __doc__,
        what={"choices": ("speed", "accuracy")},
        repeats=5,
        steps=24,
        only={"default": "", "metavar": "TEXT", "help": "of speed: settings whose name has this text"},
        seeds=3,
        epochs=3,
    )
    logging.set_verbosity_error()
    {"speed": speed, "accuracy": accuracy}[args.what](args)


if __name__ == "__main__":
    main()
