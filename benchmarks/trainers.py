"""Our trainers beside the Hugging Face Trainer: the same model, rows, batch and precision, in one run.

    python benchmarks/trainers.py speed                # samples/s, interleaved repeats, medians and ratios
    python benchmarks/trainers.py accuracy             # test accuracy of both at their own settings, 3 seeds

Writes benchmarks/trainers-speed.md or trainers-accuracy.md. Every figure is of one process with all
cores, forked for it alone, so that no trainer meets what another set for the process. `identical`: fp32,
batches in random order, padded to their longest row, as the Hugging Face Trainer does, and torch's
kernels; with fast kernels (`--cpu_kernels fast`) all else is identical. `defaults`: those of this course,
with bf16 where the hardware multiplies it, and each kind of kernels: training_type basic has torch's by default,
accelerated the fast ones.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from course_lib.config import Config, build
from course_lib.data import DataConnector, DataProcessor
from course_lib.modeling import load
from course_lib.system import machine
from course_lib.system.seeding import seed_everything
from course_lib.training.callbacks import Callback
from course_lib.training.run import build_trainer
from course_lib.writing import write_text

HERE = Path(__file__).parent
COMMON = {"model": "minilm", "batch_size": 32, "max_length": 64, "progress_bar": False, "save_steps": 0,
          "eval_steps": 0, "keep_best": False, "device": "cpu", "logging_steps": 10}
IDENTICAL = {"group_by_length": False, "mixed_precision": "no", "cpu_kernels": "torch"}
KERNELS = {"torch": "torch's kernels", "fast": "fast kernels"}
TRAINERS = {"BasicTrainer": "basic", "AcceleratedTrainer": "accelerated"}
WARMUP = 4


class Clock(Callback):
    """Seconds of the steps after the warm-up."""

    def on_step_end(self, trainer) -> None:
        if trainer.state.step == WARMUP:
            self.start, self.samples = time.perf_counter(), trainer.state.samples
        elif trainer.state.finished:
            self.rate = (trainer.state.samples - self.samples) / (time.perf_counter() - self.start)


def apart(function: Callable, *args, **options) -> Any:
    """What a function returns in a process of its own."""
    with get_context("fork").Pool(1) as pool:
        return pool.apply(function, args, options)


def ours(kind: str, steps: int, seed: int, **options) -> float:
    """Samples/s of one of our trainers."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        run = {"training_type": kind, "max_steps": steps, "seed": seed, "output_dir": folder}
        config = build(COMMON | options | run)
        trainer, _ = build_trainer(config, [clock])
        trainer.eval_loaders.clear()
        trainer.train()
        trainer.engine.close()
    return clock.rate


def measured(kind: str, steps: int, options: dict[str, Any], seed: int) -> float:
    """:func:`ours` in a process of its own."""
    return apart(ours, kind, steps, seed, **options)


def prepared(config: Config):
    """Model, tokenized splits and collator, as our trainers get them."""
    text = DataConnector(config.data, config.run.seed).load()
    seed_everything(config.run.seed)
    loaded = load(config.model, "classification", label_names=text.label_names, texts=[], seed=config.run.seed,
                  max_length=config.data.max_length)
    processor = DataProcessor(config.data, loaded.tokenizer, max_positions=loaded.max_positions)
    return loaded, processor.process(text), processor


def hugging_face(steps: int, seed: int, epochs: int | None = None) -> tuple[float, float | None]:
    """Samples/s of the Hugging Face Trainer at its defaults, and its test accuracy after whole epochs."""
    from transformers import DataCollatorWithPadding, TrainerCallback

    class HfClock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == WARMUP:
                self.start = time.perf_counter()
            self.end = time.perf_counter()

    config = build(COMMON | {"seed": seed})
    loaded, data, _ = prepared(config)
    clock = HfClock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=32, per_device_eval_batch_size=64, learning_rate=5e-5,
            max_steps=steps, num_train_epochs=epochs or 1, seed=seed, use_cpu=True, report_to="none",
            save_strategy="no", disable_tqdm=True, logging_strategy="steps", logging_steps=10)
        drop = [c for c in data.splits["train"].column_names if c not in ("input_ids", "attention_mask", "labels")]
        trainer = Trainer(model=loaded.model, args=arguments, callbacks=[clock],
                          train_dataset=data.splits["train"].remove_columns(drop),
                          data_collator=DataCollatorWithPadding(loaded.tokenizer))
        trainer.log = lambda *args, **kwargs: None  # no dictionaries on the screen between our lines
        trainer.train()
        if epochs is None:
            return 32 * (steps - WARMUP) / (clock.end - clock.start), None
        test = data.splits["test"].remove_columns(drop)
        output = trainer.predict(test)
        return 0.0, float((output.predictions.argmax(-1) == output.label_ids).mean())


def flops_a_sample() -> float:
    """Matrix FLOPs of forward and backward per sample, at the padding of each way of batching."""
    config = build(COMMON)
    loaded, data, processor = prepared(config)
    rows = data.splits["train"].select(range(256))
    batch = processor.collator()([rows[i] | {"ignore": False, "mask_seed": (0, 0, i)} for i in range(256)])
    counter = FlopCounterMode(display=False)
    with counter:
        loaded.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.sum().backward()
    return counter.get_total_flops() / batch["input_ids"].numel()


def speed(repeats: int, steps: int) -> str:
    """The table of samples/s; the systems take turns, so that a drift of the machine meets them all."""
    systems: dict[str, Callable[[int], float]] = {
        "Hugging Face Trainer": lambda seed: apart(hugging_face, steps, seed)[0]}
    settings: dict[str, dict[str, Any]] = {
        "identical": IDENTICAL, "identical, fast kernels": IDENTICAL | {"cpu_kernels": "fast"},
        **{f"defaults, {name}": {"cpu_kernels": kernels} for kernels, name in KERNELS.items()}}
    for name, options in settings.items():
        for trainer, kind in TRAINERS.items():
            systems[f"{trainer}, {name}"] = partial(measured, kind, steps, options)
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for repeat in range(repeats):
        for name, measure in systems.items():
            rates[name].append(measure(repeat))
            print(f"{name}: {rates[name][-1]:.1f} samples/s", flush=True)
    peer = rates["Hugging Face Trainer"]
    lines = ["| trainer | samples/s, median (min–max) | ratio to the Hugging Face Trainer, median of pairs |",
             "|---|---|---|"]
    for name, values in rates.items():
        ratio = statistics.median(v / p for v, p in zip(values, peer, strict=True))
        spread = f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"
        lines.append(f"| {name} | {spread} | {ratio:.2f} |")
    name, dtype = ("bf16", torch.bfloat16) if machine.native_bf16("cpu") else ("fp32", torch.float32)
    rate, per_token = apart(machine.matmul_rate, dtype, seconds=1.0), apart(flops_a_sample)
    best = max(statistics.median(values) for values in rates.values())
    config = build(COMMON)
    _, data, _ = prepared(config)
    tokens = statistics.mean(data.splits["train"]["length"])
    share = best * tokens * per_token / rate
    lines += ["", f"The defaults train in {name} here. Limit: {per_token / 1e6:.1f} MFLOP of matrix products per token "
              f"(forward and backward), {tokens:.1f} tokens per row without padding, {rate / 1e9:.0f} GFLOP/s measured "
              f"here in {name} for a 1024×1024 product: the fastest row does its useful products at "
              f"{100 * share:.0f} % of that rate."]
    return "\n".join(lines)


def our_accuracy(kernels: str, seed: int, epochs: int) -> float:
    """Test accuracy of BasicTrainer at this course's defaults, with torch's kernels or fast ones."""
    with tempfile.TemporaryDirectory() as folder:
        run = {"training_type": "basic", "num_epochs": epochs, "seed": seed, "output_dir": folder,
               "cpu_kernels": kernels}
        trainer, _ = build_trainer(build(COMMON | run))
        trainer.train()
        return trainer.evaluate("test")["accuracy"]


def accuracy(seeds: int, epochs: int) -> str:
    """The table of test accuracies: neither the order of rows grouped by length nor other kernels may cost any."""
    ours_with = "".join(f" BasicTrainer, defaults, {name} |" for name in KERNELS.values())
    lines = [f"| seed | Hugging Face Trainer |{ours_with}", "|---" * (2 + len(KERNELS)) + "|"]
    found = []
    for seed in range(seeds):
        found.append([apart(hugging_face, -1, seed, epochs)[1],
                      *(apart(our_accuracy, kernels, seed, epochs) for kernels in KERNELS)])
        lines.append(f"| {seed} | " + " | ".join(f"{each:.4f}" for each in found[-1]) + " |")
        print(lines[-1], flush=True)
    means = [statistics.mean(values) for values in zip(*found, strict=True)]
    lines.append("| mean | " + " | ".join(f"{each:.4f}" for each in means) + " |")
    return "\n".join([*lines, "", f"{epochs} epochs, batch 32, learning rate 5e-5, linear to 0, the last weights."])


def main() -> None:
    """Run one of the two and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "accuracy"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    logging.set_verbosity_error()
    table = speed(args.repeats, args.steps) if args.what == "speed" else accuracy(args.seeds, args.epochs)
    text = (f"# Trainers: {args.what}\n\n{machine.measured_on('torch', 'transformers', 'accelerate')}\n\n{table}\n")
    write_text(HERE / f"trainers-{args.what}.md", text)
    print(text)


if __name__ == "__main__":
    main()
