"""What launchers were told is taken, or refused in a line that names our option: every word of the table."""

import argparse
import inspect
import json
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import launch

from course_lib import cli
from course_lib.commands import accelerate_launcher, launcher_words
from course_lib.commands.launcher_words import FILE_WORDS, READ_BY_OTHERS, WORDS
from course_lib.commands.options import config_from
from course_lib.config import build, option
from course_lib.config import files as config_files
from course_lib.config.axes import ENGINES
from course_lib.errors import ConfigError
from course_lib.training.engines.with_deepspeed import deepspeed_config
from course_lib.training.launchfiles import accelerate_settings, accelerate_yaml

from .conftest import QUICK, run

pytestmark = pytest.mark.usefixtures("own_accelerator")
ROOT = Path(cli.__file__).parents[1]
FSDP = "ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_RESHARD_AFTER_FORWARD=true"
FSDP_1 = "ACCELERATE_USE_FSDP=true FSDP_VERSION=1"
DEEPSPEED = "ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_ZERO_STAGE=2"
ZERO3_OFFLOADED = f"{DEEPSPEED} ACCELERATE_DEEPSPEED_ZERO_STAGE=3 ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=cpu"
COMPILED = "ACCELERATE_DYNAMO_BACKEND=INDUCTOR"
GROUPS = f"{FSDP} PARALLELISM_CONFIG_DP_REPLICATE_SIZE=2"
RING = "PARALLELISM_CONFIG_CP_SIZE=2"
BASE = ("--task", "causal_lm", "--attention_dropout", "0")
"""With which rows can be shared."""

TAKEN = [  # what stands beside it, the word, and what becomes of both
    ("", "ACCELERATE_MIXED_PRECISION=bf16", "--mixed_precision bf16"),
    ("", "ACCELERATE_MIXED_PRECISION=fp16", "--mixed_precision fp16"),
    ("", "--mixed_precision=no", "--mixed_precision no"),
    ("", "--gradient_accumulation_steps=4", "--gradient_accumulation_steps 4"),
    ("", "--gradient_clipping=0.5", "--max_grad_norm 0.5"),
    (DEEPSPEED, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=8", "--strategy zero2 --gradient_accumulation_steps 8"),
    (DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING=0.5", "--strategy zero2 --max_grad_norm 0.5"),
    ("", "ACCELERATE_DYNAMO_BACKEND=INDUCTOR", "--torch_compile true"),
    (FSDP_1, "FSDP_SHARDING_STRATEGY=FULL_SHARD", "--strategy fsdp"),
    (FSDP_1, "FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP", "--engine torch --strategy zero2"),
    (FSDP_1, "FSDP_SHARDING_STRATEGY=NO_SHARD", "--strategy ddp"),
    (FSDP, "FSDP_RESHARD_AFTER_FORWARD=true", "--strategy fsdp"),
    (FSDP, "FSDP_RESHARD_AFTER_FORWARD=false", "--strategy zero2 --engine torch"),
    (FSDP, "FSDP_OFFLOAD_PARAMS=true", "--strategy fsdp --offload parameters"),
    (FSDP, "FSDP_ACTIVATION_CHECKPOINTING=true", "--strategy fsdp --activation_checkpointing true"),
    (DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE=3", "--strategy zero3"),
    (DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE=0", "--strategy ddp"),
    (DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=cpu", "--strategy zero2 --offload optimizer"),
    (ZERO3_OFFLOADED, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE=cpu", "--strategy zero3 --offload parameters"),
    ("", "PARALLELISM_CONFIG_TP_SIZE=2", "--tensor_parallel_size 2"),
    ("", "PARALLELISM_CONFIG_CP_SIZE=2", "--context_parallel_size 2"),
    (RING, "PARALLELISM_CONFIG_CP_COMM_STRATEGY=allgather", "--context_parallel_size 2 --context_parallel allgather"),
    ("", "PARALLELISM_CONFIG_SP_SIZE=2", "--context_parallel_size 2 --context_parallel ulysses"),
    (GROUPS, "PARALLELISM_CONFIG_DP_SHARD_SIZE=4", "--strategy fsdp --shard_group_size 4"),
]
REFUSED = [  # what stands beside it, the word, and what the line says to give instead
    ("", "ACCELERATE_MIXED_PRECISION=fp8", "--mixed_precision bf16"),
    ("", "ACCELERATE_DYNAMO_BACKEND=CUDAGRAPHS", "--torch_compile"),
    (COMPILED, "ACCELERATE_DYNAMO_MODE=max-autotune", "--torch_compile"),
    (COMPILED, "ACCELERATE_DYNAMO_USE_FULLGRAPH=True", "--torch_compile"),
    (COMPILED, "ACCELERATE_DYNAMO_USE_DYNAMIC=True", "--torch_compile"),
    (FSDP_1, "FSDP_SHARDING_STRATEGY=HYBRID_SHARD", "--shard_group_size"),
    (FSDP, "FSDP_RESHARD_AFTER_FORWARD=perhaps", "--strategy fsdp"),
    (FSDP, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=true", "--activation_checkpointing"),
    (FSDP, "FSDP_IGNORED_MODULES=head", "every parameter is sharded"),
    (DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE=4", "--strategy zero1, zero2 or zero3"),
    (DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=nvme", "--offload optimizer"),
    (DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE=nvme", "--offload optimizer"),
    (RING, "PARALLELISM_CONFIG_CP_COMM_STRATEGY=pigeons", "--context_parallel"),
    ("", "ACCELERATE_USE_MEGATRON_LM=true", "--training_type pipeline"),
    ("", "ACCELERATE_USE_SAGEMAKER=true", "course submit"),
    ("", "XLA_USE_BF16=1", "TPUs"),
    ("", "XLA_DOWNCAST_BF16=1", "TPUs"),
]


def words_in(text):
    """Of names and values, ``NAME=value NAME=value``; the last of a name counts."""
    return dict(pair.split("=") for pair in text.split())


def config_of(*arguments):
    return config_from(cli.parse(["train", *arguments]))


@pytest.fixture
def given(monkeypatch):
    """The config of a command under a launcher's words; those that the launcher keeps to itself begin with `--`."""

    def call(words, *arguments, file=None):
        asked = {name.removeprefix("--"): value for name, value in words.items() if name.startswith("--")}
        monkeypatch.setattr(accelerate_launcher, "launcher", lambda: SimpleNamespace(config_file=file, **asked))
        for name in [name for name in os.environ if launcher_words.row(name)]:
            monkeypatch.delenv(name)
        for name, value in words.items():
            if not name.startswith("--"):
                monkeypatch.setenv(name, value)
        args = cli.parse(["train", *arguments])
        args.argv = ["train", *arguments]
        accelerate_launcher.take(args)
        config = config_from(args)
        assert config == config_from(cli.parse(args.argv)), "the ranks that it starts read the same"
        assert not [name for name in os.environ if launcher_words.row(name)], "nobody acts on them a second time"
        return config

    return call


def test_every_word_is_tried():
    tried = {word.partition("=")[0] for _, word, _ in TAKEN + REFUSED}
    assert tried == {word.name for word in WORDS if word.option or word.means}
    for words in (WORDS, FILE_WORDS):
        assert len({word.name for word in words}) == len(words)


def another(name, value):
    """A value of the option that is not this one."""
    if option(name).choices:
        return next(choice for choice in option(name).choices if choice not in (value, "auto"))
    return {"true": "false"}.get(value) or f"{2 * float(value):g}"


@pytest.mark.parametrize(("beside", "word", "becomes"), TAKEN, ids=[word for _, word, _ in TAKEN])
def test_a_word_is_taken_and_a_contradiction_refused(given, capsys, beside, word, becomes):
    words = words_in(f"{beside} {word}")
    config = given(words, *BASE)
    assert config == config_of(*BASE, *becomes.split())
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("accelerate launch says")]
    assert len(said) == (config != config_of(*BASE))
    options = re.findall(r"--(\w+) (\S+)", becomes)
    changed = [name for name, _ in options if config[name] != config_of(*BASE)[name]]
    assert [name for name in changed if f"--{name} " not in said[0]] == []
    assert given(words, *BASE, *becomes.split()) == config, "to say the same twice is no contradiction"
    name, value = options[-1]
    with pytest.raises(ConfigError, match=f"accelerate launch says .* and .* says {name} .*: keep one of them"):
        given(words, *BASE, f"--{name}", another(name, value))


@pytest.mark.parametrize(("beside", "word", "told"), REFUSED, ids=[word for _, word, _ in REFUSED])
def test_what_is_not_here_is_refused(given, beside, word, told):
    with pytest.raises(ConfigError, match=f"accelerate launch says .* {word.split('=')[1]}, which is not here.*{told}"):
        given(words_in(f"{beside} {word}"))


def test_what_a_launcher_writes_without_being_asked_says_nothing(given, capsys):
    args = _validated("--num_processes", "1", "script.py")
    mine = shlex.split("--mixed_precision bf16 --gradient_accumulation_steps 3 --strategy zero1 --torch_compile")
    assert given(_left_by(launch.prepare_simple_launcher_cmd_env(args)[1]), *mine) == config_of(*mine)
    assert "accelerate launch says" not in capsys.readouterr().out


def test_a_device_that_the_launcher_keeps_off_is_refused(given):
    assert given({"ACCELERATE_USE_CPU": "True"}).run.device == "auto", "read where the device is chosen"
    with pytest.raises(ConfigError, match=r"says cpu \(--device cpu\), and option --device says device cuda"):
        given({"ACCELERATE_USE_CPU": "True"}, "--device", "cuda")
    with pytest.raises(ConfigError, match="says cpu and mixed_precision fp16.*--mixed_precision bf16"):
        given({"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "fp16"})


def test_a_file_and_auto_count_as_they_should(given, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: auto\nstrategy: zero3\n")
    assert given({"ACCELERATE_MIXED_PRECISION": "bf16"}, "--config", str(file)).run.mixed_precision == "bf16"
    with pytest.raises(ConfigError, match="says mixed_precision fp16 .* says mixed_precision bf16"):
        given({"ACCELERATE_MIXED_PRECISION": "fp16"}, "--bf16", "true")
    config = given(words_in(FSDP), "--config", str(file))
    assert (config.parallel.strategy, config.parallel.engine) == ("zero3", "torch"), "FSDP is not DeepSpeed's ZeRO"
    with pytest.raises(ConfigError, match=rf"and {re.escape(str(file))} says strategy zero3"):
        given(words_in(DEEPSPEED), "--config", str(file))


def test_the_table_has_every_name_that_this_accelerate_sets():
    """A new version's new word is noticed here: give it a row."""
    source = inspect.getsource(launch)
    names = set(re.findall(r'(?:current_env|os\.environ)\["([A-Z0-9_]+)"\] = ', source))
    names |= set(re.findall(r'"(ACCELERATE_[A-Z0-9_]+)":', source))
    for function in (launch.prepare_multi_gpu_env, launch.prepare_extend_env_parallelism_config):
        text = inspect.getsource(function)
        prefix = re.search(r'prefix = "([A-Z_]+)"', text)[1]
        names |= {prefix + end for end in re.findall(r'current_env\[prefix \+ "([A-Z0-9_]+)"\]', text)}
    options = vars(launch_command_parser().parse_args(["x.py"]))
    names |= {f"ACCELERATE_{name.upper()}" for name in options if name.startswith("fp8_")}
    names -= {"LOCAL_RANK", "RANK", "FORK_LAUNCHED"}  # of its notebook_launcher
    names = {name for name in names if not name.startswith("AWS_")}  # for the launcher itself
    assert len(names) > 90
    assert {name for name in names if launcher_words.row(name) is None} - READ_BY_OTHERS == set()
    rows = {word.name for word in WORDS if not word.name.startswith("--") and not word.name.endswith("*")}
    assert rows - names == set(), "a row that no launcher of this version sets"


# --- files ---


def _validated(*arguments):
    args, defaults, from_file = _validate_launch_command(launch_command_parser().parse_args(arguments))
    if args.use_deepspeed:  # as accelerate.commands.launch.launch_command has it
        fields = [*(defaults.deepspeed_config if defaults else ()), *(["mixed_precision"] if from_file else ())]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    return args


def _left_by(environment):
    return {
        name: value for name, value in environment.items() if os.environ.get(name) != value and launcher_words.row(name)
    }


def _words_of(file, *arguments):
    """What ``accelerate launch --config_file`` leaves in the environment."""
    args = _validated("--config_file", str(file), *arguments, "script.py")
    if args.use_deepspeed:
        return _left_by(launch.prepare_deepspeed_cmd_env(args)[1])
    several = args.use_fsdp or args.multi_gpu
    return _left_by(launch.prepare_multi_gpu_env(args) if several else launch.prepare_simple_launcher_cmd_env(args)[1])


FILES = {  # of this repository, and what is typed beside it
    "cpu2": "",
    "gpu": "",
    "multi-gpu": "--num_processes 8",
    "multi-node": "--num_machines 2 --num_processes 16 --machine_rank 1 --main_process_ip 10.0.0.1 "
    "--main_process_port 29500",
}


@pytest.mark.parametrize("name", FILES)
def test_the_files_of_this_repository_leave_all_to_the_run(given, name):
    words = _words_of(ROOT / f"configs/accelerate/{name}.yaml", *FILES[name].split())
    own = shlex.split("--mixed_precision bf16 --strategy zero2 --gradient_accumulation_steps 2")
    mine = ("--config", str(ROOT / "configs/quickstart.yaml"), *own)
    assert given(words, *mine) == config_of(*mine)


RUNS = [
    (strategy, engine, offload)
    for strategy, engines in ENGINES.items()
    for engine in engines
    for offload in ("none", "optimizer")
    if offload == "none" or engine == "deepspeed" or (strategy == "fsdp" and engine != "scratch")
]


@pytest.mark.parametrize(("strategy", "engine", "offload"), RUNS)
def test_what_a_run_leaves_starts_the_same_run(given, tmp_path, strategy, engine, offload):
    """accelerate.yaml beside the run's own config.yaml, and with nothing but it."""
    chosen = {"strategy": strategy, "engine": engine, "offload": offload}
    config = build(chosen | {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5})
    file, theirs, own = (tmp_path / name for name in ("accelerate.yaml", "deepspeed.json", "config.yaml"))
    settings = accelerate_settings(config, "bf16", 2, "BertLayer", deepspeed="deepspeed.json")
    file.write_text(accelerate_yaml(settings, 2))
    theirs.write_text(json.dumps(deepspeed_config(config, "bf16")) if engine == "deepspeed" else "")
    own.write_text(config_files.to_yaml(config))
    words = _words_of(file)
    started = given(words, "--config", str(own), file=str(file))
    assert started == config.replace(mixed_precision="bf16")
    alone = given(words, file=str(file))
    family = {"zero3": ("zero3", "fsdp")}.get(strategy, (strategy,)) if engine != "deepspeed" else (strategy,)
    if (strategy, engine) not in (("zero1", "torch"), ("zero1", "scratch")):  # Accelerate has no such thing
        assert alone.parallel.strategy in family
        assert (alone.parallel.chosen_engine == "deepspeed") == (engine == "deepspeed")
    assert alone.run.mixed_precision == "bf16"


def test_deepspeed_s_file_is_read_key_by_key(given, tmp_path):
    file = tmp_path / "ds.json"

    def with_file(text, path=file):
        file.write_text(text)
        return given({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)})

    config = with_file(
        """{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
            "bf16": {"enabled": true}, "gradient_clipping": 0.3, "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": "auto", "train_batch_size": "auto", "steps_per_print": 10}"""
    )
    assert (config.parallel.strategy, config.parallel.offload) == ("zero3", "parameters")
    assert (config.run.mixed_precision, config.optim.max_grad_norm, config.run.batch_size) == ("bf16", 0.3, 4)
    config = with_file('{"train_batch_size": 64, "zero_optimization": {"stage": 1}}')
    assert config.run.global_batch_size == 64
    for text, told in {
        '{"optimizer": {"type": "Lion"}}': "--optimizer",
        '{"scheduler": {"type": "WarmupLR"}}': "--lr_scheduler",
        '{"amp": {"enabled": true}}': "DeepSpeed's file",
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}': "--offload",
        "{": "is not JSON",
    }.items():
        with pytest.raises(ConfigError, match=told):
            with_file(text)
    with pytest.raises(ConfigError, match="is not there"):
        with_file("{}", tmp_path / "none.json")


# --- other launchers, other commands ---


def test_a_rank_that_deepspeed_puts_before_the_command(monkeypatch, course):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert isinstance(cli.parse(["--local_rank=1", "train"]), argparse.Namespace)
    code, _, err = course("--local-rank=0", "train")
    assert code == 2 and "--local_rank is 0, and the environment's LOCAL_RANK is 1" in err
    monkeypatch.delenv("LOCAL_RANK")
    assert course("--local_rank=0", "train")[0] == 2
    code, _, err = course("train", "--deepspeed_config", "ds.json")
    assert code == 2 and "use --strategy zero1, zero2 or zero3 with --engine deepspeed" in err


def test_an_evaluation_takes_what_it_reads_and_says_what_it_does_not(course, monkeypatch, tmp_path):
    for name, value in words_in(f"{FSDP} ACCELERATE_MIXED_PRECISION=bf16").items():
        monkeypatch.setenv(name, value)
    code, out, err = course("evaluate", "--model", tmp_path / "none", "--json")
    assert code == 2 and out == "" and "does not exist" in err
    assert "accelerate launch says mixed_precision bf16: --mixed_precision bf16\n" in err
    assert "--strategy fsdp; `course evaluate` has no use for that" in err
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    code, _, err = course("evaluate", "--model", tmp_path / "none", "--mixed_precision", "no")
    assert code == 2 and "keep one of them" in err


ONE_STEP = ("train", *QUICK, *shlex.split("--max_steps 1 --tracker none --baselines false"))


def _summary(folder):
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_words_of_the_environment_reach_the_training(course, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    code, out, _ = course(*ONE_STEP, "--output_dir", tmp_path)
    assert code == 0 and _summary(tmp_path)["mixed_precision"] == "bf16"
    assert _summary(tmp_path)["train"]["global_batch_size"] == 16
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["run"]["gradient_accumulation_steps"] == 4
    assert out.count("accelerate launch says") == 1


ACCELERATE = "-m accelerate.commands.launch --num_processes 2"
REAL = {  # a launcher's line, and strategy, engine, precision, global batch and ranks of the run
    "--cpu --mixed_precision bf16 --gradient_accumulation_steps 4": ("ddp", "torch", "bf16", 32, 2),
    "--use_fsdp --fsdp_version 2 --mixed_precision bf16 --main_process_port 0": ("fsdp", "torch", "bf16", 8, 2),
    "--use_deepspeed --zero_stage 1 --main_process_port 0": ("zero1", "deepspeed", "no", 8, 2),
}


@pytest.mark.long
@pytest.mark.parametrize("line", REAL)
def test_launchers_themselves(tmp_path, line):
    launcher, env = f"{ACCELERATE} {line}".split(), {} if "--cpu" in line else {"ACCELERATE_USE_CPU": "true"}
    done = run(*ONE_STEP, "--output_dir", tmp_path, launcher=launcher, **env)
    assert done.returncode == 0, done.stderr
    left = _summary(tmp_path)
    started = tuple(left[name] for name in ("strategy", "engine", "mixed_precision"))
    assert (*started, left["train"]["global_batch_size"], left["world_size"]) == REAL[line]
    assert done.stdout.count("accelerate launch says") == 1
