"""Runs with adapters: what their files hold, that they go on to the bit, and that a trained folder is one for PEFT."""

import json
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from course_lib import cli
from course_lib.config import build
from course_lib.errors import CheckpointError, ConfigError, ModelError
from course_lib.modeling import checkpoint_files, load_trained, nf4
from course_lib.training import run as runs
from course_lib.training.checkpoints import checkpoint, formats, merging, safetensors_tree, sharded
from tests.fresh_accelerator import forget_accelerator
from tests.long_cases import some
from tests.narrow_presets import narrowed
from tests.training import quick

DATA = quick.QUICK | {"max_train_samples": 40, "max_eval_samples": 16, "max_length": 24}
OPTIONS = DATA | {
    "model": "tiny-bert",
    "max_steps": 6,
    "eval_steps": 2,
    "save_steps": 3,
    "save_total_limit": None,
    "learning_rate": 1e-2,
    "lora_r": 4,
    "lora_dropout": 0.1,
    "keep_best": True,
    "best_metric": "loss",
}
BASIC = OPTIONS | {"training_type": "basic"}
WAYS = {
    "basic": {"training_type": "basic"},
    "ddp torch": {},
    "fsdp scratch": {"strategy": "fsdp", "engine": "scratch"},
    "zero3 deepspeed": {"strategy": "zero3", "engine": "deepspeed"},
    "4 bits": {"strategy": "fsdp", "engine": "scratch", "load_in_4bit": True},
    "fsdp torch": {"strategy": "fsdp", "engine": "torch"},
    "zero1 torch": {"strategy": "zero1", "engine": "torch"},
}


@pytest.fixture(scope="module", autouse=True)
def one_block():
    with narrowed(num_hidden_layers=1):
        yield


def trained(folder, way, **more):
    forget_accelerator()
    runs.train(build(OPTIONS | WAYS[way] | {"output_dir": str(folder)} | more))


def weights(folder):
    return load_file(folder / "model" / "adapter_model.safetensors")


@pytest.mark.parametrize("way", some(WAYS, "basic", "ddp torch", "fsdp scratch", "4 bits"))
def test_a_run_goes_on_to_the_bit(tmp_path, ranks, way):
    train, whole = ranks(1 if way == "basic" else 2, timeout=300), tmp_path / "whole"
    train(trained, whole, way)
    kept = whole / checkpoint.name(3)
    train(trained, tmp_path / "again", way, resume_from_checkpoint=str(kept))
    torch.testing.assert_close(weights(tmp_path / "again"), weights(whole), rtol=0, atol=0)
    train(trained, tmp_path / "other", way, seed=7)
    other = weights(tmp_path / "other")
    assert not all(torch.equal(other[name], weight) for name, weight in weights(whole).items())

    names = {name.removeprefix("base_model.model.") for name in weights(whole)}
    assert {name for name in names if ".lora_" not in name} == {"classifier.weight", "classifier.bias"}
    assert formats.is_sharded(kept) == (way not in ("basic", "ddp torch"))
    sharded_names = sharded.sizes(kept, "model/") if formats.is_sharded(kept) else None
    assert set(sharded_names or safetensors_tree.load(kept / formats.MODEL)) == names
    assert set(safetensors_tree.load(whole / "best.safetensors")) == names


def state_after(folder, way, **more):
    """What stands on the main rank when a checkpoint was read and nothing trained."""
    folder.mkdir(exist_ok=True)
    trainer, _ = runs.build_trainer(build(OPTIONS | WAYS[way] | {"output_dir": str(folder)} | more))
    trainer.go_on()
    return {name: tensor.clone() for name, tensor in trainer.stored.whole_weights().items()}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("fsdp scratch", "basic"),
        ("basic", "fsdp scratch"),
        pytest.param("zero3 deepspeed", "fsdp torch", marks=pytest.mark.long),
    ],
)
def test_any_ranks_and_engine_read_what_others_saved(tmp_path, ranks, first, second):
    batch = {"batch_size": 2, "global_batch_size": 4, "max_steps": 3}
    ranks(1 if first == "basic" else 2, timeout=300)(trained, tmp_path / "first", first, **batch)
    kept = tmp_path / "first" / checkpoint.name(3)
    more = batch | {"batch_size": 1, "max_steps": 6, "resume_from_checkpoint": str(kept)}
    on = ranks(1 if second == "basic" else 4, timeout=300)
    found = on(state_after, tmp_path / "second", second, **more)[0]
    if formats.is_sharded(kept):
        saved = {name: flat.view(found[name].shape) for name, flat in sharded.whole(kept, "model/").items()}
    else:
        saved = safetensors_tree.load(kept / formats.MODEL)
    torch.testing.assert_close(found, saved, rtol=0, atol=0)
    assert any(tensor.abs().max() > 0 for name, tensor in found.items() if "lora_B" in name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp("run")
    ranks(1, timeout=300)(trained, folder, "basic")
    return folder


def loss_of(folder):
    return runs.evaluate(build(DATA | {"model": str(folder), "training_type": "basic"}), "test")["loss"]


def loss_at_the_end(run):
    return json.loads((run / "summary.json").read_text())["eval"]["loss"]


def logits_of(model, tokenizer):
    batch = tokenizer(["the cat ran home", "what a terrible day"], return_tensors="pt", padding=True)
    with torch.no_grad():
        return model.eval()(**batch).logits


def test_the_trained_folder_is_one_for_peft_and_for_evaluate(finished):
    loaded = load_trained(finished / "model", "classification")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(finished / "base")
    theirs = logits_of(peft.PeftModel.from_pretrained(base, finished / "model"), loaded.tokenizer)
    torch.testing.assert_close(logits_of(loaded.model, loaded.tokenizer), theirs, rtol=1e-5, atol=1e-6)
    assert list(loaded.model.config.id2label.values()) == ["negative", "neutral", "positive"]
    assert loss_of(finished / "model") == pytest.approx(loss_at_the_end(finished), abs=1e-6)
    assert "course merge" in (finished / "model/README.md").read_text()


def test_a_folder_with_weights_is_the_base_itself(finished, tmp_path):
    """No second copy of what is somewhere already."""
    runs.train(build(BASIC | {"model": str(finished / "base"), "output_dir": str(tmp_path / "run"), "max_steps": 2}))
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
    asked = {"output_dir": str(tmp_path), "resume_from_checkpoint": str(finished / checkpoint.name(3))}
    with pytest.raises(CheckpointError, match=told):
        runs.train(build(BASIC | asked | changed))


def test_adapters_for_other_frozen_weights_are_refused(finished, tmp_path):
    """The same name and the same shapes, and one number in a thousand is another."""
    base = tmp_path / "base"
    loaded = load_trained(finished / "base", "classification")
    with torch.no_grad():
        loaded.model.bert.embeddings.word_embeddings.weight[0, 0] += 1e-3
    loaded.model.save_pretrained(base)
    loaded.tokenizer.save_pretrained(base)
    first = BASIC | {"model": str(finished / "base"), "output_dir": str(tmp_path / "one"), "max_steps": 3}
    runs.train(build(first))
    kept = str(tmp_path / "one" / checkpoint.name(3))
    again = {"model": str(base), "output_dir": str(tmp_path / "two"), "max_steps": 6, "resume_from_checkpoint": kept}
    with pytest.raises(CheckpointError, match="adapters for other frozen weights"):
        runs.train(build(first | again))


def test_a_base_that_is_gone_is_named(finished, tmp_path):
    folder = shutil.copytree(finished / "model", tmp_path / "moved")
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
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(finished / "base")
    assert set(whole.state_dict()) == set(base.state_dict())
    wanted = logits_of(adapted.model, adapted.tokenizer)
    torch.testing.assert_close(logits_of(whole, adapted.tokenizer), wanted, rtol=1e-5, atol=2e-6)
    assert (logits_of(base, adapted.tokenizer) - wanted).abs().max() > 1e-2
    assert "LABEL_0" not in whole.config.label2id
    checkpoint_files.check(tmp_path / "whole")


def test_beside_four_bits_what_was_trained_is_what_is_merged(tmp_path, ranks):
    run, whole = tmp_path / "run", tmp_path / "whole"
    ranks(1, timeout=300)(trained, run, "basic", load_in_4bit=True)
    adapted = load_trained(run / "model", "classification")
    assert any(isinstance(module, nf4.Nf4Linear) for module in adapted.model.modules())
    found = merging.merge_folder(run / "model", whole)
    assert found.difference < 1e-5 and found.layers == 6
    for folder in (run / "model", whole):
        assert loss_of(folder) == pytest.approx(loss_at_the_end(run), abs=1e-5), folder


@pytest.mark.parametrize(
    ("folder", "output", "told"),
    [
        ("base", "whole", "holds no adapter"),
        ("nothing", "whole", "is no folder"),
        ("model", "taken", "is there already"),
    ],
)
def test_what_cannot_be_merged_is_refused_in_a_line_and_leaves_nothing(
    finished, tmp_path, capsys, folder, output, told
):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    assert cli.main(["merge", str(finished / folder), "--output", str(tmp_path / output)]) != 0
    said = capsys.readouterr().err
    assert told in said and len(said.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken/file").read_text() == "mine"
