"""Small models and published numbers that tests of plans share."""

import contextlib
import json
from pathlib import Path

import torch
import yaml
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, LlamaConfig

from course_lib.planning import models

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
SMALL = yaml.safe_load((HERE / "small_models.yaml").read_text(encoding="utf-8"))


def llama(**sizes):
    usual = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    usual |= {"num_attention_heads": 4, "max_position_embeddings": 64, "use_cache": False}
    return LlamaConfig(**usual | sizes, attn_implementation="sdpa")


def known(config):
    """The planner's model of a config of transformers."""
    return models.from_config(config.to_dict(), config.model_type)


WITH_LOGITS = dict.fromkeys(("bert", "roberta", "distilbert", "electra"), AutoModelForMaskedLM)
WITH_LOGITS |= dict.fromkeys(("t5", "bart"), AutoModelForSeq2SeqLM)


def built_parameters(config, head=True):
    """Of the model that transformers builds, without memory for them."""
    maker = WITH_LOGITS.get(config.model_type, AutoModelForCausalLM) if head else AutoModel
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in maker.from_config(config).parameters())


def published(kind):
    return [row for row in PUBLISHED if row["kind"] == kind]


@contextlib.contextmanager
def kept_for_backward(model):
    """The bytes of each tensor that autograd saves meanwhile, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept, held = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
