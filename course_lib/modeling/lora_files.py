"""Adapters in PEFT's files: adapter_model.safetensors and adapter_config.json, written and read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from course_lib.errors import ModelError
from course_lib.modeling import nf4
from course_lib.modeling.checkpoint_files import INDEXES
from course_lib.modeling.lora import LoraLinear, adapted, adapter_state, replace
from course_lib.writing import write_text

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
WHOLE = tuple(name for pair in INDEXES.items() for name in pair)
PREFIX = "base_model.model."
TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM"}
"""What PEFT calls a model's task, by the end of its class's name; it knows none of masked models."""
BASE_BITS = "base_bits"
"""Key in the metadata of the weights' file: ``4`` where the adapter was trained beside weights in NF4."""
REFUSED = {
    "use_dora": "DoRA",
    "rank_pattern": "ranks by layer",
    "alpha_pattern": "alphas by layer",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "layers that are there twice",
}
"""Settings of PEFT's LoRA that are not read here, and what they ask for."""


def save_adapter(
    model: nn.Module,
    folder: Path,
    base: str,
    weights: Mapping[str, Tensor] | None = None,
    *,
    revision: str | None = None,
) -> None:
    """Write a model's adapters so that ``peft.PeftModel.from_pretrained`` puts them beside the same base model.

    Args:
        model: with adapters.
        folder: that exists.
        base: name or folder of the base model.
        weights: see :func:`~course_lib.modeling.lora.adapter_state`.
        revision: of a base on the Hub.
    """
    layers = adapted(model)
    first = next(iter(layers.values()))
    bits = {BASE_BITS: "4"} if isinstance(first.base, nf4.Nf4Linear) else {}
    save_file(adapter_state(model, weights), folder / WEIGHTS, metadata={"format": "pt"} | bits)
    kind = type(model).__name__
    beside = [
        name
        for name in {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
        if not name.endswith(("lora_A", "lora_B"))
    ]
    about = {
        "peft_type": "LORA",
        "task_type": next((TASKS[end] for end in TASKS if kind.endswith(end)), None),
        "base_model_name_or_path": base,
        "revision": revision,
        "r": first.lora_A.out_features,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout.p,
        "target_modules": _shortest(model, list(layers)),
        "bias": "none",
        "fan_in_fan_out": _is_conv1d(first.base),
        "modules_to_save": sorted(beside) or None,
        "inference_mode": True,
    }
    write_text(folder / CONFIG, json.dumps(about, indent=1) + "\n")


def _is_conv1d(base: nn.Module) -> bool:
    return issubclass(base.kind, Conv1D) if isinstance(base, nf4.Nf4Linear) else isinstance(base, Conv1D)


def _shortest(model: nn.Module, names: list[str]) -> list[str]:
    """Ends of names that mean these layers and no others; the names themselves where there are none."""
    ends = {name.rpartition(".")[2] for name in names}
    meant = {
        name.removesuffix(".base")
        for name, module in model.named_modules()
        if name.removesuffix(".base").rpartition(".")[2] in ends
    }
    return sorted(ends if meant == set(names) else names)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    return (folder / CONFIG).is_file() and not any((folder / name).is_file() for name in WHOLE)


def base_of(folder: Path) -> tuple[str, str | None, bool]:
    """The base model that an adapter's folder names, its revision, and whether its weights were in NF4.

    Raises:
        ModelError: the folder holds no LoRA adapter that is read here.
    """
    about = _config(folder)
    base = about.get("base_model_name_or_path")
    if not base:
        raise ModelError(f"{folder}: {CONFIG} names no base model", "write it there, as base_model_name_or_path")
    with _opened(folder) as file:
        return base, about.get("revision"), (file.metadata() or {}).get(BASE_BITS) == "4"


def kind_of(folder: Path) -> str | None:
    """Kind of an adapter's task by PEFT's name, of those in ``TASKS``; None where its file does not say."""
    kind = _config(folder).get("task_type")
    return kind if kind in TASKS.values() else None


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Put the adapters of a folder beside a base model's layers, in place; what is trained is their state.

    Args:
        model: the base, with the head that the adapter was trained with.
        folder: written by :func:`save_adapter` or by PEFT.
    Raises:
        ModelError: the folder holds no LoRA adapter that is read here, or one for another model.
    """
    about = _config(folder)
    with _opened(folder) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    alpha, dropout = float(about.get("lora_alpha", 8)), float(about.get("lora_dropout", 0.0))
    model.requires_grad_(False)
    for name, tensor in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            rank = tensor.shape[0]
            scaled = alpha * rank**0.5 if about.get("use_rslora") else alpha  # rsLoRA: alpha / sqrt(r)
            try:
                replace(model, layer, LoraLinear(model.get_submodule(layer), rank, scaled, dropout))
            except AttributeError:
                raise _other(folder, f"{layer} is no linear layer of it") from None
    own = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in tensors.items():
            held = own.get(name.removeprefix(PREFIX))
            if held is None or held.shape != tensor.shape:
                raise _other(
                    folder,
                    f"{name.removeprefix(PREFIX)} is {tuple(tensor.shape)} in the adapter and "
                    f"{'absent' if held is None else tuple(held.shape)} in the model",
                )
            held.copy_(tensor)
            held.requires_grad_(True)


def _other(folder: Path, why: str) -> ModelError:
    return ModelError(f"{folder} is an adapter of another model: {why}", "give the base model that it was trained on")


def _config(folder: Path) -> dict[str, Any]:
    """What adapter_config.json says, of a kind that is read here."""
    try:
        about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind = about["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder} holds no adapter: {CONFIG} cannot be read ({error!r})",
            "give the folder that save_pretrained of PEFT or `course train --lora_r` wrote",
        ) from None
    merging = "merge it in PEFT: model.merge_and_unload().save_pretrained(OUT)"
    if kind != "LORA":
        raise ModelError(f"{folder} holds an adapter of kind {kind}, and LORA is read here", merging)
    asked = [what for name, what in REFUSED.items() if about.get(name)]
    if about.get("bias", "none") != "none":
        asked.append("trained biases")
    if asked:
        raise ModelError(f"{folder} holds an adapter with {asked[0]}, which is not read here", merging)
    return about


def _opened(folder: Path) -> Any:
    """The file of the weights, to read from."""
    try:
        return safe_open(str(folder / WEIGHTS), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{folder}: {WEIGHTS} cannot be read ({str(error).splitlines()[0]})", "copy the whole folder again"
        ) from None
