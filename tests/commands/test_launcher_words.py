"""What launchers were told is taken, or refused in a line that names our option: every word of the table."""

import argparse
import inspect
import json
import os
import re
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
from course_lib.config import build, flatten
from course_lib.config import files as config_files
from course_lib.config.axes import ENGINES
from course_lib.errors import ConfigError
from course_lib.training.engines.with_deepspeed import deepspeed_config
from course_lib.training.launchfiles import accelerate_settings, accelerate_yaml

from .conftest import QUICK, run

pytestmark = pytest.mark.usefixtures("own_accelerator")
ROOT = Path(cli.__file__).parents[1]
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
FSDP_1 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
COMPILED = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
GROUPS = FSDP | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}
BASE = ("--task", "causal_lm", "--attention_dropout", "0")
"""With which rows can be shared."""

TAKEN = [
    ("ACCELERATE_MIXED_PRECISION", "bf16", {}, {"mixed_precision": "bf16"}, ("mixed_precision", "no")),
    ("ACCELERATE_MIXED_PRECISION", "fp16", {}, {"mixed_precision": "fp16"}, ("bf16", "true")),
    ("--mixed_precision", "no", {}, {"mixed_precision": "no"}, ("mixed_precision", "bf16")),
    (
        "--gradient_accumulation_steps",
        "4",
        {},
        {"gradient_accumulation_steps": 4},
        ("gradient_accumulation_steps", "1"),
    ),
    ("--gradient_clipping", "0.5", {}, {"max_grad_norm": 0.5}, ("max_grad_norm", "2")),
    (
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "8",
        DEEPSPEED,
        {"gradient_accumulation_steps": 8},
        ("gradient_accumulation_steps", "4"),
    ),
    ("ACCELERATE_GRADIENT_CLIPPING", "0.5", DEEPSPEED, {"max_grad_norm": 0.5}, ("max_grad_norm", "1.0")),
    ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", {}, {"torch_compile": True}, ("torch_compile", "false")),
    ("FSDP_SHARDING_STRATEGY", "FULL_SHARD", FSDP_1, {"strategy": "fsdp"}, ("strategy", "zero1")),
    ("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP", FSDP_1, {"strategy": "zero2", "engine": "torch"}, ("strategy", "fsdp")),
    ("FSDP_SHARDING_STRATEGY", "NO_SHARD", FSDP_1, {"strategy": "ddp"}, ("strategy", "fsdp")),
    ("FSDP_RESHARD_AFTER_FORWARD", "true", FSDP, {"strategy": "fsdp"}, ("strategy", "ddp")),
    ("FSDP_RESHARD_AFTER_FORWARD", "false", FSDP, {"strategy": "zero2", "engine": "torch"}, ("engine", "deepspeed")),
    ("FSDP_OFFLOAD_PARAMS", "true", FSDP, {"strategy": "fsdp", "offload": "parameters"}, ("offload", "none")),
    (
        "FSDP_ACTIVATION_CHECKPOINTING",
        "true",
        FSDP,
        {"activation_checkpointing": True},
        ("gradient_checkpointing", "false"),
    ),
    ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", DEEPSPEED, {"strategy": "zero3"}, ("strategy", "zero1")),
    ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0", DEEPSPEED, {"strategy": "ddp"}, ("strategy", "zero1")),
    (
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "cpu",
        DEEPSPEED,
        {"strategy": "zero2", "offload": "optimizer"},
        ("offload", "none"),
    ),
    (
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        "cpu",
        DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
        {"strategy": "zero3", "offload": "parameters"},
        ("offload", "optimizer"),
    ),
    ("PARALLELISM_CONFIG_TP_SIZE", "2", {}, {"tensor_parallel_size": 2}, ("tensor_parallel_size", "4")),
    ("PARALLELISM_CONFIG_CP_SIZE", "2", {}, {"context_parallel_size": 2}, ("context_parallel_size", "4")),
    (
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        "allgather",
        {"PARALLELISM_CONFIG_CP_SIZE": "2"},
        {"context_parallel": "allgather"},
        ("context_parallel", "ring"),
    ),
    (
        "PARALLELISM_CONFIG_SP_SIZE",
        "2",
        {},
        {"context_parallel_size": 2, "context_parallel": "ulysses"},
        ("context_parallel", "ring"),
    ),
    (
        "PARALLELISM_CONFIG_DP_SHARD_SIZE",
        "4",
        GROUPS,
        {"strategy": "fsdp", "shard_group_size": 4},
        ("shard_group_size", "2"),
    ),
]
"""Word, value, what stands beside it, what becomes of it, and an option that contradicts it."""

REFUSED = [
    ("ACCELERATE_MIXED_PRECISION", "fp8", {}, "--mixed_precision bf16"),
    ("ACCELERATE_DYNAMO_BACKEND", "CUDAGRAPHS", {}, "--torch_compile"),
    ("ACCELERATE_DYNAMO_MODE", "max-autotune", COMPILED, "--torch_compile"),
    ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "True", COMPILED, "--torch_compile"),
    ("ACCELERATE_DYNAMO_USE_DYNAMIC", "True", COMPILED, "--torch_compile"),
    ("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD", FSDP_1, "--shard_group_size"),
    ("FSDP_RESHARD_AFTER_FORWARD", "perhaps", FSDP, "--strategy fsdp"),
    ("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true", FSDP, "--activation_checkpointing"),
    ("FSDP_IGNORED_MODULES", "head", FSDP, "every parameter is sharded"),
    ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "4", DEEPSPEED, "--strategy zero1, zero2 or zero3"),
    ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme", DEEPSPEED, "--offload optimizer"),
    ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme", DEEPSPEED, "--offload optimizer"),
    ("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "pigeons", {"PARALLELISM_CONFIG_CP_SIZE": "2"}, "--context_parallel"),
    ("ACCELERATE_USE_MEGATRON_LM", "true", {}, "--training_type pipeline"),
    ("ACCELERATE_USE_SAGEMAKER", "true", {}, "course submit"),
    ("XLA_USE_BF16", "1", {}, "TPUs"),
    ("XLA_DOWNCAST_BF16", "1", {}, "TPUs"),
]
"""Word, value, what stands beside it, and what the line says to give instead."""


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
    say = {word.name for word in WORDS if word.option or word.means}
    assert {name for name, *_ in TAKEN + REFUSED} == say and len(say) == 28
    for words in (WORDS, FILE_WORDS):
        assert len({word.name for word in words}) == len(words)


@pytest.mark.parametrize(
    ("name", "value", "beside", "becomes", "against"), TAKEN, ids=[f"{name} {value}" for name, value, *_ in TAKEN]
)
def test_a_word_is_taken_and_a_contradiction_refused(given, capsys, name, value, beside, becomes, against):
    words = beside | {name: value}
    config = given(words, *BASE)
    assert {option: config[option] for option in becomes} == becomes
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("accelerate launch says")]
    default = config_from(cli.parse(["train", *BASE]))
    changed = {option for option, own in flatten(config).items() if own != default[option]}
    assert len(said) == bool(changed) and all(f"--{option}" in said[0] for option in becomes if option in changed)
    agreeing = [text for option, own in becomes.items() for text in (f"--{option}", str(own))]
    assert given(words, *BASE, *agreeing) == given(words, *BASE), "to say the same twice is no contradiction"
    with pytest.raises(ConfigError, match="accelerate launch says .* and .*: keep one of them") as caught:
        given(words, *BASE, f"--{against[0]}", against[1])
    assert config_files.translate({against[0]: against[1]}).keys() & {*str(caught.value).split()}


@pytest.mark.parametrize(("name", "value", "beside", "told"), REFUSED, ids=[f"{n} {v}" for n, v, *_ in REFUSED])
def test_what_is_not_here_is_refused(given, name, value, beside, told):
    with pytest.raises(ConfigError, match="accelerate launch says .* not here") as caught:
        given(beside | {name: value})
    assert told in str(caught.value) and value in str(caught.value)


def test_what_a_launcher_writes_without_being_asked_says_nothing(given, capsys):
    args = _validated("--num_processes", "1", "script.py")
    config = given(
        _left_by(launch.prepare_simple_launcher_cmd_env(args)[1]),
        "--mixed_precision",
        "bf16",
        "--gradient_accumulation_steps",
        "3",
        "--strategy",
        "zero1",
        "--torch_compile",
    )
    assert config == build(
        {"mixed_precision": "bf16", "gradient_accumulation_steps": 3, "strategy": "zero1", "torch_compile": True}
    )
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
    config = given(FSDP, "--config", str(file))
    assert (config.parallel.strategy, config.parallel.engine) == ("zero3", "torch"), "FSDP is not DeepSpeed's ZeRO"
    with pytest.raises(ConfigError, match=rf"and {re.escape(str(file))} says strategy zero3"):
        given(DEEPSPEED, "--config", str(file))


def test_the_table_has_every_name_that_this_accelerate_sets():
    """A new version's new word is noticed here: give it a row."""
    source = inspect.getsource(launch)
    names = set(re.findall(r'(?:current_env|os\.environ)\["([A-Z0-9_]+)"\] = ', source))
    names |= set(re.findall(r'"(ACCELERATE_[A-Z0-9_]+)":', source))
    for function in (launch.prepare_multi_gpu_env, launch.prepare_extend_env_parallelism_config):
        text = inspect.getsource(function)
        prefix = re.search(r'prefix = "([A-Z_]+)"', text)[1]
        names |= {prefix + end for end in re.findall(r'current_env\[prefix \+ "([A-Z0-9_]+)"\]', text)}
    names |= {
        f"ACCELERATE_{name.upper()}"
        for name in vars(launch_command_parser().parse_args(["x.py"]))
        if name.startswith("fp8_")
    }
    names -= {"LOCAL_RANK", "RANK", "FORK_LAUNCHED"}  # of its notebook_launcher
    names = {name for name in names if not name.startswith("AWS_")}  # for the launcher itself
    assert len(names) > 90
    assert not [name for name in sorted(names) if launcher_words.row(name) is None and name not in READ_BY_OTHERS]
    rows = {word.name for word in WORDS if not word.name.startswith("--") and not word.name.endswith("*")}
    assert not rows - names, "a row that no launcher of this version sets"


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


def _words_of(file: Path, *arguments: str) -> dict[str, str]:
    """What ``accelerate launch --config_file`` leaves in the environment."""
    args = _validated("--config_file", str(file), *arguments, "script.py")
    if args.use_deepspeed:
        return _left_by(launch.prepare_deepspeed_cmd_env(args)[1])
    several = args.use_fsdp or args.multi_gpu
    return _left_by(launch.prepare_multi_gpu_env(args) if several else launch.prepare_simple_launcher_cmd_env(args)[1])


FILES = sorted((ROOT / "configs/accelerate").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_files_of_this_repository_leave_all_to_the_run(given, file):
    assert len(FILES) == 4
    several = (
        "--num_machines",
        "2",
        "--num_processes",
        "16",
        "--machine_rank",
        "1",
        "--main_process_ip",
        "10.0.0.1",
        "--main_process_port",
        "29500",
    )
    words = _words_of(file, *({"multi-gpu": ("--num_processes", "8"), "multi-node": several}.get(file.stem, ())))
    mine = (
        "--config",
        str(ROOT / "configs/quickstart.yaml"),
        "--mixed_precision",
        "bf16",
        "--strategy",
        "zero2",
        "--gradient_accumulation_steps",
        "2",
    )
    assert given(words, *mine) == config_from(cli.parse(["train", *mine]))


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
    assert len(RUNS) == 19
    config = build(
        {
            "strategy": strategy,
            "engine": engine,
            "offload": offload,
            "gradient_accumulation_steps": 3,
            "max_grad_norm": 0.5,
        }
    )
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
    def with_file(**keys):
        (tmp_path / "ds.json").write_text(json.dumps(keys))
        return given(
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")}
        )

    config = with_file(
        zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
        bf16={"enabled": True},
        gradient_clipping=0.3,
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps="auto",
        train_batch_size="auto",
        steps_per_print=10,
    )
    assert (config.parallel.strategy, config.parallel.offload) == ("zero3", "parameters")
    assert (config.run.mixed_precision, config.optim.max_grad_norm, config.run.batch_size) == ("bf16", 0.3, 4)
    assert with_file(train_batch_size=64, zero_optimization={"stage": 1}).run.global_batch_size == 64
    for keys, told in (
        ({"optimizer": {"type": "Lion"}}, "--optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "--lr_scheduler"),
        ({"amp": {"enabled": True}}, "DeepSpeed's file"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "--offload"),
    ):
        with pytest.raises(ConfigError, match=told):
            with_file(**keys)
    (tmp_path / "ds.json").write_text("{")
    for path, told in (("ds.json", "is not JSON"), ("none.json", "is not there")):
        with pytest.raises(ConfigError, match=told):
            given({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / path)})


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
    for name, value in (FSDP | {"ACCELERATE_MIXED_PRECISION": "bf16"}).items():
        monkeypatch.setenv(name, value)
    code, out, err = course("evaluate", "--model", tmp_path / "none", "--json")
    assert code == 2 and out == "" and "does not exist" in err
    assert "accelerate launch says mixed_precision bf16: --mixed_precision bf16\n" in err
    assert "--strategy fsdp; `course evaluate` has no use for that" in err
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    code, _, err = course("evaluate", "--model", tmp_path / "none", "--mixed_precision", "no")
    assert code == 2 and "keep one of them" in err


def _summary(folder):
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_words_of_the_environment_reach_the_training(course, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    code, out, _ = course(
        "train", *QUICK, "--max_steps", 1, "--output_dir", tmp_path, "--tracker", "none", "--baselines", "false"
    )
    assert code == 0 and _summary(tmp_path)["mixed_precision"] == "bf16"
    assert _summary(tmp_path)["train"]["global_batch_size"] == 16
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["run"]["gradient_accumulation_steps"] == 4
    assert out.count("accelerate launch says") == 1


LAUNCH = ("-m", "accelerate.commands.launch")
REAL = {
    "one process": (
        (*LAUNCH, "--cpu", "--mixed_precision", "bf16", "--gradient_accumulation_steps", 4, "--num_processes", 1),
        {},
        ("ddp", "torch", "bf16", 16, 1),
    ),
    "two that we start": (
        (*LAUNCH, "--cpu", "--mixed_precision", "bf16", "--gradient_accumulation_steps", 4, "--num_processes", 2),
        {},
        ("ddp", "torch", "bf16", 32, 2),
    ),
    "fsdp": (
        (
            *LAUNCH,
            "--use_fsdp",
            "--fsdp_version",
            2,
            "--mixed_precision",
            "bf16",
            "--num_processes",
            2,
            "--main_process_port",
            0,
        ),
        {"ACCELERATE_USE_CPU": "true"},
        ("fsdp", "torch", "bf16", 8, 2),
    ),
    "deepspeed": (
        (
            *LAUNCH,
            "--use_deepspeed",
            "--zero_stage",
            1,
            "--gradient_accumulation_steps",
            2,
            "--num_processes",
            2,
            "--main_process_port",
            0,
        ),
        {"ACCELERATE_USE_CPU": "true"},
        ("zero1", "deepspeed", "no", 16, 2),
    ),
    "torchrun": (
        ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2),
        {"ACCELERATE_MIXED_PRECISION": "bf16"},
        ("ddp", "torch", "bf16", 8, 2),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", REAL)
def test_launchers_themselves(tmp_path, kind):
    launcher, env, expected = REAL[kind]
    done = run(
        "train",
        *QUICK,
        "--max_steps",
        1,
        "--output_dir",
        tmp_path,
        "--tracker",
        "none",
        "--baselines",
        "false",
        launcher=launcher,
        **env,
    )
    assert done.returncode == 0, done.stderr
    left = _summary(tmp_path)
    assert (
        left["strategy"],
        left["engine"],
        left["mixed_precision"],
        left["train"]["global_batch_size"],
        left["world_size"],
    ) == tuple("single" if value == "ddp" and expected[-1] == 1 else value for value in expected)
    assert done.stdout.count("accelerate launch says") == 1
