"""Trains architectures of transformers, built small from their config classes, in every way, and compares with one
process."""

import contextlib
import copy
import functools
import gc
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from course_lib.config import Config, build
from course_lib.data import DataConnector, DataProcessor
from course_lib.data.processing import ProcessedData
from course_lib.errors import CourseError
from course_lib.launching.launch import RankError, RanksHung, launch
from course_lib.modeling.loading import HEADS, LoadedModel, _checkpoint_activations
from course_lib.training.callbacks import Callback
from course_lib.training.trainer import Trainer
from testing import tiny_architectures

ROWS, STEPS, LENGTH = 8, 3, 16
TOLERANCE = 1e-5
"""Largest difference allowed in a step's loss (nats) and in a final weight, in fp32."""

ARCHITECTURES: Mapping[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    # encoders
    **{
        kind: (kind, {}, ("classification", "masked_lm"))
        for kind in (
            "bert",
            "roberta",
            "xlm-roberta",
            "camembert",
            "distilbert",
            "albert",
            "electra",
            "deberta-v2",
            "modernbert",
            "mpnet",
            "squeezebert",
            "roformer",
            "funnel",
        )
    },
    # decoders
    **{
        kind: (kind, {}, ("classification", "causal_lm"))
        for kind in (
            "xlnet",
            "gpt2",
            "gpt_neo",
            "gpt_neox",
            "gptj",
            "opt",
            "bloom",
            "falcon",
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "phi",
            "phi3",
            "stablelm",
            "olmo2",
            "smollm3",
        )
    },
    "llama untied": ("llama", {"tie_word_embeddings": False, "attention_bias": True}, ("classification", "causal_lm")),
    **{kind: (kind, {}, ("causal_lm",)) for kind in ("cohere", "granite")},
    # mixtures of experts, state spaces
    **{kind: (kind, {}, ("classification", "causal_lm")) for kind in ("mixtral", "qwen2_moe", "qwen3_moe")},
    **{kind: (kind, {}, ("causal_lm",)) for kind in ("olmoe", "mamba")},
    # encoders with decoders
    **{kind: (kind, {}, ("classification",)) for kind in ("t5", "umt5")},
    "bart": ("bart", {}, ("classification", "masked_lm")),
}
"""By name: the model type, fields of its config besides the small ones, and its tasks."""

WAYS: Mapping[str, dict[str, Any]] = {
    "ddp torch": {},
    "ddp scratch": {"engine": "scratch"},
    "zero1 torch": {"strategy": "zero1", "engine": "torch"},
    "zero2 scratch": {"strategy": "zero2", "engine": "scratch"},
    "zero3 scratch": {"strategy": "zero3", "engine": "scratch"},
    "zero3 torch": {"strategy": "zero3", "engine": "torch"},
    "zero3 deepspeed": {"strategy": "zero3", "engine": "deepspeed"},
    "fsdp torch": {"strategy": "fsdp"},
    "fsdp scratch": {"strategy": "fsdp", "engine": "scratch"},
    "fsdp recomputed": {"strategy": "fsdp", "engine": "scratch", "activation_checkpointing": True},
    "tensor": {"tensor_parallel_size": 2, "batch_size": ROWS},
    "pipeline": {"training_type": "pipeline", "schedule": "1f1b", "pipeline_chunks": 2, "batch_size": ROWS},
}
"""Of training on two ranks, and their options."""


@dataclass(frozen=True)
class Outcome:
    """What came of one way to train.

    Attributes:
        loss: largest difference of a step's loss (nats) from one process; None where it did not train.
        weight: of a final weight.
        line: how it was refused, or how it crashed.
        crashed: whether it did.
    """

    loss: float | None = None
    weight: float | None = None
    line: str = ""
    crashed: bool = False

    @property
    def agrees(self) -> bool:
        """Whether it trained as one process does."""
        return self.loss is not None and self.weight is not None and max(self.loss, self.weight) <= TOLERANCE

    def __str__(self) -> str:
        if self.loss is None:
            return "**crash**" if self.crashed else "refused"
        return f"{self.loss:.0e}" if self.agrees else f"**{self.loss:.0e}, {self.weight:.0e}**"


class _Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, trainer: Any, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.losses.append(values["loss"])


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a character; those that models know by number are where tiny configs have them."""
    special = ("[PAD]", "[BOS]", "[EOS]", "[MASK]", "[UNK]")
    characters = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'#@:-"
    words = {word: number for number, word in enumerate((*special, *characters))}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # type: ignore[arg-type]
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="$A [EOS]", special_tokens=[("[EOS]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        mask_token="[MASK]",
        unk_token="[UNK]",
        cls_token="[BOS]",
        sep_token="[EOS]",
    )


def config_of(folder: Path, task: str, **options: Any) -> Config:
    """A run over the same global batches, whatever the way; Adam's epsilon keeps rounding from becoming a step."""
    return build(
        {
            "dataset": "tweets",
            "task": task,
            "max_length": LENGTH,
            "max_train_samples": 48,
            "max_eval_samples": 8,
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-3,
            "weight_decay": 0.1,
            "batch_size": ROWS // 2,
            "max_steps": STEPS,
            "logging_steps": 1,
            "save_steps": 0,
            "eval_steps": 0,
            "keep_best": False,
            "progress_bar": False,
            "device": "cpu",
            "mixed_precision": "no",
            "cpu_kernels": "torch",
            "watchdog": 0.0,
            "overwrite_output_dir": True,
            "output_dir": str(folder),
        }
        | options
    )


@functools.lru_cache(maxsize=3)
def _data(task: str) -> tuple[ProcessedData, DataProcessor]:
    config = config_of(Path("unused"), task)
    processor = DataProcessor(config.data, tokenizer())
    return processor.process(DataConnector(config.data, config.run.seed).load()), processor


@functools.lru_cache(maxsize=2)
def _model(name: str, task: str) -> nn.Module:
    """The small model, without dropout, loaded from a folder as a user's is: RoFormer's table of positions is trained
    then, and not in a new model."""
    kind, fields, _ = ARCHITECTURES[name]
    labels = _data(task)[0].label_names
    model = tiny_architectures.build(
        CONFIG_MAPPING[kind], task, **fields, **({"num_labels": len(labels)} if labels else {})
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = HEADS[task][0].from_pretrained(folder, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for field, value in list(getattr(holder, "__dict__", {}).items()):
                if "drop" in field and isinstance(value, float):
                    setattr(holder, field, 0.0)
    return model


def _trained(folder: Path, name: str, task: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses by step, and whole weights, on the main rank."""
    data, processor = _data(task)
    config, kept = config_of(folder, task, **options), _Losses()
    config.output_dir.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(_model(name, task))
    if config.model.activation_checkpointing:
        _checkpoint_activations(model, type(model).__name__)  # type: ignore[arg-type]
    loaded = LoadedModel(model, tokenizer(), "built small", None)  # type: ignore[arg-type]
    trainer = Trainer(config, loaded, data, processor, [kept])
    trainer.train()
    return kept.losses, {key: tensor.detach().clone() for key, tensor in trainer.stored.whole_weights().items()}


def _on_ranks(folder: Path, name: str, task: str, ways: list[str], wanted: tuple) -> dict[str, Outcome]:
    """Each way, one after the other, on the ranks that are here; a refusal ends it for all of them."""
    torch.set_num_threads(1)
    found = {}
    for way in ways:
        AcceleratorState._reset_state()  # the process group stays
        GradientState._reset_state()
        print(f"way: {way}", flush=True)
        try:
            losses, weights = _trained(folder / way.replace(" ", "-"), name, task, **WAYS[way])
        except CourseError as error:
            found[way] = Outcome(line=str(error))
            continue
        if weights:
            found[way] = Outcome(
                max(abs(a - b) for a, b in zip(losses, wanted[0], strict=True)),
                max((weights[key] - wanted[1][key]).abs().max().item() for key in wanted[1]),
            )
        gc.collect()
    return found


@tiny_architectures.errors_only()
def outcomes(
    folder: Path, name: str, task: str, ways: Iterable[str] = tuple(WAYS), timeout: float = 120.0
) -> dict[str, Outcome]:
    """Train one architecture for one task in some ways on two ranks, beside the plain loop on one process.

    Args:
        folder: for what the runs leave behind.
        name: of :data:`ARCHITECTURES`.
        task: one of its.
        ways: of :data:`WAYS`.
        timeout: seconds for all of them together.
    """
    with contextlib.redirect_stdout(None):
        losses, weights = _trained(folder / "one", name, task, training_type="basic", batch_size=ROWS)
    start = _model(name, task).state_dict()
    moved = max((weights[key] - start[key]).abs().max().item() for key in weights if key in start)
    assert len(losses) == STEPS and moved > 10 * TOLERANCE, "a difference could not be seen"
    found: dict[str, Outcome] = {}
    # DeepSpeed takes the whole process to itself, and what crashed leaves ranks that cannot go on.
    waiting = [[way] for way in ways if "deepspeed" in way] + [[way for way in ways if "deepspeed" not in way]]
    while waiting:
        chosen = waiting.pop()
        if not chosen:
            continue
        try:
            found |= launch(
                _on_ranks,
                folder,
                name,
                task,
                chosen,
                (losses, weights),
                num_processes=2,
                timeout=timeout,
                device="cpu",
                stream=False,
            )[0]
        except (RankError, RanksHung, CourseError) as error:
            if len(chosen) == 1:
                found[chosen[0]] = Outcome(line=str(error).splitlines()[0], crashed=True)
            else:
                waiting += [[way] for way in chosen]
    return {way: found[way] for way in ways}
