"""Tiny Hugging Face models of every family that can be cut, without dropout, and a batch with padding."""

import torch
import transformers

VOCABULARY, LENGTH, ROWS = 50, 12, 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
ENCODER = SIZES | {"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISTILLED = {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 32, "pad_token_id": 0}
DISTILLED |= {"max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32, "pad_token_id": 0}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
OPT = SIZES | {"ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 8}
LLAMA = SIZES | {"intermediate_size": 32, "num_key_value_heads": 1}
MODELS = {
    "bert": ("BertForSequenceClassification", "BertConfig", ENCODER),
    "bert masked": ("BertForMaskedLM", "BertConfig", ENCODER),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", ENCODER),
    "roberta causal": ("RobertaForCausalLM", "RobertaConfig", ENCODER | {"is_decoder": True}),
    "distilbert": ("DistilBertForSequenceClassification", "DistilBertConfig", DISTILLED),
    "distilbert masked": ("DistilBertForMaskedLM", "DistilBertConfig", DISTILLED),
    "gpt2": ("GPT2ForSequenceClassification", "GPT2Config", GPT2),
    "gpt2 causal": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "opt": ("OPTForSequenceClassification", "OPTConfig", OPT),
    "opt causal": ("OPTForCausalLM", "OPTConfig", OPT | {"word_embed_proj_dim": 16}),
    "llama": ("LlamaForSequenceClassification", "LlamaConfig", LLAMA),
    "llama causal": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"tie_word_embeddings": True}),
}


def build(name):
    torch.manual_seed(0)
    model, config, sizes = MODELS[name]
    model = getattr(transformers, model)(getattr(transformers, config)(**sizes)).train()
    for parameter in model.parameters():  # fresh weights are so small that a lost mask would hardly show
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def batch(name):
    """Inputs, and targets: one label per row, or one token per position."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, 8:] = mask[1, 8:] = 0
    ids[6, 3:] = mask[6, 3:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name.startswith("bert"):
        inputs["token_type_ids"] = torch.randint(2, ids.shape, generator=generator)
    if "Sequence" in MODELS[name][0]:
        return inputs, torch.randint(2, (ROWS,), generator=generator)
    return inputs, ids.masked_fill(mask == 0, -100)


def loss_sum(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
