"""Small models, their batches, and how far a split one is from the whole; also for tests/gpu.

Where float64 serves (transformers takes Llama's norms and a causal model's loss in fp32), sums in another order
differ in the 16th digit only.
"""

import functools

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCABULARY, WIDTH, LAYERS, HEADS, ROWS, TOKENS = 64, 32, 2, 4, 4, 8


def build(kind, seed=0, **sizes):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 16,
        "initializer_range": 0.2,
    } | sizes
    if kind == "gpt2":
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))
    elif kind == "llama":
        sizes |= {"num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "intermediate_size": 48}
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        config = BertConfig(**sizes, **no_dropout, intermediate_size=64, num_labels=3)
        model = (BertForMaskedLM if kind == "bert" else BertForSequenceClassification)(config)
    for name, parameter in model.named_parameters():  # biases of 0 and norms of 1 would hide much
        if "bias" in name or "norm" in name.lower() or "ln_" in name:
            nn.init.normal_(parameter, 1.0 if "weight" in name else 0.0, 0.2)
    return model


def batch(kind="gpt2", step=0):
    """Rows of uneven lengths, a padding token among them, and labels of which some don't count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 5:], tokens[1, 5:] = 0, 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 2] = -100
    if kind == "bert classifier":
        labels = torch.arange(ROWS) % 3
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def loss_of(model, inputs, dtype=torch.float32):
    if dtype == torch.float32:
        return model(**inputs).loss
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def differences(loss, gradients, weights, whole, whole_loss):
    """Largest distance from the whole model's, of its loss, its gradients and its weights; and its largest gradient."""
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    state = whole.state_dict()
    assert set(gradients) == set(wanted) and set(weights) == set(state)
    return {
        "loss": abs(loss.item() - whole_loss.item()),
        "gradients": max((gradients[name] - each).abs().max().item() for name, each in wanted.items()),
        "weights": max((weights[name] - each).abs().max().item() for name, each in state.items()),
        "scale": max(each.abs().max().item() for each in wanted.values()),
    }


@functools.cache
def oracle(kind, dtype=torch.float32):
    whole = build(kind).to(dtype)
    loss = loss_of(whole, batch(kind), dtype)
    loss.backward()
    return whole, loss
