"""Loads a model by name, with a tokenizer, so that they fit the task and each other."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import enable_progress_bars
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from course_lib.config import ModelConfig
from course_lib.errors import ModelError
from course_lib.modeling import checkpoint_files, lora, lora_files, model_sources, nf4, presets, weight_names
from course_lib.modeling.model_sources import Origin
from course_lib.modeling.recomputing import recompute_activations

HEADS: dict[str, tuple[Any, Any]] = {
    "classification": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    "causal_lm": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    "masked_lm": (AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING),
}
"""For each task, what makes a model with its head, and the model classes by config class."""


ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""What configs of transformers call the dropout of attention."""


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer, fitted to each other; weights in fp32, on the CPU."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    """One line: where it is from, what was verified, which weights are new."""
    max_positions: int | None
    """Tokens that the model can place; None where it has no limit."""
    base: str | None = None
    """Folder or Hub name with the same weights; None where some outside of ``new`` are from nowhere else."""
    new: tuple[str, ...] = ()
    """Modules whose weights are new, beside pretrained ones."""


def load(
    config: ModelConfig,
    task: str,
    *,
    label_names: Sequence[str] | None,
    texts: Iterable[str],
    seed: int,
    max_length: int,
) -> LoadedModel:
    """The model of a run, ready to train.

    New weights (all of a tiny preset's, the head of a pretrained model's) depend on the seed alone, so that every
    rank makes the same ones; the global random state is left as it was.

    Args:
        config: name, revision, attention and activation checkpointing.
        task: `classification`, `causal_lm` or `masked_lm`.
        label_names: of the classes, in order of their numbers; needed for classification only.
        texts: training texts; a tiny preset trains its tokenizer on them, other models ignore them.
        seed: of new weights.
        max_length: tokens that a tiny preset must be able to place.
    Raises:
        ModelError: unknown, out of reach, damaged, or without a head for the task.
    """
    tokenizer: PreTrainedTokenizerBase
    base: str | None = None
    new: list[str] = []
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        if config.model in presets.TINY:
            model_sources.refuse_revision(config, "a preset")
            architecture, tokenizer = presets.build(config.model, texts, max_length)
            _set_dropout(architecture, config)
            auto = _prepare_head(architecture, task, label_names, config.model)
            model = auto.from_config(
                architecture, dtype=torch.float32, attn_implementation=_implementation(config.attention)
            )
            source = f"{config.model}, new weights from seed {seed}, tokenizer trained on the data"
        else:
            origin = model_sources.locate(config)
            architecture = _read_config(origin)
            _set_dropout(architecture, config)
            auto = _prepare_head(architecture, task, label_names, config.model)
            model, new = _read_model(origin, auto, architecture, config.attention)
            tokenizer, base = _read_tokenizer(origin), origin.path
            source = origin.source + (f", new weights from seed {seed}: {', '.join(new)}" if new else "")
        if task == "masked_lm" and tokenizer.mask_token is None:
            raise ModelError(f"the tokenizer of `{config.model}` has no mask token", "use another model or task")
        rows = model.get_input_embeddings().weight.shape
        loaded = _fit(model, tokenizer, source)
        same = base if model.get_input_embeddings().weight.shape == rows else None
        loaded = dataclasses.replace(loaded, base=same, new=tuple(new))
    if config.activation_checkpointing:
        _checkpoint_activations(model, config.model)
    return loaded


def load_trained(folder: str | Path, task: str) -> LoadedModel:
    """A model that a run left in Hugging Face form, with its own head and labels.

    Args:
        folder: holds config.json, weights and a tokenizer.
        task: `classification`, `causal_lm` or `masked_lm`; the model must have been trained for it.
    Raises:
        ModelError: no such folder, or the model in it is damaged or not trained for the task.
    """
    if lora_files.is_adapter(Path(folder)):
        return _load_adapted(Path(folder), task)
    origin = model_sources.local(folder)
    with torch.random.fork_rng(devices=[]), _quiet():
        architecture = _read_config(origin)
        auto, classes = HEADS[task]
        name = next(iter(architecture.architectures or ()), "no model class")
        if type(architecture) not in classes or classes[type(architecture)].__name__ != name:
            raise ModelError(
                f"{folder} holds {name}, which is not trained for the task {task}",
                "give the model folder of a run with that task",
            )
        model, new = _read_model(origin, auto, architecture, "auto")
        if new:
            raise ModelError(f"{folder}: the weights lack {', '.join(new)}", "give the folder of a finished run")
        return _fit(model, _read_tokenizer(origin), f"trained model in {folder}")


def check_trained(folder: str | Path) -> None:
    """See that there is what :func:`load_trained` would load: a model, or an adapter and its base model.

    Raises:
        ModelError: what is there instead.
    """
    if not lora_files.is_adapter(Path(folder)):
        model_sources.local(folder)
        return
    _locate_base(Path(folder))


def task_of(folder: Path) -> str:
    """The task that an adapter was trained for, by the class of its model.

    Raises:
        ModelError: it is none of :data:`HEADS`.
    """
    if (kind := lora_files.kind_of(folder)) is not None:
        return {"SEQ_CLS": "classification", "CAUSAL_LM": "causal_lm"}[kind]
    own = Origin(str(folder), "", {"local_files_only": True})
    architecture = _read_config(own if (folder / "config.json").is_file() else _locate_base(folder))
    name = next(iter(architecture.architectures or ()), "no model class")
    for task, (_, classes) in HEADS.items():
        if type(architecture) in classes and classes[type(architecture)].__name__ == name:
            return task
    raise ModelError(
        f"{folder} is an adapter of {name}, and models for {', '.join(HEADS)} are merged here",
        "merge it in PEFT: model.merge_and_unload().save_pretrained(OUT)",
    )


def _locate_base(folder: Path) -> Origin:
    """The place of the model that an adapter is for."""
    base, revision, _ = lora_files.base_of(folder)
    try:
        return model_sources.locate(ModelConfig(model=base, revision=revision))
    except ModelError as error:
        raise ModelError(
            f"{folder} is an adapter (LoRA) of {base}, which cannot be had: {error.what}",
            f"write where it is into {folder / lora_files.CONFIG}, as base_model_name_or_path",
        ) from None


def _load_adapted(folder: Path, task: str) -> LoadedModel:
    """An adapter's base model, and the adapter beside its layers."""
    base, _, packed = lora_files.base_of(folder)
    origin = _locate_base(folder)
    own = Origin(str(folder), "", {"local_files_only": True})
    with torch.random.fork_rng(devices=[]), _quiet():
        # With an adapter beside it, a folder's config.json says what its head's classes are.
        architecture = _read_config(own if (folder / "config.json").is_file() else origin)
        auto, classes = HEADS[task]
        if type(architecture) not in classes:
            raise ModelError(
                f"{folder} is an adapter of {base}, which has no head for the task {task}",
                "give the folder of a run with that task",
            )
        model, new = _read_model(origin, auto, architecture, "auto")
        if packed:
            nf4.quantize_linear(model, lora.linear_layers(model))
        lora_files.load_adapter(model, folder)
        lacking = [name for name in new if not any(p.requires_grad for p in model.get_submodule(name).parameters())]
        if lacking:
            raise ModelError(
                f"{folder}: neither the adapter nor {base} has weights of {', '.join(lacking)}",
                "give the folder of a run with that task",
            )
        has_own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        return _fit(model, _read_tokenizer(own if has_own else origin), f"adapter in {folder} beside {base}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No report of new weights (`source` names them) and no bar for a load of a second; downloads keep theirs."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    enable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _prepare_head(architecture: PreTrainedConfig, task: str, label_names: Sequence[str] | None, name: str) -> Any:
    """Write what the task asks of the head into the config, and return the auto class that makes it."""
    auto, classes = HEADS[task]
    if type(architecture) not in classes:
        fits = [other for other, (_, classes) in HEADS.items() if type(architecture) in classes]
        raise ModelError(
            f"model `{name}` ({architecture.model_type}) has no head for the task {task}",
            f"use the task {' or '.join(fits)}, or another model" if fits else "use another model",
        )
    if task == "classification":
        if not label_names:
            raise ValueError("classification needs label_names")
        architecture.id2label = dict(enumerate(label_names))
        architecture.label2id = {label: index for index, label in enumerate(label_names)}
        architecture.problem_type = "single_label_classification"
    if task == "causal_lm" and hasattr(architecture, "is_decoder"):
        architecture.is_decoder = True  # an encoder must not see the tokens that it is asked to predict
    return auto


def _set_dropout(architecture: PreTrainedConfig, config: ModelConfig) -> None:
    """Write the dropout of attention that the run asks for into the model's config."""
    if config.attention_dropout is None:
        return
    held = [name for name in ATTENTION_DROPOUT if hasattr(architecture, name)]
    if not held:
        raise ModelError(
            f"model `{config.model}` ({architecture.model_type}) has no dropout in its attention",
            "leave --attention_dropout out",
        )
    for name in held:
        setattr(architecture, name, config.attention_dropout)


def _read_config(origin: Origin) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(origin.path, trust_remote_code=False, **origin.options)
    except Exception as error:  # whatever a foreign file makes of its reader is that file's fault
        raise ModelError(
            f"{origin.path}: config.json cannot be used ({_first_line(error)})",
            "give an architecture that transformers itself knows",
        ) from error


def _read_tokenizer(origin: Origin) -> PreTrainedTokenizerBase:
    mend = "the folder needs the files that tokenizer.save_pretrained writes"
    try:
        tokenizer = AutoTokenizer.from_pretrained(origin.path, trust_remote_code=False, **origin.options)
    except Exception as error:  # tokenizers raises a bare Exception for a damaged file
        raise ModelError(f"{origin.path}: the tokenizer cannot be loaded ({_first_line(error)})", mend) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of a folder without one
        raise ModelError(f"{origin.path} has no tokenizer", mend)
    return tokenizer


def _read_model(
    origin: Origin, auto: Any, architecture: PreTrainedConfig, attention: str
) -> tuple[PreTrainedModel, list[str]]:
    """A model with its pretrained weights, and the names of the modules of its head whose weights are new."""
    name = origin.path
    checkpoint_files.refuse_quantized(getattr(architecture, "quantization_config", None), name)
    model, report = _from_pretrained(origin, auto, architecture, attention)
    missing, unexpected = set(report["missing_keys"]), set(report["unexpected_keys"])
    if problem := weight_names.misfit(missing, unexpected, report["mismatched_keys"], model.base_model_prefix):
        raise ModelError(f"the weights of `{name}` do not fit its config.json: {problem[0]}", problem[1])
    new = {*missing, *(key for key, *_ in report["mismatched_keys"])}
    checkpoint_files.refuse_not_finite(model.named_parameters(), name)
    return model, sorted({key.rpartition(".")[0] if ".pooler." in key else key.partition(".")[0] for key in new})


def _from_pretrained(
    origin: Origin, auto: Any, architecture: PreTrainedConfig, attention: str
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """What transformers loads, and its report.

    Raises:
        ModelError: the files cannot be read, or the model has no such attention.
    """
    name = origin.path
    try:
        return auto.from_pretrained(
            name,
            config=architecture,
            dtype=torch.float32,
            attn_implementation=_implementation(attention),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
            **origin.options,
        )
    except (SafetensorError, EOFError) as error:
        raise ModelError(
            f"the weights of `{name}` are damaged or cut short ({_first_line(error) or 'end of file'})",
            "copy or download them again",
        ) from error
    except Exception as error:  # a damaged pickle or index can raise anything
        if attention == "sdpa" and "scaled_dot_product_attention" in str(error):
            raise ModelError(f"model `{name}` has no sdpa attention", "use --attention eager") from error
        raise ModelError(
            f"the weights of `{name}` cannot be loaded ({_first_line(error)})",
            "they have to be whole, in model.safetensors or in shards",
        ) from error


def _implementation(attention: str) -> str | None:
    """What transformers calls it; None lets it take sdpa where the model has it."""
    return None if attention == "auto" else attention


def _fit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> LoadedModel:
    """Make model and tokenizer agree on padding and on the size of the vocabulary."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is not None:
            tokenizer.pad_token = tokenizer.eos_token
        else:
            tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        tokenizer.padding_side = "right"
    # Sequence classification with a decoder reads the logits at the last token that is not this one.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    if vocabulary > model.config.get_text_config().vocab_size:
        model.resize_token_embeddings(vocabulary)
        source += f", embeddings grown to {vocabulary} rows"
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # training has no use for past keys and values; generate() sets its own
    return LoadedModel(model, tokenizer, source, _max_positions(model, tokenizer))


def _checkpoint_activations(model: PreTrainedModel, name: str) -> None:
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"model `{name}` ({model.config.model_type}) has no activation checkpointing",
            "leave --activation_checkpointing out",
        )
    recompute_activations(model)


def _max_positions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The smaller of what the position embeddings and the tokenizer allow."""
    limits = [tokenizer.model_max_length, getattr(model.config.get_text_config(), "max_position_embeddings", None)]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            # RoBERTa and its kin count positions from padding_idx + 1.
            limits.append(module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
    # A tokenizer without a limit says so by a number of 31 digits.
    return min((limit for limit in limits if limit and 0 < limit < 10**9), default=None)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
