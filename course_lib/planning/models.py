"""Models to plan for: any Hugging Face config, and the usual ones bundled by name.

A model is known by its sizes and its parameter counts; nothing is built and nothing is downloaded, except for a
config.json of a few kilobytes when a name is only on the Hub.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from course_lib.errors import ModelError, nearest
from course_lib.planning import catalogue_files
from course_lib.planning.families import FAMILIES, RENAMED, UNSUPPORTED, Parts


@dataclass(frozen=True)
class Model(Parts):
    """A transformer's sizes and parameter counts. Parameters are counted once, tied ones too."""

    name: str = "model"
    family: str = "gpt2"
    """transformers' ``model_type``."""

    @property
    def layer(self) -> int:
        """Parameters of one block."""
        return self.attention + self.mlp + self.norms

    @property
    def parameters(self) -> int:
        """All parameters: ``sum(p.numel() for p in model.parameters())`` of the built model."""
        return self.embedding + self.layers * self.layer + self.extra + self.head

    @property
    def active_parameters(self) -> int:
        """Parameters that work for one token: all but the experts that are not chosen."""
        return self.parameters - self.layers * (self.experts - self.experts_per_token) * self.expert

    @property
    def expert(self) -> int:
        """Parameters of one of a block's experts, or of its only MLP, without biases."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def largest_matrix(self) -> int:
        """Parameters of the largest single module: DeepSpeed's ``largest_layer_params``."""
        fused = 2 if self.gated and self.experts > 1 else 1  # transformers keeps all experts' gate and up in one
        return max(self.vocab * self.hidden, self.experts * fused * self.hidden * self.ffn)

    @property
    def layer_matmul(self) -> int:
        """Weights that one token is multiplied with in an average block."""
        if self.multiplied:
            return self.multiplied
        width = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden * self.ffn * self.experts_per_token
        router = self.experts * self.hidden if self.experts > 1 else 0
        return self.hidden * width + mlp + router + self.extra // self.layers

    @property
    def head_matmul(self) -> int:
        """Weights that one token is multiplied with to get its logits."""
        return self.vocab * self.hidden if self.has_head else 0

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    def flops(self, sequence_length: int) -> float:
        """FLOPs of the forward and backward pass of one token, as MFU counts them.

        Six for each weight that multiplies, ``12 L a d s`` for attention, the causal half not taken off.
        Source: PaLM, arXiv 2204.02311 appendix B; Megatron, arXiv 2104.04473 section 5.1 (without recomputation).
        """
        weights = self.layers * self.layer_matmul + self.head_matmul
        return 6 * weights + 12 * self.layers * self.attention_width * sequence_length


def from_config(config: Mapping[str, Any], name: str = "model", head: bool = True, build: bool = True) -> Model:
    """A model from the fields of a Hugging Face config.json: by arithmetic, or built on the meta device and counted.

    Args:
        config: the JSON's fields; ``model_type`` names the architecture, what is missing takes its default.
        name: what to call it.
        head: with the layer that gives logits over the vocabulary (AutoModelForCausalLM, ForMaskedLM,
            ForConditionalGeneration); False counts the base model (AutoModel).
        build: False refuses architectures that the planner has no arithmetic for.

    Raises:
        ModelError: no or an unknown ``model_type``, or sizes that cannot be.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        if family is None or not (build and _known_to_transformers(family)):
            raise ModelError(
                f"{name}: config has no `model_type`"
                if family is None
                else f"{name}: {'transformers' if build else 'the planner'} has no architecture `{family}`",
                nearest(str(family), FAMILIES) or "by arithmetic the planner knows " + ", ".join(sorted(FAMILIES)),
            )
        from course_lib.planning import built  # here: it takes torch and transformers, seconds

        return _model(built.parts(config, name, head), name, family)
    read, defaults = FAMILIES[family]
    given = {RENAMED.get(family, {}).get(key, key): value for key, value in config.items()}
    for key, value in UNSUPPORTED.get(family, {}).items():
        if given.get(key, value) not in (value, None):
            raise ModelError(f"{name}: `{key}: {given[key]}` is not counted", f"only {key}: {value} is")
    full = {**defaults, **given}
    if family == "opt":
        full["word_embed_proj_dim"] = full["word_embed_proj_dim"] or full["hidden_size"]
    for key in defaults:
        if isinstance(full[key], bool) or full[key] is None or isinstance(full[key], str | float):
            continue
        if not isinstance(full[key], int) or full[key] < (0 if key == "type_vocab_size" else 1):
            raise ModelError(f"{name}: `{key}: {full[key]}` is no size", "give a whole number from 1 on")
    parts = read(full, head)
    if "head_dim" not in full and family != "t5" and parts.hidden % parts.heads:
        raise ModelError(
            f"{name}: width {parts.hidden} does not divide into {parts.heads} heads",
            "give a number of heads that divides it",
        )
    return _model(parts, name, family)


def _known_to_transformers(family: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return family in CONFIG_MAPPING_NAMES


def _model(parts: Parts, name: str, family: str) -> Model:
    return Model(**{field.name: getattr(parts, field.name) for field in fields(Parts)}, name=name, family=family)


def bundled() -> dict[str, dict[str, Any]]:
    """Configs by name, smallest first within a family."""
    return catalogue_files.read("models")


@functools.cache
def _names() -> dict[str, str]:
    """Every spelling of a bundled model, in small letters, and its name in the catalogue."""
    known: dict[str, str] = {}
    for name, config in bundled().items():
        for spelling in (name, name.split("/")[-1], *config.get("also", ())):
            known[spelling.lower()] = name
    return known


def names() -> list[str]:
    """The bundled models' names, as on the Hub."""
    return list(bundled())


def load(model: str | Path | Mapping[str, Any] | Model, head: bool = True) -> Model:
    """A model by config, bundled name, local folder or file, or name on the Hub, in this order.

    Args:
        model: ``{"model_type": "llama", …}``, ``facebook/opt-6.7b``, ``opt-6.7b``, a folder with config.json, a
            JSON file, or a Hub name (needs the network, or the Hub's local cache).
        head: see :func:`from_config`.

    Raises:
        ModelError: there is no such model, or its config is of no use.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, Mapping):
        return from_config(model, str(model.get("_name_or_path") or "model"), head)
    known, path = _names(), Path(model).expanduser()
    if str(model).lower() in known:
        name = known[str(model).lower()]
        return from_config(bundled()[name], name, head)
    if path.exists():
        return from_config(_read(path), path.stem if path.is_file() else path.resolve().name, head)
    if str(model).count("/") != 1 or isinstance(model, Path):
        raise ModelError(
            f"model `{model}` is neither in the catalogue nor a local folder or file",
            nearest(str(model).lower(), known) or "give a Hub name, a folder, or a name of the catalogue",
        )
    return from_config(_read(_from_hub(str(model))), str(model), head)


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} has no readable config.json", "give the folder that save_pretrained wrote") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}", "give a Hugging Face config.json") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds no JSON object", "give a Hugging Face config.json")
    return config


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download  # here: it takes 0.3 s, and bundled names do without
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from course_lib.system import hub_reachable

    hint = nearest(name.lower(), _names())
    problem = hub_reachable.problem()
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=problem is not None))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model `{name}` is not in the catalogue nor in the Hub's local cache, and the Hub cannot be "
            f"reached ({problem or error})",
            hint or "give a folder with its config.json",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model `{name}` is not in the catalogue and not on the Hub ({reason})",
            hint or "check the name, or give a folder with its config.json",
        ) from error
