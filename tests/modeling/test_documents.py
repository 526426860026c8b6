"""Texts that share a row see each other not: no gradient crosses over, and each has the logits that it has alone."""

import pytest
import torch
import torch._functorch.config
from transformers import AutoModelForCausalLM

from course_lib.data.collating import IGNORE, Collator
from course_lib.modeling import presets
from course_lib.modeling.inputs import model_inputs, padding_known
from course_lib.modeling.recomputing import recompute_activations
from course_lib.parallel.blocks import blocks
from course_lib.training.compiling import compile_blocks
from course_lib.training.cpu_kernels import use_fast_kernels
from tests.long_cases import some

FAMILIES = ("tiny-gpt2", "tiny-llama", "tiny-olmoe", "tiny-mixtral")
LENGTHS = (7, 1, 12, 4)
TOLERANCE = 2e-6
"""Of logits of about 1 in float32: a kernel may add up a row of 26 keys in another order than one of 7."""


def made(name, how="sdpa"):
    config, _ = presets.build(name, ["some words to learn a tokenizer from, and a few more of them"], 64)
    torch.manual_seed(0)
    config.use_cache = False  # as modeling.load sets it
    return AutoModelForCausalLM.from_config(config, attn_implementation=how).eval()


def batch_of(packed=True):
    """Two rows of several texts, one of which has padding; or each text in a row of its own."""
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 200, (length,), generator=draw).tolist() for length in (*LENGTHS, 9, 6)]
    if not packed:
        return [Collator("causal_lm", 0)([{"input_ids": text}]) for text in texts]
    rows = [texts[:4], texts[4:]]
    return Collator("causal_lm", 0)([{"input_ids": sum(row, []), "documents": list(map(len, row))} for row in rows])


def logits_and_embeddings(model, inputs, batch):
    """Of a forward over embeddings that hold their gradient."""
    embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    with padding_known(batch.unpadded):
        return model(inputs_embeds=embedded, **inputs).logits, embedded


def leaks(model, batch, inputs):
    """The largest gradient of one text's loss by the embeddings of another, and the smallest of the largest by its
    own, over all texts of a row that predict something."""
    logits, embedded = logits_and_embeddings(model, dict(inputs), batch)
    places, others, own = batch["position_ids"], [], []
    documents = (places == 0).cumsum(1)
    targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    for row in range(len(places)):
        for document in range(1, int(documents[row].max()) + 1):
            inside = documents[row] == document
            if (targets[row][inside] == IGNORE).all():
                continue
            (gradient,) = torch.autograd.grad(losses[row][inside].sum(), embedded, retain_graph=True)
            own.append(gradient[row][inside].abs().max().item())
            gradient[row][inside] = 0
            others.append(gradient.abs().max().item())
    return max(others), min(own)


@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_gradient_crosses_from_text_to_text(name, how):
    model, batch = made(name, how), batch_of()
    with_mask = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert leaks(model, batch, with_mask)[0] > 1e-4  # without the positions texts see each other
    crossing, own = leaks(model, batch, model_inputs(batch))
    assert crossing == 0 and own > 1e-4


@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_texts_logits_are_those_that_it_has_alone(name, how):
    model, batch = made(name, how), batch_of()
    with torch.no_grad():
        with padding_known(batch.unpadded):
            logits = model(**model_inputs(batch)).logits
            glued = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        alone = torch.cat([model(**model_inputs(text)).logits[0] for text in batch_of(packed=False)])
    real = batch["attention_mask"].bool()
    assert (logits[real] - alone).abs().max() < TOLERANCE < 1e-3 < (glued[real] - alone).abs().max()


def test_with_a_cache_transformers_does_not_look_for_texts():
    model, batch = made("tiny-llama"), batch_of()
    assert leaks(model, batch, model_inputs(batch))[0] == 0
    model.config.use_cache = True
    assert leaks(model, batch, model_inputs(batch))[0] > 1e-4


def recomputed(model):
    recompute_activations(model)


def compiled(model):
    compile_blocks(blocks(model).values(), dynamic=True)


WAYS = {"recomputed": recomputed, "fast kernels": use_fast_kernels, "compiled": compiled}


@pytest.mark.parametrize("way", some(WAYS, "recomputed", "fast kernels"))
def test_nor_where_blocks_are_recomputed_compiled_or_have_fast_kernels(way):
    model, batch = made("tiny-gpt2").train(), batch_of()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and way != "fast kernels":  # that one is for dropout in attention
            module.p = 0.0
    WAYS[way](model)
    with torch._functorch.config.patch(donated_buffer=False):  # one graph, several backwards
        crossing, own = leaks(model, batch, model_inputs(batch))
    assert crossing == 0 and own > 1e-4
