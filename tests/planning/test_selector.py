"""The selector: settings that fit, add up, and say what the search says."""

import json

import pytest

from course_lib import cli
from course_lib.errors import ConfigError, ModelError
from course_lib.planning import hardware, models, strategy
from course_lib.planning.selector import HardwareSelector

configured = HardwareSelector().get_distributed_training_config
TASKS = [  # model, GPUs, batch, GiB: the tasks that selection guides give
    ("facebook/opt-1.3b", 8, 4, 24),
    ("facebook/opt-6.7b", 4, 8, 16),
    ("facebook/opt-30b", 8, 1, 40),
    ("facebook/opt-13b", 4, 1, 16),
    ("llama-7b", 8, 16, None),
    ("llama-7b", 8, 16, 24),
]


@pytest.mark.parametrize(("model", "gpus", "batch", "limit"), TASKS)
def test_settings_fit_and_add_up(model, gpus, batch, limit):
    config = configured("text_generation", model, gpus, batch, limit)
    assert config["per_gpu_batch_size"] * config["gradient_accumulation_steps"] == batch
    assert config["global_batch_size"] == batch * gpus and config["gpu_count"] == gpus
    held = config["estimated_memory"]
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers", "runtime")
    parts = sum(held[f"{kind}_gb"] for kind in kinds)
    assert parts == pytest.approx(held["per_gpu_gb"]) and parts <= (limit or 80)
    assert config["mixed_precision"] is True and config["precision"] == "bf16"
    name = config["distributed_strategy"]
    assert ("deepspeed_config" in config) == (name == "DeepSpeed") and ("fsdp_config" in config) == (name == "FSDP")
    assert config["primary_recommendation"] not in config["fallback_options"]


def test_each_strategy_comes_out_somewhere():
    small = configured("text_generation", "gpt2", 1, 8)
    assert small["distributed_strategy"] == "DDP" and small["estimated_memory"]["host_gb"] == 0
    tight = configured("text_generation", "facebook/opt-6.7b", 4, 8, 18)
    assert tight["deepspeed_config"] == {"zero_stage": 3, "offload_optimizer": True, "offload_param": True}
    assert tight["estimated_memory"]["host_gb"] > 0, "what was offloaded lies somewhere"
    wide = configured("text_generation", "facebook/opt-1.3b", 8, 4, 24)
    assert wide["fsdp_config"]["sharding_strategy"] == "FULL_SHARD"


def test_checkpointing_is_turned_on_where_only_that_fits():
    selector = HardwareSelector(sequence_length=2048)
    roomy = selector.get_distributed_training_config("text_generation", "facebook/opt-6.7b", 8, 1)
    tight = selector.get_distributed_training_config("text_generation", "facebook/opt-6.7b", 8, 1, 24)
    assert not roomy["gradient_checkpointing"] and tight["gradient_checkpointing"]


def test_hardware_is_ranked_by_the_price_of_a_token():
    task = {"model_family": "text_generation", "model_name": "facebook/opt-1.3b", "task_type": "training"}
    selection = HardwareSelector().select_hardware_for_task(**task, batch_size=8, distributed=True, gpu_count=4)
    ranked = [selection["primary_recommendation"], *selection["fallback_options"]]
    assert sorted(ranked + list(selection["too_small"])) == sorted(set(hardware.accelerators()) - {"CPU"})
    prices = [selection["dollars_per_million_tokens"][name] for name in ranked]
    priced = [price for price in prices if price is not None]
    assert len(priced) > 5 and priced == sorted(priced) == prices[: len(priced)]
    speeds = [selection["tokens_per_second"][name] for name in ranked[len(priced) :]]
    assert speeds == sorted(speeds, reverse=True)
    model, families = models.load("facebook/opt-1.3b"), ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP")
    first = strategy.search(model, hardware.cluster(ranked[0], 4), 512, 32, families=families)
    assert selection["tokens_per_second"][ranked[0]] == first.best.cost.tokens_per_second


def test_what_is_too_small_says_so():
    selection = HardwareSelector().select_hardware_for_task("text_generation", "facebook/opt-66b", gpu_count=4)
    assert "GiB per GPU" in selection["too_small"]["T4"] and "T4" not in selection["fallback_options"]


@pytest.mark.parametrize(
    ("family", "model", "batch", "line"),
    [
        ("text_generatoin", "gpt2", 1, "text_generation"),
        ("vision", "gpt2", 1, "model_family `vision`"),
        ("text_generation", "bert-base-uncased", 1, "no text_generation model"),
        ("text_generation", "facebook/opt-66b", 1, "does not fit"),
        ("text_generation", "gpt2", 0, "batch_size 0"),
        ("text_generation", "gpt22", 1, "gpt2"),
    ],
)
def test_bad_tasks_are_refused(family, model, batch, line):
    with pytest.raises((ConfigError, ModelError), match=line):
        configured(family, model, gpu_count=1, batch_size=batch, max_memory_gb=8)


def test_only_training_is_selected_for():
    with pytest.raises(ConfigError, match="training only"):
        HardwareSelector().select_hardware_for_task("text_generation", "gpt2", "inference")


def test_the_command(capsys):
    task = "select --model-family text_generation --model-name llama-7b --batch-size 16 --mode training"
    assert cli.main(f"{task} --distributed --gpu-count 8 --max-memory-gb 24".split()) == 0
    assert json.loads(capsys.readouterr().out)["global_batch_size"] == 128
    assert cli.main(["select", "--model-name", "gpt2", "--gpu-count", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu_count"] == 2
    assert cli.main(["select", "--model-name", "gpt2", "--max-memory-gb", "8"]) == 2
    assert "--distributed" in capsys.readouterr().err
