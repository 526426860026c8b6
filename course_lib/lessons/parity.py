"""The parity matrix: every strategy by every engine on N ranks against one process, step by step.

The task holds what goes wrong most often: a tied embedding and head, a frozen parameter, two
parameter groups, accumulation over micro-batches of different lengths, clipping that is always
active, and a last batch that divides by nothing.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from course_lib import modeling
from course_lib.config import Config, build
from course_lib.config.axes import ENGINES
from course_lib.config.learning import DataConfig, ModelConfig
from course_lib.data import DataConnector, DataProcessor
from course_lib.data.processing import ProcessedData
from course_lib.launching.launch import launch
from course_lib.modeling.loading import LoadedModel
from course_lib.system.seeding import seed_everything
from course_lib.training.callbacks import Callback
from course_lib.training.run import adapt
from course_lib.training.trainer import Trainer

GLOBAL_ROWS = 8
STEPS = 8
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 2e-6, 2e-6
"""Largest difference allowed in any step's loss (nats) and in any final weight, in fp32."""

WORLD_SIZES = (1, 2, 4, 8)
"""Numbers of ranks; 8 are for layouts that take as many."""
PAIRS = [(strategy, engine) for strategy, engines in ENGINES.items() for engine in engines if engine != "accelerate"]
"""What runs on CPU processes; Accelerate's FSDP plugin takes GPUs alone."""

FROZEN = {"tiny-gpt2": "transformer.wpe.weight"}
"""The parameter that is not trained, by model; of others their last norm."""
ROUTED = re.compile("olmoe|mixtral")
"""Models trained in float64 here: in float32 a token between two experts takes, about once in ten such runs, the other
one after the rounding of another order of summation, and all that follows is different."""

Row = tuple[str, str]
"""Name of a layout, and its engine."""
Rows = Mapping[Row, Mapping[str, Any]]
"""Options by row."""
_BOTH = ("torch", "scratch")


def _over(strategy: str = "ddp", **ranks: int) -> dict[str, Any]:
    """Options of a layout: how the model's state is shared, and ranks by axis."""
    stages = {"training_type": "pipeline", "pipeline_chunks": 2} if "pipeline" in ranks else {}
    return {"strategy": strategy} | stages | {f"{axis}_parallel_size": size for axis, size in ranks.items()}


def _layouts() -> Iterator[tuple[str, Sequence[str], dict[str, Any]]]:
    """Each layout's name, its engines, and its options."""
    for strategy, engine in PAIRS:
        yield strategy, (engine,), _over(strategy)
    for strategy, engine in PAIRS:
        if strategy in ("ddp", "zero1", "fsdp") and engine != "deepspeed" and (strategy, engine) != ("ddp", "torch"):
            yield f"{strategy} × tensor 2", (engine,), _over(strategy, tensor=2)
    yield "pipeline 2", _BOTH, _over(pipeline=2)
    yield "pipeline 2 × fsdp 2", ("torch",), _over("fsdp", pipeline=2, data=2)
    yield "pipeline 2 × tensor 2", _BOTH, _over(pipeline=2, tensor=2)
    yield "pipeline 2 × tensor 2 × fsdp 2", ("torch",), _over("fsdp", pipeline=2, data=2, tensor=2)
    for strategy, size, way, engines in (
        ("ddp", 2, "zigzag", _BOTH),
        ("ddp", 2, "ring", ("scratch",)),
        ("ddp", 2, "ulysses", ("scratch",)),
        ("ddp", 2, "allgather", ("scratch",)),
        ("zero1", 2, "ulysses", ("deepspeed", "torch", "scratch")),
        ("zero2", 2, "allgather", ("deepspeed", "torch", "scratch")),
        ("zero3", 2, "zigzag", ("deepspeed", "scratch")),
        ("fsdp", 2, "ring", _BOTH),
        ("fsdp", 4, "zigzag", _BOTH),
    ):
        yield f"{strategy} × context {size}, {way}", engines, _over(strategy, context=size) | {"context_parallel": way}
    yield "ddp × context 2, zigzag × tensor 2", ("scratch",), _over(context=2, tensor=2)
    ulysses = _over("fsdp", context=2, tensor=2) | {"context_parallel": "ulysses"}
    yield "fsdp × context 2, ulysses × tensor 2", ("torch",), ulysses
    mixture = {"model": "tiny-olmoe"}
    for strategy, engine in PAIRS:
        # DeepSpeed's stage 3 wants every rank to call the same modules, and transformers' experts for float64 are
        # called only where they have tokens.
        if (strategy, engine) != ("zero3", "deepspeed"):
            yield f"{strategy}, mixture of experts", (engine,), _over(strategy) | mixture
    for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp"):
        engine = "torch" if strategy in ("zero3", "fsdp") else "scratch"
        for size in (2, 4):
            yield f"{strategy} × experts {size}", (engine,), _over(strategy, expert=size) | mixture


ROWS: dict[Row, dict[str, Any]] = {
    (name, engine): options | {"engine": engine} for name, engines, options in _layouts() for engine in engines
}
"""The matrix, in its order."""


def sharing(options: Mapping[str, Any]) -> int:
    """Ranks that have the same rows."""
    return math.prod(options.get(f"{axis}_parallel_size", 1) for axis in ("pipeline", "context", "tensor"))


def sizes(options: Mapping[str, Any]) -> list[int]:
    """Numbers of ranks that a layout is compared at: 1 to 4 as far as it fits, or as many as it takes."""
    least = math.prod(options.get(f"{axis}_parallel_size", 1) for axis in ("data", "expert")) * sharing(options)
    return [ranks for ranks in WORLD_SIZES if ranks >= least and ranks <= max(4, least)]


@dataclass(frozen=True)
class Trace:
    """Trace of one run: the loss of every step (nats per token), the gradient norms, the final weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix: the largest differences from the single process."""

    strategy: str
    engine: str
    world_size: int
    loss: float
    norm: float
    weight: float

    @property
    def agrees(self) -> bool:
        """Whether losses and weights are within the tolerances."""
        return self.loss <= LOSS_TOLERANCE and self.weight <= WEIGHT_TOLERANCE


class _Keep(Callback):
    """Keeps every logged loss and norm."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_log(self, trainer: Any, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.losses.append(values["loss"])
            self.norms.append(values["gradient_norm"])


def task(folder: Path, world_size: int, *, rows: int = GLOBAL_ROWS, **options: Any) -> Config:
    """The run's configuration: the same global batches of ``rows`` for every world size that divides half of them.

    Adam's epsilon is large, so that a gradient that is all rounding does not become a whole step.
    """
    return build(
        {
            "dataset": "tweets",
            "task": "causal_lm",
            "max_length": 24,
            "max_train_samples": 60,
            "max_eval_samples": 8,
            "model": "tiny-gpt2",
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-3,
            "max_grad_norm": 0.5,
            "warmup_steps": 2,
            "batch_size": max(1, rows // 2 // world_size),
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "logging_steps": 1,
            "save_steps": 0,
            "eval_steps": 0,
            "keep_best": False,
            "progress_bar": False,
            "device": "cpu",
            "mixed_precision": "no",
            "cpu_kernels": "torch",
            "output_dir": str(folder),
        }
        | options
    )


@functools.lru_cache(maxsize=4)
def prepared(data: DataConfig, model: ModelConfig, seed: int) -> tuple[LoadedModel, ProcessedData, DataProcessor]:
    """Data and the untrained model, made once for all runs of a process and of those that it forks."""
    text = DataConnector(data, seed).load()
    seed_everything(seed)
    loaded = modeling.load(
        model, data.task, label_names=None, texts=text.training_texts, seed=seed, max_length=data.max_length
    )
    for module in loaded.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # each rank draws its own masks, as it should
    if ROUTED.search(model.model):
        loaded.model.double().set_experts_implementation("eager")  # the grouped one takes no float64
        for name, parameter in loaded.model.named_parameters():
            if ".experts." in name:
                parameter.data *= 8  # as they are made, their output is a thousandth of what it is added to
    loaded.model.get_parameter(FROZEN.get(model.model, "model.norm.weight")).requires_grad_(False)
    processor = DataProcessor(data, loaded.tokenizer, max_positions=loaded.max_positions)
    return loaded, processor.process(text), processor


def trace(config: Config) -> Trace:
    """Train as the config says on the ranks that are here; the weights are whole on the main rank."""
    loaded, data, processor = prepared(config.data, config.model, config.run.seed)
    kept = _Keep()
    config.output_dir.mkdir(parents=True, exist_ok=True)
    loaded = replace(loaded, model=copy.deepcopy(loaded.model))
    if config.adapter.lora_r is not None:
        adapt(loaded, config.adapter, config.run.seed)
    trainer = Trainer(config, loaded, data, processor, [kept])
    trainer.train()
    weights = {name: tensor.detach().clone() for name, tensor in trainer.stored.whole_weights().items()}
    return Trace(kept.losses, kept.norms, weights)


def traces(folder: Path, world_size: int, layouts: Rows, *, rows: int = GLOBAL_ROWS, **options: Any) -> list[Trace]:
    """Several layouts one after the other on the ranks that are here."""
    recorded = []
    for number, layout in enumerate(layouts.values()):
        AcceleratorState._reset_state()  # the process group stays
        GradientState._reset_state()
        copies = world_size // sharing(layout)  # of the model, each with rows of its own
        recorded.append(trace(task(folder / str(number), copies, rows=rows, **{**options, **layout})))
        gc.collect()
    return recorded


def compare(actual: Trace, wanted: Trace, strategy: str, engine: str, world_size: int) -> Cell:
    """The largest differences between a run and the single process's."""
    assert len(actual.losses) == len(wanted.losses) > 0 and set(actual.weights) == set(wanted.weights)
    largest = [
        max(abs(a - b) for a, b in zip(x, y, strict=True))
        for x, y in ((actual.losses, wanted.losses), (actual.norms, wanted.norms))
    ]
    weight = max((actual.weights[name] - wanted.weights[name]).abs().max().item() for name in wanted.weights)
    return Cell(strategy, engine, world_size, largest[0], largest[1], weight)


def matrix(
    folder: Path | str,
    world_sizes: Sequence[int] | None = None,
    layouts: Rows = ROWS,
    *,
    steps: int = STEPS,
    timeout: float = 600.0,
    **options: Any,
) -> list[Cell]:
    """Every layout on several numbers of ranks, each against the plain loop on one process.

    Args:
        folder: for what the runs leave behind.
        world_sizes: numbers of ranks; where one does not divide half of the global batch, ranks and the single process
            take the next larger batch that it does. By default those of :func:`sizes`.
        layouts: rows of the matrix, or others.
        steps: optimizer steps.
        timeout: seconds for the layouts of one world size.
        options: of all runs, such as ``lora_r``.
    """
    folder, options = Path(folder), {"max_steps": steps} | options
    alone = functools.cache(
        lambda rows, model: trace(
            task(folder / f"one-{rows}-{model}", 1, rows=rows, training_type="basic", **options | {"model": model})
        )
    )
    cells = []
    for world_size in WORLD_SIZES if world_sizes is None else world_sizes:
        rows = math.lcm(GLOBAL_ROWS, 2 * world_size)  # two micro-batches
        here = {row: layout for row, layout in layouts.items() if world_sizes or world_size in sizes(layout)}
        for deepspeed in (False, True):  # it takes the whole process to itself
            chosen = {row: layout for row, layout in here.items() if (row[1] == "deepspeed") == deepspeed}
            if chosen:
                runs = launch(
                    traces,
                    folder / f"{world_size}-{deepspeed}",
                    world_size,
                    chosen,
                    rows=rows,
                    **options,
                    num_processes=world_size,
                    timeout=timeout,
                    device="cpu",
                )[0]
                for row, run in zip(chosen, runs, strict=True):
                    wanted = alone(rows, chosen[row].get("model", options.get("model", "tiny-gpt2")))
                    cells.append(compare(run, wanted, *row, world_size))
    return cells
