"""Adapters: what a plan says of each kind of memory beside what two ranks count, and the command that it prints."""

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.metering.meter import Meter
from course_lib.modeling import lora, nf4
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.torch_engines.fsdp import shard_with_torch
from course_lib.parallel.zero3 import Zero3
from course_lib.planning import adapters, memory, to_launchers
from course_lib.planning.plan import Plan
from course_lib.training.engines.compose import keep_low
from tests.planning.model_cases import known, llama
from tests.torch_versions import FSDP2_ON_CPUS, needs

CONFIG = llama(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_key_value_heads=2)
MODEL = known(CONFIG)
RANK, LENGTH, ROWS = 8, 32, 8
WAYS = {"ddp": {"engine": "ddp"}, "zero3": {"engine": "deepspeed", "stage": 3}, "fsdp": {"engine": "fsdp", "stage": 3}}
SETTINGS = {"full": {}, "lora": {"lora_rank": RANK}, "qlora": {"lora_rank": RANK, "base_bits": 4}}
METHODS = [("full", "fp32"), *((method, precision) for method in ("lora", "qlora") for precision in ("fp32", "bf16"))]


CASES = [(way, method, precision) for way in WAYS for method, precision in METHODS]


def counted():
    """Bytes by kind at rest on one of two ranks, and elements trained, by way, method and precision."""
    place, found = PartialState(cpu=True).process_index, {}
    for way, method, precision in CASES:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG)
        if method == "qlora":
            nf4.quantize_linear(model, lora.linear_layers(model))
        if method != "full":
            lora.add_lora(model, RANK)
        keep_low(model, {"fp32": "no"}.get(precision, precision))
        trained = [p for p in model.parameters() if p.requires_grad]
        engine = optimizer = torch.optim.AdamW(trained)
        low = torch.bfloat16 if precision == "bf16" else None
        if way == "ddp":
            module = DataParallel(model)
        elif way == "zero3":
            module = engine = Zero3(model, optimizer, param_dtype=low)
        else:
            module = engine = shard_with_torch(model, optimizer, param_dtype=low, reduce_dtype=torch.float32)
        ids = torch.randint(0, 512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(place))
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=low is not None and way == "ddp")
        for _ in range(2):  # the first makes the optimizer's state
            with Meter(model, optimizer, getattr(module, "resident", None)) as meter, autocast:
                module(input_ids=ids, labels=ids).loss.backward()
            engine.step()
            engine.zero_grad()
        found[way, method, precision] = sum(p.numel() for p in trained), meter.resident
    return found


@needs(FSDP2_ON_CPUS)
def test_each_kind_of_memory_is_what_is_planned(ranks):
    held, sizes = ranks(2)(counted)[0], {}
    for (way, method, precision), (trained, resident) in held.items():
        plan = Plan(LENGTH, data=2, micro_batch=ROWS, precision=precision, **WAYS[way], **SETTINGS[method])
        planned = memory.estimate(MODEL, plan)
        if method != "full":
            assert trained == MODEL.layers * adapters.of_a_block(MODEL, RANK)
        states = {kind: resident[kind] for kind in ("parameters", "gradients", "optimizer states")}
        formula = dict(zip(states, (planned.parameters, planned.gradients, planned.optimizer), strict=True))
        assert states == pytest.approx(formula, rel=0.01), (way, method, precision)
        sizes[way, method, precision] = sum(states.values())
    for way in WAYS:
        full, low, quantized = (sizes[way, method, "fp32"] for method in SETTINGS)
        assert quantized < low < 0.4 * full, "otherwise nothing would be saved"


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        (Plan(64, data=2, lora_rank=8), {"strategy": "ddp", "lora_r": 8}),
        (Plan(64, "fsdp", 3, data=2, lora_rank=8, base_bits=4), {"strategy": "fsdp", "load_in_4bit": True}),
        (Plan(64, "deepspeed", 3, data=2, lora_rank=8), {"strategy": "zero3", "lora_r": 8}),
    ],
)
def test_a_plan_of_adapters_is_a_command(plan, wanted):
    asked = to_launchers.options(plan, MODEL)
    assert wanted.items() <= asked.items() and to_launchers.runs_here(plan, MODEL)
    build(asked | {"device": "cpu"})


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (Plan(64, "deepspeed", 3, data=2, lora_rank=8, base_bits=4), "DeepSpeed casts all parameters"),
        (Plan(64, "fsdp", 3, data=2, lora_rank=8, offload="parameters"), "lora_r leaves next to none"),
        (Plan(64, "megatron", tensor=2, lora_rank=8), "lora_r goes beside whole matrices"),
    ],
)
def test_what_is_not_run_here_says_why(plan, told):
    with pytest.raises(ConfigError, match=told):
        to_launchers.options(plan, MODEL)
