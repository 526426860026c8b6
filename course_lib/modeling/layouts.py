"""Places of the blocks of known models among what comes before and after them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Parts of a base model, by name, that come before and after its blocks.

    Attributes:
        embedding: takes the token ids; on later stages it returns what the stage before sent.
        added: what it returns is added to the embedding's.
        front: what else comes before the blocks.
        back: what comes after them.
        returns: how many things a block returns in a tuple, hidden states first; 0 for hidden states alone.
    """

    embedding: str
    added: tuple[str, ...] = ()
    front: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    returns: int = 0


LAYOUTS: Mapping[str, Layout] = {
    "bert": Layout("embeddings", back=("pooler",)),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), Layout("embeddings", back=("pooler",))),
    "distilbert": Layout("embeddings"),
    "gpt2": Layout("wte", added=("wpe",), front=("drop",), back=("ln_f",)),
    "opt": Layout(
        "decoder.embed_tokens",
        added=("decoder.embed_positions",),
        front=("decoder.project_in",),
        back=("decoder.final_layer_norm", "decoder.project_out"),
    ),
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma", "gemma2", "olmo2", "olmoe"),
        Layout("embed_tokens", back=("norm",)),
    ),
}
"""By model type; of others :mod:`course_lib.modeling.structure` finds out."""
