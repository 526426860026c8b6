"""Logits, and what tensor ranks hold of the vocabulary: the formula beside what engines and losses allocate."""

import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from course_lib.metering.allocation_log import AllocationLog
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.planning import memory, models, vocabulary
from course_lib.planning import simulate as simulated
from course_lib.planning.formula_check import compare
from course_lib.planning.pipeline_ranks import pipeline_ranks
from course_lib.planning.plan import Plan
from course_lib.planning.simulate import Setting, simulate
from course_lib.training.loss import CHUNK_BYTES, summed_loss
from tests.planning.model_cases import known
from tests.planning.model_cases import llama as small_llama

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}


def llama(vocab=4000, layers=4):
    return small_llama(**SIZES, vocab_size=vocab, num_hidden_layers=layers, max_position_embeddings=1024)


def as_course_train(engine, tokens, model):
    return summed_loss(engine(input_ids=tokens).logits, tokens, "causal_lm")


@pytest.mark.parametrize("strategy", ["ddp", "tp"])
def test_under_autocast_the_formula_is_what_is_held(strategy):
    """Tensor ranks gather their logits, and between matmuls all is in fp32: the formula had a half and two thirds."""
    asked = Setting(strategy, 4, sequence_length=512, micro_batch=4)
    result = simulate(llama(), asked)
    errors = {row.kind: row.error for row in compare(known(llama()), asked, result)}
    most = {"logits": 1e-12, "activations": 0.05, "parameters": 0.01, "optimizer": 0.01, "total": 0.03}
    assert {kind: error for kind, error in errors.items() if abs(error) > most.get(kind, 1)} == {}
    split = memory.estimate(known(llama()), Plan(512, "megatron", tensor=4, micro_batch=4, recipe="autocast"))
    assert split.logits < 0.3 * result.peak["logits"]


def test_the_trainers_loss_has_the_logits_and_their_gradient():
    """And a chunk of rows in fp32 three times; with the model's own loss it is three times the logits in fp32."""
    config, asked = llama(32_000, 1), Setting("fsdp", 4, sequence_length=1024, micro_batch=4)
    plan = asked.plan()
    chunked = memory.estimate(known(config), replace(plan, loss="chunked"))
    plain = memory.estimate(known(config), plan)
    with mock.patch.object(simulated, "_loss", as_course_train):
        assert simulate(config, asked).peak["logits"] == pytest.approx(chunked.logits, rel=0.01)
    assert simulate(config, asked).peak["logits"] == pytest.approx(plain.logits, rel=0.01)
    assert plain.logits > 2 * chunked.logits and vocabulary.CHUNK == CHUNK_BYTES


def of_a_rank(vocab):
    """Parameters, and bytes of logits, of one of two ranks of the textbook's tensor parallelism."""
    torch.manual_seed(0)
    config = llama(vocab, 1)
    model = AutoModelForCausalLM.from_config(config)
    engine = TensorParallel(model, split_vocabulary=vocab % 2 == 0)
    tokens = torch.randint(0, vocab, (2, 512))
    log, top, now = AllocationLog(vocab), 0, 0
    with log:
        log.start()
        with torch.autocast("cpu", torch.bfloat16):
            loss = as_course_train(engine, tokens, model)
        loss.backward()
        log.stop()
    for change in log.changes():
        now += change.bytes if change.kind == "logits" else 0
        top = max(top, now)
    return sum(parameter.numel() for parameter in model.parameters()), top


@pytest.mark.parametrize("vocab", [4000, 4001])
def test_two_real_ranks_hold_what_the_plan_says(vocab, ranks):
    """`course train` gathers the logits, and leaves a vocabulary whole that its ranks do not divide."""
    parameters, held = ranks(2, join=True)(of_a_rank, vocab)[0]
    model = known(llama(vocab, 1))
    plan = Plan(512, "megatron", tensor=2, micro_batch=2, recipe="autocast", head="gathered", loss="chunked")
    formula = memory.estimate(model, plan)
    assert formula.parameters == 4 * parameters
    assert (memory.estimate(model, replace(plan, head="parallel")).parameters == formula.parameters) is (vocab % 2 == 0)
    # where all rows are one chunk, what is gathered and what autograd makes besides is a copy or two in 16 bits
    assert held == pytest.approx(formula.logits, rel=0.15)


def test_both_ends_of_a_pipeline_keep_a_tied_matrix():
    model = models.load("gpt2")
    plan = Plan(1024, "megatron", pipeline=2, tensor=2)
    first, last = pipeline_ranks(plan, model.layers)
    matrix = 50257 * 768
    assert vocabulary.ends(model, plan, first) == matrix / 2 + 1024 * 768, "positions are whole on each rank"
    assert vocabulary.ends(model, plan, last) == matrix / 2 + 2 * 768
    assert vocabulary.ends(model, replace(plan, head="gathered"), last) == matrix + 2 * 768, "2 does not divide 50,257"


class Peak(TorchDispatchMode):
    """Most bytes that operators' results have at a time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                storage = tensor.untyped_storage()
                self._add(storage._cdata, storage.nbytes())
                weakref.finalize(storage, self._add, storage._cdata, -storage.nbytes())
        return result

    def _add(self, key, size):
        (self.seen.add if size > 0 else self.seen.discard)(key)
        self.now += size
        self.peak = max(self.peak, self.now)


def test_a_loss_joined_with_the_output_layer_never_has_all_logits():
    """PyTorch's own, in chunks by Liger Kernel's rule; it adds the weight's gradient up in another type."""
    tokens, vocab, width = 4096, 16_000, 128
    model = known(LlamaConfig(vocab_size=vocab, hidden_size=width, num_attention_heads=8))
    hidden, weight = (torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True) for rows in (tokens, vocab))
    targets = torch.randint(0, vocab, (tokens,))
    rows = vocabulary.chunk_rows(model, tokens)
    assert rows == 64, "4,096 by 125, and up to a power of two"
    how = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, acc_policy="compact")
    with Peak() as joined:
        functional.linear_cross_entropy(hidden, weight, targets, options=how).backward()
    formula = vocabulary.logits(model, Plan(tokens, "ddp", loss="linear"), tokens, 2)
    assert formula == 2 * (rows * vocab + tokens * width + vocab * width)
    assert formula / 2 < joined.peak < 2 * formula < 0.3 * 2 * tokens * vocab
