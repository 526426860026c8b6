"""Adapters: what a plan says of each kind of memory beside what two ranks count, and the command that it prints."""

import pytest

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.planning import adapters, memory, models, to_launchers
from course_lib.planning.plan import Plan
from tests.torch_versions import FSDP2_ON_CPUS, needs

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
RANK, LENGTH, ROWS = 8, 32, 8
WAYS = {"ddp": {"engine": "ddp"}, "zero3": {"engine": "deepspeed", "stage": 3}, "fsdp": {"engine": "fsdp", "stage": 3}}
METHODS = {"full": {}, "lora": {"lora_rank": RANK}, "qlora": {"lora_rank": RANK, "base_bits": 4}}
PRECISIONS = ("fp32", "bf16")


def counted():
    """Bytes by kind at rest on one of two ranks, and elements trained, by way, method and precision."""
    import torch
    from accelerate import PartialState
    from transformers import AutoModelForCausalLM, LlamaConfig

    from course_lib.metering.meter import Meter
    from course_lib.modeling import lora, nf4
    from course_lib.parallel.ddp import DataParallel
    from course_lib.parallel.torch_engines.fsdp import shard_with_torch
    from course_lib.parallel.zero3 import Zero3
    from course_lib.training.engines.compose import keep_low

    place, found = PartialState(cpu=True).process_index, {}
    for way in WAYS:
        for method, more in METHODS.items():
            for precision in PRECISIONS if more else PRECISIONS[:1]:
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(
                    LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
                )
                if "base_bits" in more:
                    nf4.quantize_linear(model, lora.linear_layers(model))
                if more:
                    lora.add_lora(model, RANK)
                keep_low(model, {"fp32": "no"}.get(precision, precision))
                trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
                optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
                low = torch.bfloat16 if precision == "bf16" else None
                engine = (
                    DataParallel(model)
                    if way == "ddp"
                    else Zero3(model, optimizer, param_dtype=low)
                    if way == "zero3"
                    else shard_with_torch(model, optimizer, param_dtype=low, reduce_dtype=torch.float32)
                )
                ids = torch.randint(0, 512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(place))
                for _ in range(2):  # the first makes the optimizer's state
                    with (
                        Meter(model, optimizer, getattr(engine, "resident", None)) as meter,
                        torch.autocast("cpu", torch.bfloat16, enabled=low is not None and way == "ddp"),
                    ):
                        engine(input_ids=ids, labels=ids).loss.backward()
                    stepped = optimizer if way == "ddp" else engine
                    stepped.step()
                    stepped.zero_grad()
                found[way, method, precision] = trained, meter.resident
    return found


@needs(FSDP2_ON_CPUS)
def test_each_kind_of_memory_is_what_is_planned():
    held, model, sizes = launch(counted, num_processes=2, timeout=200)[0], models.from_config(LLAMA), {}
    assert len(held) == 15
    for (way, method, precision), (trained, resident) in held.items():
        plan = Plan(LENGTH, data=2, micro_batch=ROWS, precision=precision, **WAYS[way], **METHODS[method])
        planned = memory.estimate(model, plan)
        if method != "full":
            assert trained == model.layers * adapters.of_a_block(model, RANK)
        for kind, size in (
            ("parameters", planned.parameters),
            ("gradients", planned.gradients),
            ("optimizer states", planned.optimizer),
        ):
            assert resident[kind] == pytest.approx(size, rel=0.01), (way, method, precision, kind)
        sizes[way, method, precision] = sum(resident[kind] for kind in ("parameters", "gradients", "optimizer states"))
    for way in WAYS:
        full, lora, qlora = (sizes[way, method, "fp32"] for method in METHODS)
        assert qlora < lora < 0.4 * full, "otherwise nothing would be saved"


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        (Plan(64, data=2, lora_rank=8), {"strategy": "ddp", "lora_r": 8}),
        (
            Plan(64, "fsdp", 3, data=2, lora_rank=16, base_bits=4, compiled=True),
            {"strategy": "fsdp", "load_in_4bit": True},
        ),
        (Plan(64, "deepspeed", 3, data=2, lora_rank=8), {"strategy": "zero3", "lora_r": 8}),
    ],
)
def test_a_plan_of_adapters_is_a_command(plan, wanted):
    asked = to_launchers.options(plan, models.from_config(LLAMA, "llama"))
    assert wanted.items() <= asked.items() and to_launchers.runs_here(plan, models.from_config(LLAMA))
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
        to_launchers.options(plan, models.from_config(LLAMA))
