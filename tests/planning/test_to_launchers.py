"""Plans as files: each is read by the tool that it is for."""

import json
import subprocess

import pytest
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import HfArgumentParser, TrainingArguments

from course_lib import cli
from course_lib.config import files as config_files

ARGUMENTS, CLOUD, ZERO = "training_arguments.json", "sagemaker.sh", "deepspeed.json"
OPT = "--model facebook/opt-6.7b --gpu A100-40 --gpus 8 --max-memory-gb 12 --families"
CASES = {  # by family: the options of `course plan`, and what lies beside the files that every plan has
    "DDP": ("--model gpt2 --gpu ml.p4d.24xlarge --families DDP --sequence-length 512", [ARGUMENTS, CLOUD]),
    "ZeRO-3": ("--model facebook/opt-6.7b --gpu A100-80 --gpus 16 --families ZeRO-3", [ZERO, ARGUMENTS, CLOUD]),
    "offload": (f"{OPT} ZeRO-3", [ZERO, ARGUMENTS, CLOUD]),
    "FSDP offload": (f"{OPT} FSDP", [ARGUMENTS, CLOUD]),
    "FSDP": (
        "--model llama-8b --gpu RTX-4090 --gpus 16 --families FSDP --sequence-length 512 --global-batch 64",
        [ARGUMENTS],
    ),
    "pipeline": ("--model gpt2-xl --gpu H100 --gpus 8 --families 3-D --sequence-length 512", [CLOUD]),
    "masked": (
        "--model bert-base-uncased --gpu T4 --gpus 4 --families ZeRO-2 --sequence-length 128",
        [ZERO, ARGUMENTS, CLOUD],
    ),
    "large vocabulary, offload": (
        "--model gemma-2b --gpu T4 --gpus 4 --families ZeRO-2 --sequence-length 512",
        [ZERO, ARGUMENTS, CLOUD],
    ),
}
EVERY = ["course.yaml", "accelerate.yaml", "torchrun.sh", "job.sbatch"]


@pytest.fixture(scope="module", params=CASES)
def emitted(request, tmp_path_factory):
    options, extra = CASES[request.param]
    folder = tmp_path_factory.mktemp("plan") / "files"
    assert cli.main(["plan", *options.split(), "--emit", str(folder)]) == 0
    return request.param, folder, sorted(EVERY + extra)


def test_each_file_is_read_by_its_tool(emitted, monkeypatch):
    name, folder, expected = emitted
    assert sorted(path.name for path in folder.iterdir()) == expected
    config = config_files.load([folder / "course.yaml"])
    read = load_config_from_file(str(folder / "accelerate.yaml"))
    assert read.num_processes == config.run.num_processes and read.num_machines == {"ZeRO-3": 2, "FSDP": 4}.get(name, 1)
    fsdp = {"FSDP": "LlamaDecoderLayer", "FSDP offload": "OPTDecoderLayer"}.get(name)
    assert read.fsdp_config.get("fsdp_transformer_layer_cls_to_wrap") == fsdp
    assert (config.parallel.offload != "none") == name.endswith("offload")
    if fsdp:
        asked = read.fsdp_config["fsdp_offload_params"]
        assert asked == (name == "FSDP offload")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=asked)
        assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) == asked
        arguments = json.loads((folder / "training_arguments.json").read_text())
        assert arguments["fsdp_config"]["cpu_offload"] == asked
    for script in folder.glob("*.s*"):
        if script.suffix in (".sh", ".sbatch"):
            subprocess.run(["bash", "-n", script], check=True, timeout=300)
            line = script.read_text().replace("\\\n", " ")
            assert "--batch_size" in line or script.name == "sagemaker.sh"
    if "deepspeed.json" in expected:
        raw = json.loads((folder / "deepspeed.json").read_text())
        monkeypatch.setenv("WORLD_SIZE", "1")
        from deepspeed.runtime.config import DeepSpeedConfig  # takes seconds to import

        read = DeepSpeedConfig(raw)
        assert read.zero_config.stage == int(config.parallel.strategy[-1])
        assert (read.zero_config.offload_optimizer is not None) == name.endswith("offload")
    if "training_arguments.json" in expected:
        monkeypatch.chdir(folder)
        raw = json.loads((folder / "training_arguments.json").read_text())
        assert raw.get("use_liger_kernel", False) == (name == "large vocabulary, offload"), "where logits have no room"
        # On a machine without GPUs the Trainer refuses bf16, FSDP and DeepSpeed's engine: its parser reads the fields.
        known = {action.dest for action in HfArgumentParser(TrainingArguments)._actions}
        assert set(raw) <= known
        assert raw["per_device_train_batch_size"] == config.run.batch_size
        portable = {key: value for key, value in raw.items() if key not in ("bf16", "fp16", "fsdp", "deepspeed")}
        (parsed,) = HfArgumentParser(TrainingArguments).parse_dict(portable | {"use_cpu": True})
        assert parsed.gradient_accumulation_steps == config.run.gradient_accumulation_steps


def test_a_pipeline_is_cut_as_planned(emitted):
    name, folder, _ = emitted
    config = config_files.load([folder / "course.yaml"])
    if name == "pipeline":
        sizes = config.pipeline.pipeline_parallel_size, config.pipeline.data_parallel_size
        assert config.run.training_type == "pipeline" and sizes[0] * sizes[1] == 8 == config.run.num_processes
        assert config.run.batch_size % config.pipeline.pipeline_chunks == 0
    else:
        assert config.run.training_type == "accelerated"
        assert config.data.task == ("masked_lm" if name == "masked" else "causal_lm")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--model gpt2 --gpu A100-80 --gpus 12 --emit {}/x", "whole number of nodes"),
        ("--model t5-small --gpu A100-80 --gpus 8 --sequence-length 512 --emit {}/x", "encoder with a decoder"),
        ("--model gpt2 --gpu A100-80 --emit {}/file/x", "cannot write"),
        ("--model gpt2 --gpu A100-80 --families ZeRO-4", "ZeRO-3"),
        ("--model gpt2 --gpu A100-80 --what-if gpus=8 --emit {}/x", "several plans"),
        ("--model gpt2 --gpu A100-80 --what-if colour=8", "OPTION=A,B,C"),
        ("--model gpt2 --gpu A100-80 --what-if gpus=eight", "is no number"),
    ],
)
def test_mistakes_write_nothing(options, line, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert cli.main(["plan", *options.format(tmp_path).split()]) == 2
    assert line in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_if_varies_one_thing(capsys):
    asked = "plan --model llama-70b --gpu H100 --sequence-length 2048 --tokens 1B --json --what-if gpus=1,64,128"
    assert cli.main(asked.split()) == 0
    small, some, more = json.loads(capsys.readouterr().out)
    assert not small["fits"] and "does not fit on 1 x H100" in small["why"]
    assert some["fits"] and more["gpus"] == 128
    assert more["tokens_per_second"] > 1.5 * some["tokens_per_second"] and more["hours"] < some["hours"]
    assert cli.main(asked.replace("--json ", "").split()) == 0
    table = capsys.readouterr().out
    assert "does not" in table and f"{some['tokens_per_second']:,.0f}" in table
