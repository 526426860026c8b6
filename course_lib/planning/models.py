"""Models to plan for: any Hugging Face config, and the usual ones bundled by name.

A model is known by its sizes and its parameter counts. Those of the bundled ones stand in ``catalogue/counted.json``
(``python tools/counted.py`` writes it), others are counted when they are asked for. Nothing is downloaded, except for a
config.json of a few kilobytes when a name is only on the Hub.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.errors import ModelError, nearest
from course_lib.planning import catalogue_files


@dataclass(frozen=True)
class Model:
    """A transformer's sizes, and where its parameters are. Parameters are counted once, tied ones too."""

    name: str
    family: str
    """transformers' ``model_type``."""
    hidden: int
    """Width of the residual stream."""
    layers: int
    """Blocks; encoder and decoder together."""
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width inside an MLP, or inside one expert."""
    vocab: int
    context: int
    """Longest sequence, in tokens; 0 where the architecture sets no limit."""
    embedding: int
    """Parameters before the first block: tokens, positions, types, norm; a tied matrix is counted here."""
    attention: int
    """Parameters of an average block's attention."""
    mlp: int
    """Parameters of an average block's MLP; of all its experts and their router."""
    norms: int
    """Parameters of an average block's norms."""
    head: int
    """Parameters after the last block that are not tied to the embedding: norm, pooler, transform, matrix, bias."""
    layer_matmul: int
    """Weights that one token is multiplied with in an average block."""
    extra: int = 0
    """Parameters in a few blocks only: T5's cross-attention and relative positions."""
    experts: int = 1
    experts_per_token: int = 1
    gated: bool = False
    """The MLP multiplies two projections (SwiGLU, GeGLU)."""
    rms_norm: bool = False
    rotary: bool = False
    causal: bool = True
    has_head: bool = True
    """The model ends in logits over the vocabulary."""
    activation: str = "gelu"
    """By transformers' name; ``gelu_new`` is written out there in plain PyTorch operations."""
    dropout: bool = False
    """Blocks drop activations while they train, so that a mask is kept."""
    encoder_decoder: bool = False

    @property
    def layer(self) -> int:
        """Parameters of one block."""
        return self.attention + self.mlp + self.norms

    @property
    def parameters(self) -> int:
        """All parameters: ``sum(p.numel() for p in model.parameters())`` of the built model."""
        return self.embedding + self.layers * self.layer + self.extra + self.head

    @property
    def expert(self) -> int:
        """Parameters of one of a block's experts, or of its only MLP, without biases."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

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


def from_config(config: Mapping[str, Any], name: str = "model", head: bool = True) -> Model:
    """A model from the fields of a Hugging Face config.json, built on the meta device and counted.

    Args:
        config: the JSON's fields; ``model_type`` names the architecture, what is missing takes its default.
        name: what to call it.
        head: with the layer that gives logits over the vocabulary (AutoModelForCausalLM, ForMaskedLM,
            ForConditionalGeneration); False counts the base model (AutoModel).

    Raises:
        ModelError: no or an unknown ``model_type``, or sizes that cannot be.
    """
    from course_lib.planning import built  # here: it takes torch and transformers, seconds

    return Model(name, **built.counted(config, name, head))


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


@functools.cache
def families() -> frozenset[str]:
    """Architectures of the bundled models."""
    return frozenset(config["model_type"] for config in bundled().values())


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
        sizes = catalogue_files.read("counted")[name]
        return Model(name, **sizes["model"] | ({} if head else sizes["without logits"]))
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
