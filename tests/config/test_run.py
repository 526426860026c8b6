"""Configs: every field documented, read from files and options under every name, wrong ones refused in a line."""

import dataclasses

import pytest
import yaml

from course_lib.config import Config, build, options
from course_lib.config import files as config_files
from course_lib.errors import ConfigError
from course_lib.writing import write_text

PIPELINE = {"training_type": "pipeline"}


def test_every_field_has_a_docstring_and_a_name_of_its_own():
    names = [o.name for o in options()]
    assert len(names) == len(set(names))
    assert [o.name for o in options() if not o.help.endswith(".") or len(o.help) <= 15] == []
    assert not set(config_files.ALIASES) & set(names), "an alias hides a field"
    assert set(config_files.ALIASES.values()) <= set(names), "an alias leads nowhere"


def test_yaml_round_trip(tmp_path):
    config = build({"learning_rate": 3e-5, "max_steps": 7, "text_column": "tweet", "warmup_ratio": 0.1})
    (tmp_path / "run.yaml").write_text(config_files.to_yaml(config))
    assert config_files.load([tmp_path / "run.yaml"]) == config


def test_a_config_that_an_earlier_version_saved_is_read(tmp_path):
    saved = yaml.safe_load(config_files.to_yaml(build({"max_steps": 7})))
    saved["communication"] |= {"diloco_fragments": 1, "diloco_keep": 0.5}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(saved))
    assert config_files.load([tmp_path / "run.yaml"]).run.max_steps == 7
    (tmp_path / "run.yaml").write_text("communication: {diloco_fragments: 2}")
    with pytest.raises(ConfigError, match=r"unknown key `communication.diloco_fragments`"):
        config_files.load([tmp_path / "run.yaml"])


def test_later_files_override_earlier_ones_and_options_override_files(tmp_path):
    (tmp_path / "a.yaml").write_text("run:\n  batch_size: 4\n  max_steps: 5\noptim: {learning_rate: 1e-3}\n")
    (tmp_path / "b.yaml").write_text("batch_size: 8\nmodel: tiny-bert\n")
    config = config_files.load([tmp_path / "a.yaml", tmp_path / "b.yaml"], {"max-steps": "9"})
    assert (config.run.batch_size, config.run.max_steps, config.optim.learning_rate) == (8, 9, 1e-3)
    assert config.model.model == "tiny-bert"


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"per_device_train_batch_size": "8"}, "batch_size", 8),
        ({"num-train-epochs": "2"}, "num_epochs", 2.0),
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler", "cosine"),
        ({"gradient_checkpointing": "true"}, "activation_checkpointing", True),
        ({"bf16": "true"}, "mixed_precision", "bf16"),
        ({"fp16": "false"}, "mixed_precision", "auto"),
        ({"eval_strategy": "no"}, "eval_steps", 0),
        ({"save_strategy": "epoch"}, "save_steps", None),
        ({"save_strategy": "steps", "save_steps": "500"}, "save_steps", 500),
        ({"resume_from_checkpoint": "true"}, "resume_from_checkpoint", "latest"),
        ({"model_name_or_path": "gpt2"}, "model", "gpt2"),
        ({"dataset_name": "imdb"}, "dataset", "imdb"),
        ({"save_total_limit": "none"}, "save_total_limit", None),
    ],
)
def test_names_of_other_libraries(given, field, value):
    assert config_files.load([], given)[field] == value


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"bath_size": 4}, "unknown option `bath_size`.*`batch_size`"),
        ({"batch_size": 0}, "`batch_size` cannot be 0.*greater than or equal to 1"),
        ({"batch_size": "many"}, "`batch_size` cannot be 'many'.*integer"),
        ({"optimizer": "adam"}, "`optimizer` cannot be 'adam'.*`adamw`"),
        ({"learning_rate": -1}, "`learning_rate` cannot be -1"),
        ({"warmup_ratio": 1.5}, "`warmup_ratio` cannot be 1.5"),
        ({"training_type": "basic", "num_processes": 2}, "training_type basic runs one process"),
        ({"task": "causal_lm", "best_metric": "accuracy"}, "needs classes"),
        ({"best_metric": "perplexity"}, "language-modelling"),
        ({"early_stopping_patience": 2, "eval_steps": 0}, "needs evaluations"),
        ({"resume_from_checkpoint": "latest", "overwrite_output_dir": True}, "exclude each other"),
        (PIPELINE | {"batch_size": 4, "pipeline_chunks": 8}, "batch_size 4 cannot be cut into 8"),
        (
            PIPELINE | {"num_processes": 4, "data_parallel_size": 3, "pipeline_parallel_size": 2},
            "data_parallel_size 3 × pipeline_parallel_size 2 is not num_processes 4",
        ),
        ({"eval_strategy": "sometimes"}, "`eval_strategy` cannot be 'sometimes'.*`epoch`"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(given, told):
    with pytest.raises(ConfigError, match=told) as error:
        config_files.load([], given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("run:\n  bath_size: 3\n", "unknown key `run.bath_size`.*`batch_size`"),
        ("optim:\n  batch_size: 3\n", "`batch_size` is not in section `optim`.*`run`"),
        ("- 1\n", "holds a list"),
        ("run: [1\n", "is not YAML"),
        ("trian: {}\n", "unknown key `trian`"),
        ("seed: 1\nseed: 2\n", "`seed` stands there twice"),
        ("run:\n  seed: 1\nseed: 2\n", "`seed` stands there twice"),
        ("run:\n  seed: 1\n  seed: 1\n", "`seed` stands there twice"),
        ("mixed_precision: no\n", "cannot be False: .*in YAML in quotes, as in 'no'"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path, text, told):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        config_files.load([path])
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_missing_and_undecodable_files(tmp_path):
    (tmp_path / "quickstart.yaml").write_bytes(b"model: caf\xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        config_files.load([tmp_path / "quickstart.yaml"])
    with pytest.raises(ConfigError, match=r"no config file .*quikstart.yaml: did you mean .*quickstart.yaml"):
        config_files.load([tmp_path / "quikstart.yaml"])
    with pytest.raises(ConfigError, match=r"no config file .*x.yaml: name a YAML file that is there, or leave it out$"):
        config_files.load([tmp_path / "nowhere" / "x.yaml"])


def test_a_split_spec_may_be_a_mapping():
    config = config_files.load([], {"training_type": "pipeline", "split_spec": {"h.5": "end", "h.8": "beginning"}})
    assert config.pipeline.split_spec == "h.5:end,h.8:beginning" and config.parallel.chosen_engine == "scratch"


def test_configs_are_frozen_and_replace_validates():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().run.batch_size = 4
    assert Config().replace(batch_size=4).run.batch_size == 4
    with pytest.raises(ConfigError):
        Config().replace(batch_size=0)


def test_output_dir_names_fields():
    assert str(build({"output_dir": "out/{dataset}-{seed}", "dataset": "org/emotion"}).output_dir) == "out/emotion-42"
    with pytest.raises(ConfigError, match="names no field"):
        _ = build({"output_dir": "out/{nothing}"}).output_dir


def test_a_file_is_never_left_half_written(tmp_path):
    path = tmp_path / "summary.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\udcff")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
