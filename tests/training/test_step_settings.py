"""What makes a step fast is chosen by the device and the model, and changes nothing that is learned."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from course_lib import modeling
from course_lib.config import build
from course_lib.data import DataProcessor, batching
from course_lib.errors import ConfigError
from course_lib.parallel.blocks import blocks
from course_lib.parallel.clipping import scale_down_, sum_of_squares
from course_lib.training import compiling, loss
from course_lib.training.engines.with_deepspeed import DEFAULT_BUCKET, zero_settings
from course_lib.training.precision import hint, use_tf32
from course_lib.training.unwrapping import take_back_forward
from tests.long_cases import some

# --- the loss in chunks ---


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_in_chunks_is_the_plain_one(monkeypatch, task, dtype):
    torch.manual_seed(0)
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * 97 * 5)  # 5 tokens at a time of 3 x 11
    labels = torch.randint(0, 97, (3, 11))
    labels[torch.rand(3, 11) < 0.3] = loss.IGNORE
    logits = torch.randn(3, 11, 97, dtype=dtype)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = loss.summed_loss(ours, labels, task) * 0.37
    wanted = F.cross_entropy(plain.float().flatten(0, -2), loss.shifted(labels, task).flatten(), reduction="sum") * 0.37
    found.backward(retain_graph=True)
    wanted.backward()
    assert found.dtype == torch.float32 and found.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert ours.grad.dtype == dtype and torch.equal(ours.grad, plain.grad)
    found.backward()  # what a split backward does
    assert torch.allclose(ours.grad, 2 * plain.grad)
    rows = loss.loss_of_rows(logits, labels, task)
    assert rows[:, 0].sum().item() * 0.37 == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("task", ["classification", "causal_lm", "masked_lm"])
def test_smoothed_labels_are_the_hugging_face_trainers(task):
    torch.manual_seed(0)
    shape = (5,) if task == "classification" else (3, 11)
    labels, logits = torch.randint(0, 97, shape), torch.randn(*shape, 97)
    if task != "classification":
        labels[torch.rand(3, 11) < 0.3] = loss.IGNORE
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = loss.summed_loss(ours, labels, task, 0.1) / loss.count_targets(labels, task)
    wanted = LabelSmoother(epsilon=0.1)({"logits": theirs}, labels, shift_labels=task == "causal_lm")
    found.backward()
    wanted.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6) and torch.allclose(ours.grad, theirs.grad, atol=1e-7)
    plain = loss.summed_loss(logits, labels, task) / loss.count_targets(labels, task)
    assert abs(plain.item() - found.item()) > 1e-3


# --- clipping ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_squares_are_added_up_exactly_and_gradients_scaled_together(dtype):
    sizes = (3, 0, 4_000_000)
    gradients = [torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype) for size in sizes]
    exact = sum(each.double().square().sum().item() for each in gradients)
    square = sum_of_squares(gradients, torch.device("cpu"))
    assert square.dtype == torch.float32 and square.item() == pytest.approx(exact, rel=3e-7)
    scale_down_(gradients, square.sqrt(), max_norm=1.0)
    assert sum(each.double().square().sum().item() for each in gradients) == pytest.approx(1.0, rel=1e-2)
    before = gradients[0].clone()
    scale_down_(gradients, torch.tensor(1.0), max_norm=float("inf"))
    assert torch.equal(gradients[0], before)
    assert sum_of_squares([], torch.device("cpu")).item() == 0
    scale_down_([], torch.tensor(0.0), 1.0)


# --- DeepSpeed ---


@pytest.mark.parametrize(
    ("options", "elements", "bucket"),
    [
        ({}, None, DEFAULT_BUCKET),
        ({}, 8 * 10**9, DEFAULT_BUCKET),
        ({}, 10**9, 125_000_000),
        ({}, 10**6, 25 * 2**18),
        ({"lean_buffers": True}, 8 * 10**9, 25 * 2**18),
        ({"lean_buffers": True, "bucket_mb": 1}, 10**9, 2**18),
    ],
)
def test_deepspeeds_buckets(options, elements, bucket):
    for strategy in ("zero1", "zero2", "zero3"):
        zero = zero_settings(build({"strategy": strategy} | options), elements)
        assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == bucket
        assert zero.get("overlap_comm", False) is not options.get("lean_buffers", False)
        held = {name for name in zero if name.startswith("stage3_")}
        assert len(held) == (4 if strategy == "zero3" and options.get("lean_buffers") else 0)


# --- workers ---


@pytest.mark.parametrize(
    ("chosen", "device", "cores", "ranks", "shared", "workers"),
    [
        (None, "cpu", 64, 2, math.inf, 0),
        (None, "cuda", 64, 8, 2**31, 4),
        (None, "cuda", 24, 8, 2**31, 2),
        (None, "cuda", 8, 8, 2**31, 0),
        (None, "cuda", 64, 8, 2**26, 0),
        (0, "cuda", 64, 8, 2**31, 0),
        (9, "cpu", 2, 2, 2**26, 9),
    ],
)
def test_workers_by_default(monkeypatch, chosen, device, cores, ranks, shared, workers):
    monkeypatch.setattr(batching, "usable_cores", lambda: cores)
    monkeypatch.setattr(batching, "shared_memory", lambda: shared)
    assert batching.workers(chosen, device, ranks) == workers


# --- TF32 ---


@pytest.mark.parametrize(
    ("choice", "precision", "capability", "used"),
    [
        ("auto", "bf16", (9, 0), True),
        ("auto", "no", (9, 0), False),
        ("on", "no", (8, 0), True),
        ("off", "bf16", (9, 0), False),
        ("auto", "fp16", (7, 5), False),
    ],
)
def test_tf32_where_products_may_be_rounded(monkeypatch, choice, precision, capability, used):
    said = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    assert use_tf32(choice, precision, torch.device("cuda")) is used
    assert said == ["high" if used else "highest"]


@pytest.mark.parametrize(
    ("kind", "count", "device", "said"),
    [
        ("xpu", 1, "auto", "the course does not know devices of type xpu: training on the CPU"),
        ("xpu", 0, "auto", None),
        ("xpu", 1, "cpu", None),
        ("cuda", 1, "auto", None),
    ],
)
def test_an_accelerator_that_the_course_does_not_use_is_named(monkeypatch, kind, count, device, said):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    assert hint(build({"device": device}), torch.device("cpu")) == said


def test_tf32_is_refused_where_it_is_not():
    with pytest.raises(ConfigError, match="tf32 on needs a GPU"):
        use_tf32("on", "no", torch.device("cpu"))
    assert use_tf32("auto", "bf16", torch.device("cpu")) is False


# --- what Accelerate puts around a forward ---


class Low(nn.Linear):
    def forward(self, x):
        return super().forward(x).bfloat16()


def test_a_model_has_its_own_forward_back():
    AcceleratorState._reset_state(True)
    model, x = Low(3, 2), torch.ones(1, 3)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.prepare(model)(x).dtype == torch.float32 and "forward" in vars(model)
    take_back_forward(model)
    assert model(x).dtype == torch.bfloat16 and not {"forward", "_original_forward"} & vars(model).keys()
    take_back_forward(model)
    model.forward = own = functools.partial(Low.forward, model)
    model._original_forward, model.forward = own, None
    take_back_forward(model)
    assert model.forward is own
    AcceleratorState._reset_state(True)


# --- torch.compile ---


@pytest.mark.parametrize("preset", some(["tiny-bert", "tiny-gpt2", "tiny-llama"], "tiny-gpt2"))
@pytest.mark.parametrize(("dynamic", "graphs"), [(None, [1, 2, 2]), (True, [1, 1, 1])])
def test_one_graph_serves_all_blocks_of_a_model(monkeypatch, preset, dynamic, graphs):
    made, real = [], torch.compile

    def counting(graph, _):
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=counting, **options))
    torch._dynamo.reset()
    task = "masked_lm" if preset == "tiny-bert" else "causal_lm"
    config, options = build({"model": preset}).model, {"label_names": None, "seed": 0, "max_length": 32}
    model = modeling.load(config, task, texts=["one two three"] * 4, **options).model
    names = list(model.state_dict())
    compiling.compile_blocks(blocks(model).values(), dynamic)
    assert list(model.state_dict()) == names
    counted = []
    for length in (8, 12, 16):
        ids = torch.ones(2, length, dtype=torch.long)
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
        counted.append(len(made))
    assert counted == graphs


@pytest.mark.long
def test_a_block_through_inductor_computes_the_same():
    torch._dynamo.reset()
    block = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
    model, x = nn.ModuleDict({"layers": block}), torch.randn(4, 8)

    def loss_and_gradient():
        model.zero_grad()
        total = block[1](block[0](x)).square().sum()
        total.backward()
        return total.detach(), block[0][0].weight.grad.clone()

    wanted = loss_and_gradient()
    compiling.compile_blocks(block, None)
    torch.testing.assert_close(loss_and_gradient(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "one_length"), [({}, False), ({"dynamic_padding": False}, True), ({"task": "causal_lm"}, True)]
)
def test_batches_have_one_length_or_many(options, one_length):
    assert build(options).data.has_one_length == one_length


@pytest.mark.parametrize(
    ("options", "device", "multiple"),
    [
        ({}, "cpu", None),
        ({}, "cuda", 8),
        ({"pad_to_multiple_of": 1}, "cuda", 1),
        ({"pad_to_multiple_of": 4}, "cpu", 4),
        ({"task": "causal_lm"}, "cuda", None),
    ],
)
def test_padding_suits_the_device(options, device, multiple):
    tokenizer = SimpleNamespace(padding_side="right", pad_token_id=0, pad_token="p", model_max_length=512)
    processor = DataProcessor.__new__(DataProcessor)
    processor.config, processor.tokenizer = build(options).data, tokenizer
    processor.max_length = processor.max_positions = 128
    processor._token = lambda name: 0
    assert processor.collator(device).pad_to_multiple_of == multiple
