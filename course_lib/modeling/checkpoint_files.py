"""Looks at a model's folder before anything is loaded, and says what it is where it is no whole model."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from course_lib.errors import ModelError

INDEXES = {"model.safetensors": "model.safetensors.index.json", "pytorch_model.bin": "pytorch_model.bin.index.json"}
"""Names of whole weights, each with the index that stands in its place where they are in shards."""
POINTER = b"version https://git-lfs.github.com/spec/"
"""How the file begins that Git leaves where it did not fetch the large one."""
SMALL = 1024
"""Bytes that no such file reaches."""

WHOLE_WEIGHTS = (
    "give a folder that save_pretrained wrote; sharded training state is made whole by DeepSpeed's zero_to_fp32.py or "
    "by `accelerate merge-weights`, and other forms (GGUF, ONNX, a pickle of one's own) by loading them in Python"
)
"""Cure for a folder whose weights are in no form that is read here."""


def check(folder: Path) -> list[Path]:
    """See that a folder holds a whole model in Hugging Face form.

    Returns:
        The files of its weights.
    Raises:
        ModelError: what it is instead, or which file is not what its name says, and what to do.
    """
    names = sorted(path.name for path in folder.iterdir())
    pointers = [name for name in names if _is_pointer(folder / name)]
    if pointers:
        raise ModelError(
            f"{pointers[0]} in {folder} is a pointer of Git LFS, not the file itself",
            f"fetch the files: git -C {folder} lfs install, then git -C {folder} lfs pull",
        )
    whole = [name for name in (*INDEXES, *INDEXES.values()) if name in names]
    _refuse_adapter(folder, names, whole)
    if "manifest.json" in names and "state.json" in names:
        raise ModelError(
            f"{folder} is a checkpoint of a run, to go on from by --resume_from_checkpoint",
            f"give the run's trained model, {folder.parent / 'model'}; a run that did not end leaves one "
            "once it is gone on with",
        )
    if "config.json" not in names and (folder / "model" / "config.json").is_file():
        raise ModelError(f"{folder} is a run's folder", f"give the model in it, {folder / 'model'}")
    if "config.json" not in names:
        raise ModelError(f"{folder} has no config.json, so it is not a model in Hugging Face form", WHOLE_WEIGHTS)
    refuse_quantized(_config(folder).get("quantization_config"), str(folder))
    if not whole:
        raise ModelError(
            f"the weights of `{folder}` cannot be loaded: it has neither model.safetensors nor shards with their index",
            WHOLE_WEIGHTS,
        )
    files = _weights(folder, whole[0])
    for file in files:
        _check_length(file, folder)
    return files


def refuse_quantized(quantization: Any, name: str) -> None:
    """Refuse weights of few bits, which cannot be trained whole.

    Args:
        quantization: config.json's ``quantization_config``; None where there is none.
        name: of the model.
    """
    if not quantization:
        return
    asked = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    bits = next(
        (f" of {bits} bits" for bits, name_ in ((4, "load_in_4bit"), (8, "load_in_8bit")) if asked.get(name_)),
        f" of {asked['bits']} bits" if asked.get("bits") else "",
    )
    raise ModelError(
        f"the weights of `{name}` are quantized (quantization_config: {asked.get('quant_method', '?')}"
        f"{bits}), and all weights are trained here",
        "take the model that they were made from, or load "
        "it in Python, call model.dequantize() and save_pretrained(OUT)",
    )


def refuse_not_finite(tensors: Iterable[tuple[str, Any]], name: str) -> None:
    """Refuse weights with NaN or infinity, which no training mends: every loss would be NaN.

    Args:
        tensors: torch's, by name.
        name: of the model.
    """
    bad = [
        (key, int(wrong))
        for key, tensor in tensors
        if tensor.is_floating_point() and (wrong := (~tensor.isfinite()).sum())
    ]
    if bad:
        others = f" and in {len(bad) - 1} other tensors" if bad[1:] else ""
        what = "value that is no finite number" if bad[0][1] == 1 else "values that are no finite numbers"
        raise ModelError(
            f"the weights of `{name}` hold {bad[0][1]} {what} in {bad[0][0]}{others}",
            "take a checkpoint from before the training that left them diverged",
        )


def check_finite(files: Iterable[Path]) -> None:
    """:func:`refuse_not_finite` for those files of weights that are safetensors; their tensors are read one by one."""
    for file in (file for file in files if file.suffix == ".safetensors"):
        with safe_open(str(file), framework="pt") as tensors:
            refuse_not_finite(((key, tensors.get_tensor(key)) for key in tensors.keys()), str(file))  # noqa: SIM118


def _is_pointer(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size > SMALL:
        return False
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def _refuse_adapter(folder: Path, names: list[str], whole: list[str]) -> None:
    if "adapter_config.json" not in names:
        return
    try:
        about = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except ValueError:
        about = {}
    raise adapter(
        str(folder),
        about.get("base_model_name_or_path"),
        beside=whole[0] if whole else "",
        is_lora=about.get("peft_type") == "LORA",
    )


def adapter(name: str, base: str | None, beside: str = "", is_lora: bool = False) -> ModelError:
    """Error for an adapter of PEFT.

    Args:
        name: of its folder or repository.
        base: the model that it is for; None where it does not say.
        beside: name of whole weights in the same folder.
        is_lora: whether it is in a folder here, and of a kind that ``course merge`` reads.
    """
    if beside:
        return ModelError(
            f"{name} holds an adapter beside {beside}, and which of them is meant cannot be told",
            "where they are merged already take adapter_config.json away, else merge them",
        )
    what = (
        f"{name} is an adapter (LoRA or another of PEFT's) of {base or 'a model that it does not name'}, and no "
        "whole model"
    )
    if is_lora and base:
        return ModelError(what, f"make one of it by `course merge {name} --output OUT`, and give OUT")
    return ModelError(
        what,
        f"merge it: PeftModel.from_pretrained(AutoModel….from_pretrained("
        f"{base or 'BASE'!r}), {name!r}).merge_and_unload().save_pretrained(OUT), with the tokenizer",
    )


def _config(folder: Path) -> dict[str, Any]:
    """What config.json says."""
    mend = "copy or download it again"
    try:
        read = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{folder}: config.json cannot be used (it is no JSON: {error})", mend) from None
    if not isinstance(read, dict) or not read.get("model_type"):
        raise ModelError(
            f"{folder}: config.json cannot be used (it has no model_type)",
            'give it the architecture\'s, such as "model_type": "bert", or the file that save_pretrained wrote',
        )
    return read


def _weights(folder: Path, first: str) -> list[Path]:
    """The files with the weights: the whole one, or those that an index names."""
    if first in INDEXES:
        return [folder / first]
    try:
        shards = sorted(set(json.loads((folder / first).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"the weights of `{folder}` cannot be loaded: {first} is no index of shards ({error!r})",
            "copy or download it again",
        ) from None
    if missing := [name for name in shards if not (folder / name).is_file()]:
        raise ModelError(
            f"the weights of `{folder}` cannot be loaded: {first} names {missing[0]}, which is not there "
            f"({len(missing)} of {len(shards)} shards are missing)",
            "copy or download the missing shards",
        )
    return [folder / name for name in shards]


def _check_length(file: Path, folder: Path) -> None:
    """See that a file of safetensors has a header, and is as long as that says."""
    if file.suffix != ".safetensors":
        return
    try:
        with safe_open(str(file), framework="pt"):
            pass
    except SafetensorError as error:
        raise ModelError(
            f"the weights of `{folder}` are damaged or cut short ({file.name}: {error})", "copy or download it again"
        ) from None
