"""No option is ignored: what trainer and engine do not read is refused, over all fields, trainers and engines."""

import dataclasses
import sys

import pytest

from course_lib.config import Config, build, option, options
from course_lib.config.axes import ENGINES
from course_lib.config.unread import READERS, first_unread
from course_lib.errors import ConfigError
from course_lib.training.run import train

SIZES = {"model": "tiny-gpt2", "max_train_samples": 32, "max_eval_samples": 8, "max_length": 16, "batch_size": 4}
QUIET = {"num_epochs": 0.25, "mixed_precision": "no", "watchdog": 0.0, "progress_bar": False, "tracker": "jsonl"}
QUICK = SIZES | QUIET
LAYOUTS = [(strategy, engine) for strategy, engines in ENGINES.items() for engine in engines if engine != "accelerate"]
TRAINERS = {"basic": {"training_type": "basic"}}
for strategy, engine in LAYOUTS:
    TRAINERS[f"{strategy} {engine}"] = {"strategy": strategy, "engine": engine}
for layout in ("ddp scratch", "ddp torch", "zero1 scratch", "zero1 torch"):
    TRAINERS[f"pipeline {layout}"] = {"training_type": "pipeline", **TRAINERS[layout]}
"""Every way to train that runs without a GPU."""

BY_CIRCUMSTANCE = {
    "dataset_config": "names a configuration of a Hub data set",
    "revision": "names a version of a Hub model",
    "separator": "is refused where the data set has no CSV file",
    "encoding": "is refused where it has no text file",
    "validation_fraction": "is for data that come without a validation split",
    "pin_memory": "is for GPUs",
    "num_workers": "is read where the loader is made, by the number of cores",
    "tf32": "is for GPUs",
    "max_steps": "wins over num_epochs, as its help says",
    "warmup_ratio": "gives way to warmup_steps, as its help says",
    "early_stopping_patience": "is a callback's where it is set",
    "best_metric": "has a default by the task",
    "hub_private": "is for pushes to the Hub",
    "push_to_hub": "is read by the command, when training has ended",
    **dict.fromkeys(("project", "run_name", "run_group"), "names what is tracked"),
    "env_file": "is read where a tracker needs keys",
    "log_predictions": "is read where there are classes to show",
}
"""Fields that a run may leave unread, and why no rule refuses them."""


class Reads:
    """The fields of a config that code outside of dataclasses and the config itself asks for."""

    def __init__(self, config: Config):
        self.names: set[str] = set()
        sections = {}
        for section in dataclasses.fields(Config):
            own = getattr(config, section.name)
            watched = type(type(own).__name__, (type(own),), {"__getattribute__": self._noting(own)})
            sections[section.name] = object.__new__(watched)
            sections[section.name].__dict__.update(own.__dict__)
        self.config = Config(**sections)

    def _noting(self, own):
        fields, names = {field.name for field in dataclasses.fields(own)}, self.names

        def noting(section, name):
            caller = sys._getframe(1).f_code
            if name in fields and "dataclasses" not in caller.co_filename and caller.co_name != "__getitem__":
                names.add(name)
            return object.__getattribute__(section, name)

        return noting


def read_by(folder, combination):
    """Fields that one whole run reads."""
    reads = Reads(build(QUICK | combination | {"output_dir": str(folder)}))
    train(reads.config)
    return reads.names


SOME = ("basic", "ddp torch", "zero3 scratch", "zero1 deepspeed", "pipeline zero1 scratch")
"""In `make test`; all are in `make long`."""


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.long)])
def reads(request, ranks, tmp_path_factory):
    """What each trainer and engine reads: pipelines on two ranks, the others alone."""
    folder = tmp_path_factory.mktemp("runs")
    reads = {}
    for name in SOME if request.param == "some" else TRAINERS:
        by_rank = ranks(2 if name.startswith("pipeline") else 1, timeout=400)(read_by, folder / name, TRAINERS[name])
        reads[name] = set().union(*by_rank)
    return reads


def value_of(name):
    """A value of the field that is not its default."""
    known = option(name)
    if known.choices:
        return next(choice for choice in known.choices if choice != known.default)
    if known.is_flag:
        return not known.default
    fractions = dict.fromkeys(("momentum", "adam_beta1", "memory_alert"), 0.5)
    values = fractions | {"pipeline_parallel_size": 2, "data_parallel_size": 2, "split_spec": "h.1:end"}
    return values.get(name, 3)


def refused(combination, name):
    """The line with which a non-default value is refused; None where the config is taken."""
    try:
        build(QUICK | combination | {name: value_of(name)})
    except ConfigError as error:
        return str(error)
    return None


def test_what_no_trainer_reads_is_refused(reads):
    """Over all fields × trainers × engines: a field is read by a run, or refused, or in the list above."""
    ignored = [
        (combination, o.name)
        for combination, names in reads.items()
        for o in options()
        if o.name not in names and o.name not in BY_CIRCUMSTANCE and refused(TRAINERS[combination], o.name) is None
    ]
    assert ignored == []


def test_what_circumstances_excuse_exists_and_is_not_refused_by_a_rule():
    names = {o.name for o in options()}
    assert set(BY_CIRCUMSTANCE) <= names
    ruled = {name for reader in READERS for name in reader.fields}
    assert ruled <= names and ruled & set(BY_CIRCUMSTANCE) <= {"log_predictions", "hub_private"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"schedule": "zbv"}, "schedule zbv has no effect: it applies to pipelines: add --training_type pipeline"),
        ({"strategy": "fsdp", "bucket_mb": 5.0}, "bucket_mb 5.0 has no effect"),
        ({"strategy": "zero3", "engine": "scratch", "bucket_mb": 5.0}, "bucket_mb 5.0 has no effect"),
        ({"lean_buffers": True}, "it applies to engine deepspeed"),
        ({"momentum": 0.5}, "it applies to --optimizer sgd and muon"),
        ({"optimizer": "sgd", "adam_beta2": 0.5}, "it applies to --optimizer adamw and muon"),
        ({"task": "causal_lm", "label_column": "stars"}, "it applies to --task classification"),
        ({"watch_steps": 5}, "add --watch parameters"),
        ({"tracker": "none", "log_model": True}, "name a --tracker"),
        ({"profile_warmup": 3}, "add --profile_steps"),
        ({"hub_private": True}, "add --push_to_hub"),
        ({"load_in_4bit": True}, "it applies to adapters: give --lora_r too"),
    ],
)
def test_refusals_say_who_reads_it_and_what_to_do(given, told):
    with pytest.raises(ConfigError, match=told) as error:
        build({"tracker": "jsonl"} | given)
    assert "\n" not in str(error.value)


def test_every_rule_refuses_and_lets_pass():
    """A rule that never fires, or always, guards nothing."""
    defaults = {o.name: o.default for o in options()} | {"engine": "torch", "tracker": "jsonl"}
    others = """training_type=pipeline engine=deepspeed strategy=fsdp optimizer=sgd task=masked_lm task=causal_lm
        split_spec=h.1:end watch=all tracker=none desync_check=off push_to_hub=x"""
    given = [tuple(other.split("=")) for other in others.split()]
    given += [("communication", way) for way in option("communication").choices]
    given += [("context_parallel_size", 2), ("tensor_parallel_size", 2), ("lora_r", 8), ("streaming", True)]
    given += [("memory_steps", 1), ("profile_steps", 1), ("eval_steps", 0)]
    for reader in READERS:
        answers = {reader.reads(defaults | {name: value}) for name, value in given} | {reader.reads(defaults)}
        assert answers == {True, False}, reader.fields
    assert first_unread(defaults, defaults) is None
