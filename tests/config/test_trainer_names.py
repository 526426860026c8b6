"""Every argument of the Hugging Face Trainer is taken as it is meant, or refused in one line that says what to use."""

import dataclasses

import pytest
from transformers import TrainingArguments

from course_lib import cli
from course_lib.config import files as config_files
from course_lib.config import options
from course_lib.config import trainer_names as names
from course_lib.errors import ConfigError
from tools import trainer_names


def test_every_argument_is_known_and_the_page_says_how():
    table = trainer_names.rows()
    assert table.keys() == {field.name for field in dataclasses.fields(TrainingArguments)}
    assert {field for field, (kind, _) in table.items() if kind == "unknown"} == set()
    assert trainer_names.PAGE.read_text(encoding="utf-8") == trainer_names.page(), "run python tools/trainer_names.py"
    absent = [kind for kind, _ in table.values()].count("not")
    page = " ".join((trainer_names.PAGE.parent / "trainer.md").read_text(encoding="utf-8").split())
    assert f"{len(table) - absent} of the {len(table)} arguments of the Hugging Face Trainer" in page
    assert f"the other {absent} are refused" in page
    assert not ({*names.ABSENT, *names.ALWAYS} & {o.name for o in options()}), "no field of ours is refused"


@pytest.mark.parametrize("name", names.ABSENT)
def test_what_is_not_here_is_refused_in_one_line(name, capsys):
    assert cli.main(["train", f"--{name}", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"course: {name} is not here: {names.ABSENT[name]}") and said.count("\n") == 1


@pytest.mark.parametrize("name", names.ALWAYS)
def test_what_is_always_so_may_be_said_and_not_denied(name):
    value, why = names.ALWAYS[name]
    assert config_files.load(overrides={name: value}) == config_files.load()
    other = {"true": "false", "false": True}.get(value, "another")
    with pytest.raises(ConfigError, match=f"{name} {other} is not here"):
        config_files.load(overrides={name: other})


COSINE = {"lr_scheduler": "cosine"}
VALUES = [
    ({"max_steps": -1}, {"max_steps": None}),
    ({"optim": "adamw_torch_fused"}, {"optimizer": "adamw"}),
    ({"optim": "sgd"}, {"optimizer": "sgd", "momentum": 0.0}),
    ({"report_to": ["wandb", "tensorboard"]}, {"tracker": "wandb,tensorboard"}),
    ({"report_to": "all"}, {"tracker": "trackio,wandb,tensorboard"}),
    ({"report_to": "none"}, {"tracker": "none"}),
    ({"logging_strategy": "epoch"}, {"logging_steps": None}),
    ({"logging_strategy": "no"}, {"logging_steps": 0}),
    ({"logging_strategy": "steps", "logging_steps": 7}, {"logging_steps": 7}),
    ({"data_seed": 5}, {"data_seed": 5, "seed": 42}),
    ({"full_determinism": True}, {"deterministic": True}),
    ({"use_cpu": "true"}, {"device": "cpu"}),
    ({"use_cpu": False}, {"device": "auto"}),
    ({"disable_tqdm": True}, {"progress_bar": False}),
    ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, {"lr_scheduler": "constant_with_warmup"}),
    ({"dataloader_drop_last": True}, {"drop_last": True}),
    (COSINE | {"lr_scheduler_kwargs": {"num_cycles": 1}}, {"lr_scheduler_kwargs": '{"num_cycles": 1}'}),
    ({"warmup_steps": 0.1}, {"warmup_ratio": 0.1, "warmup_steps": 0}),
    ({"tf32": True}, {"tf32": "on"}),
    ({"tf32": "false"}, {"tf32": "off"}),
    ({"metric_for_best_model": "eval_loss", "greater_is_better": False}, {"best_metric": "loss"}),
    ({"push_to_hub": True, "hub_model_id": "me/mine"}, {"push_to_hub": "me/mine"}),
    ({"push_to_hub": "me/mine", "hub_private_repo": True}, {"hub_private": True}),
    ({"push_to_hub": False}, {"push_to_hub": None}),
    ({"train_sampling_strategy": "random"}, {"group_by_length": False}),
    ({"fsdp": "full_shard auto_wrap"}, {"strategy": "fsdp"}),
    ({"ddp_bucket_cap_mb": 12.5}, {"bucket_mb": 12.5}),
]


@pytest.mark.parametrize(("given", "wanted"), VALUES, ids=[" ".join(given) for given, _ in VALUES])
def test_a_value_is_written_as_it_is_here(given, wanted):
    config = config_files.load(overrides=given)
    assert {name: config[name] for name in wanted} == wanted


REFUSED = [
    ({"optim": "lion_8bit"}, "optim lion_8bit is not here: use adamw_torch, adamw_torch_fused, sgd, or --optimizer"),
    ({"optim": "adafactor"}, "optim adafactor is not here: .*adafactor, which is torch's"),
    ({"report_to": "mlflow"}, "report_to mlflow is not here: use trackio, wandb, tensorboard"),
    ({"greater_is_better": True, "metric_for_best_model": "loss"}, "greater_is_better True is not so for loss"),
    ({"hub_model_id": "me/mine"}, "hub_model_id me/mine alone pushes nothing: use --push_to_hub me/mine"),
    ({"push_to_hub": True}, "push_to_hub true names no repository: use --push_to_hub NAME"),
    ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "constant has no warm-up there: use constant_with_warmup"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "`lr_scheduler` cannot be 'reduce_lr_on_plateau'"),
    ({"lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler linear takes no `power`: leave lr_scheduler_kwargs out"),
    ({"lr_scheduler": "polynomial", "lr_scheduler_kwargs": '{"pwer": 2}'}, "takes no `pwer`: did you mean `power`"),
    ({"lr_scheduler": "cosine", "lr_scheduler_kwargs": "num_cycles=1"}, "is no JSON object: write it as"),
    ({"lr_scheduler": "warmup_stable_decay"}, "warmup_stable_decay needs num_decay_steps: give"),
    ({"logging_strategy": "often"}, "logging_strategy often is not here: use no, epoch, steps"),
    ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy sequential is not here"),
    ({"eval_strategy": "no", "eval_delay": 3}, "eval_delay 3.0 has no effect: it applies to evaluations"),
    ({"report_to": "wandb", "tracker": "jsonl"}, "report_to wandb and tracker jsonl contradict each other: keep one"),
    ({"tracker": "jsonl", "report_to": "wandb"}, "report_to wandb and tracker jsonl contradict each other: keep one"),
    ({"logging_strategy": "epoch", "logging_steps": 5}, "epoch and logging_steps 5 contradict each other"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[" ".join(map(str, given.values())) for given, _ in REFUSED])
def test_what_means_nothing_here_is_refused(given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        config_files.load(overrides=given)
    assert "\n" not in str(caught.value)


def test_a_config_file_may_use_their_names(tmp_path):
    text = "optim: sgd\ndisable_tqdm: true\nreport_to: [tensorboard]\nmax_steps: -1\nlr_scheduler_type: cosine\n"
    (tmp_path / "run.yaml").write_text(text + "lr_scheduler_kwargs:\n  num_cycles: 1.5\n")
    config = config_files.load([tmp_path / "run.yaml"])
    assert config.optim.momentum == 0 and not config.run.progress_bar and config.tracking.tracker == "tensorboard"
    (tmp_path / "resolved.yaml").write_text(config_files.to_yaml(config))
    assert config_files.load([tmp_path / "resolved.yaml"]) == config
