"""Runs with adapters: what their files hold, that they go on to the bit, and that a trained folder is one for PEFT."""

import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from course_lib import cli
from course_lib.config import build
from course_lib.errors import CheckpointError, ConfigError, ModelError
from course_lib.launching.launch import launch
from course_lib.modeling import checkpoint_files, load_trained, nf4
from course_lib.training import run as runs
from course_lib.training.checkpoints import checkpoint, formats, merging, safetensors_tree, sharded
from tests.fresh_accelerator import forget_accelerator
from tests.narrow_presets import narrowed

OPTIONS = {
    "dataset": "tweets",
    "max_train_samples": 40,
    "max_eval_samples": 16,
    "max_length": 24,
    "model": "tiny-bert",
    "batch_size": 4,
    "max_steps": 6,
    "eval_steps": 2,
    "save_steps": 3,
    "learning_rate": 1e-2,
    "lora_r": 4,
    "lora_dropout": 0.1,
    "baselines": False,
    "progress_bar": False,
    "device": "cpu",
    "mixed_precision": "no",
    "tracker": "none",
    "save_total_limit": None,
    "best_metric": "loss",
}
WAYS = {
    "basic": {"training_type": "basic"},
    "ddp torch": {},
    "fsdp scratch": {"strategy": "fsdp", "engine": "scratch"},
    "zero3 deepspeed": {"strategy": "zero3", "engine": "deepspeed"},
    "4 bits": {"strategy": "fsdp", "engine": "scratch", "load_in_4bit": True},
    "fsdp torch": {"strategy": "fsdp", "engine": "torch"},
    "zero1 torch": {"strategy": "zero1", "engine": "torch"},
}
LONG = ("zero3 deepspeed", "fsdp torch", "zero1 torch")


@pytest.fixture(scope="module", autouse=True)
def one_block():
    with narrowed(num_hidden_layers=1):
        yield


def trained(folder, ways=tuple(WAYS), **more):
    """Summaries of runs in each of some ways, one after the other."""
    summaries = {}
    for way in ways:
        forget_accelerator()
        own = {key: value(way) if callable(value) else value for key, value in more.items()}
        summaries[way] = runs.train(build(OPTIONS | WAYS[way] | {"output_dir": str(folder / way)} | own))
    return summaries


def of_step_three(folder):
    return lambda way: str(folder / way / checkpoint.name(3))


def weights(folder):
    return load_file(folder / "model" / "adapter_model.safetensors")


def same(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", [way if way not in LONG else pytest.param(way, marks=pytest.mark.long) for way in WAYS])
def test_a_run_goes_on_to_the_bit(tmp_path, way):
    ranks = 1 if way == "basic" else 2
    whole, again, other = (tmp_path / name for name in ("whole", "again", "other"))
    launch(trained, whole, [way], num_processes=ranks, timeout=300)
    launch(trained, again, [way], resume_from_checkpoint=of_step_three(whole), num_processes=ranks, timeout=300)
    assert same(weights(whole / way), weights(again / way))
    launch(trained, other, [way], seed=7, num_processes=ranks, timeout=300)
    assert not same(weights(whole / way), weights(other / way))

    names = {name.removeprefix("base_model.model.") for name in weights(whole / way)}
    assert names == {"classifier.weight", "classifier.bias", *(name for name in names if ".lora_" in name)}
    kept = whole / way / checkpoint.name(3)
    in_shards = formats.is_sharded(kept)
    assert in_shards == (way not in ("basic", "ddp torch"))
    stored = sharded.sizes(kept, "model/") if in_shards else safetensors_tree.load(kept / formats.MODEL)
    assert set(stored) == names and set(safetensors_tree.load(whole / way / "best.safetensors")) == names


def state_after(folder, ways, **more):
    """What stands on the main rank when a checkpoint was read and nothing trained."""
    found = {}
    for way in ways:
        forget_accelerator()
        own = {key: value(way) if callable(value) else value for key, value in more.items()}
        (folder / way).mkdir(parents=True, exist_ok=True)
        trainer, _ = runs.build_trainer(build(OPTIONS | WAYS[way] | {"output_dir": str(folder / way)} | own))
        trainer.go_on()
        found[way] = {name: tensor.clone() for name, tensor in trainer.stored.whole_weights().items()}
    return found


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("fsdp scratch", "basic"),
        ("basic", "fsdp scratch"),
        pytest.param("zero3 deepspeed", "fsdp torch", marks=pytest.mark.long),
    ],
)
def test_any_ranks_and_engine_read_what_others_saved(tmp_path, first, second):
    launch(
        trained,
        tmp_path / "first",
        [first],
        batch_size=2,
        max_steps=3,
        num_processes=1 if first == "basic" else 2,
        global_batch_size=4,
        timeout=300,
    )
    kept = tmp_path / "first" / first / checkpoint.name(3)
    ranks = 1 if second == "basic" else 4
    found = launch(
        state_after,
        tmp_path / "second",
        [second],
        batch_size=1,
        max_steps=6,
        global_batch_size=4,
        resume_from_checkpoint=str(kept),
        num_processes=ranks,
        timeout=300,
    )[0][second]
    saved = (
        {name: flat.view(found[name].shape) for name, flat in sharded.whole(kept, "model/").items()}
        if formats.is_sharded(kept)
        else safetensors_tree.load(kept / formats.MODEL)
    )
    assert same(found, saved) and any(tensor.abs().max() > 0 for name, tensor in found.items() if "lora_B" in name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    launch(trained, folder, ["basic"], num_processes=1, timeout=300)
    return folder / "basic"


def test_the_trained_folder_is_one_for_peft_and_for_evaluate(finished):
    summary = json.loads((finished / "summary.json").read_text())
    loaded = load_trained(finished / "model", "classification")
    batch = loaded.tokenizer(["the cat ran home", "what a terrible day"], return_tensors="pt", padding=True)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(finished / "base")
    theirs = peft.PeftModel.from_pretrained(base, finished / "model").eval()
    with torch.no_grad():
        assert torch.allclose(theirs(**batch).logits, loaded.model.eval()(**batch).logits, atol=1e-6)
    assert list(loaded.model.config.id2label.values()) == ["negative", "neutral", "positive"]
    scores = runs.evaluate(
        build(
            {
                "model": str(finished / "model"),
                "max_train_samples": 40,
                "max_eval_samples": 16,
                "max_length": 24,
                "training_type": "basic",
                "device": "cpu",
                "mixed_precision": "no",
            }
        ),
        "test",
    )
    assert scores["loss"] == pytest.approx(summary["eval"]["loss"], abs=1e-6)
    assert "course merge" in (finished / "model/README.md").read_text()


def test_a_folder_with_weights_is_the_base_itself(finished, tmp_path):
    """No second copy of what is somewhere already."""
    options = (
        OPTIONS | WAYS["basic"] | {"model": str(finished / "base"), "output_dir": str(tmp_path / "run"), "max_steps": 2}
    )
    runs.train(build(options))
    about = json.loads((tmp_path / "run/model/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str((finished / "base").resolve())
    assert not (tmp_path / "run/base").exists()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"lora_r": 8}, "saved with lora_r 4, and this run has 8"),
        ({"lora_alpha": 4.0}, "lora_alpha 8.0"),
        ({"load_in_4bit": True}, "load_in_4bit false"),
        ({"lora_r": None, "lora_dropout": 0.0}, "lora_r 4"),
    ],
)
def test_adapters_of_another_kind_are_refused(finished, tmp_path, changed, told):
    options = (
        OPTIONS
        | WAYS["basic"]
        | {"output_dir": str(tmp_path), "resume_from_checkpoint": str(finished / checkpoint.name(3))}
        | changed
    )
    with pytest.raises(CheckpointError, match=told):
        runs.train(build(options))


def test_adapters_for_other_frozen_weights_are_refused(finished, tmp_path):
    """The same name and the same shapes, and one number in a thousand is another."""
    base = tmp_path / "base"
    loaded = load_trained(finished / "base", "classification")
    with torch.no_grad():
        loaded.model.bert.embeddings.word_embeddings.weight[0, 0] += 1e-3
    loaded.model.save_pretrained(base)
    loaded.tokenizer.save_pretrained(base)
    first = (
        OPTIONS | WAYS["basic"] | {"model": str(finished / "base"), "output_dir": str(tmp_path / "one"), "max_steps": 3}
    )
    runs.train(build(first))
    with pytest.raises(CheckpointError, match="adapters for other frozen weights"):
        runs.train(
            build(
                first
                | {
                    "model": str(base),
                    "output_dir": str(tmp_path / "two"),
                    "max_steps": 6,
                    "resume_from_checkpoint": str(tmp_path / "one" / checkpoint.name(3)),
                }
            )
        )


def test_a_base_that_is_gone_is_named(finished, tmp_path):
    folder = tmp_path / "moved"
    folder.mkdir()
    for file in (finished / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    about = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": "/nowhere/base"}))
    with pytest.raises(ModelError, match=r"adapter \(LoRA\) of /nowhere/base, which cannot be had"):
        load_trained(folder, "classification")


def test_names_of_layers_are_none_too_few():
    with pytest.raises(ConfigError, match="has an empty name"):
        build({"lora_r": 8, "lora_targets": "a,,b"})


def test_an_adapter_is_merged_into_a_model_that_transformers_loads(finished, tmp_path, capsys):
    assert cli.main(["merge", str(finished / "model"), "--output", str(tmp_path / "whole")]) == 0
    assert "6 adapters merged" in capsys.readouterr().out
    adapted = load_trained(finished / "model", "classification")
    batch = adapted.tokenizer(["the cat ran home", "what a terrible day"], return_tensors="pt", padding=True)
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole").eval()
    base = transformers.AutoModelForSequenceClassification.from_pretrained(finished / "base").eval()
    assert set(whole.state_dict()) == set(base.state_dict())
    with torch.no_grad():
        wanted = adapted.model.eval()(**batch).logits
        assert torch.allclose(whole(**batch).logits, wanted, atol=2e-6)
        assert (base(**batch).logits - wanted).abs().max() > 1e-2
    assert "LABEL_0" not in whole.config.label2id
    checkpoint_files.check(tmp_path / "whole")


def test_beside_four_bits_what_was_trained_is_what_is_merged(tmp_path):
    launch(
        trained, tmp_path, ["4 bits"], training_type="basic", strategy="ddp", engine=None, num_processes=1, timeout=300
    )
    folder = tmp_path / "4 bits/model"
    adapted = load_trained(folder, "classification")
    assert any(isinstance(module, nf4.Nf4Linear) for module in adapted.model.modules())
    found = merging.merge_folder(folder, tmp_path / "whole")
    assert found.difference < 1e-5 and found.layers == 6
    summary = json.loads((tmp_path / "4 bits/summary.json").read_text())
    data = {
        "max_train_samples": 40,
        "max_eval_samples": 16,
        "max_length": 24,
        "training_type": "basic",
        "device": "cpu",
        "mixed_precision": "no",
    }
    for path in (folder, tmp_path / "whole"):
        scores = runs.evaluate(build(data | {"model": str(path)}), "test")
        assert scores["loss"] == pytest.approx(summary["eval"]["loss"], abs=1e-5), path


def test_what_cannot_be_merged_is_refused_in_a_line_and_leaves_nothing(finished, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    cases = [
        (finished / "base", "whole", "holds no adapter"),
        (tmp_path / "nothing", "whole", "is no folder"),
        (finished / "model", "taken", "is there already"),
    ]
    for folder, output, told in cases:
        assert cli.main(["merge", str(folder), "--output", str(tmp_path / output)]) != 0
        said = capsys.readouterr().err
        assert told in said and len(said.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]
    assert (tmp_path / "taken/file").read_text() == "mine"
