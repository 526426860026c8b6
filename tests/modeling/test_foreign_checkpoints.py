"""Checkpoints that others wrote are loaded right, or refused in a line that names what they are and what to do."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from course_lib import cli
from course_lib.cloud import hub
from course_lib.errors import ModelError
from course_lib.modeling import model_sources
from course_lib.modeling.loading import load_trained
from tests.modeling.test_loading import load, save

WEIGHTS = "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 90868376\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of saved models by preset: a classifier, and a language model whose head is tied."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: save(load(name, task), folder / name)
        for name, task in (("tiny-bert", "classification"), ("tiny-gpt2", "causal_lm"))
    }


@pytest.fixture
def copy(models, tmp_path):
    """A copy of a model's folder, its weights renamed."""

    def call(name, rename=lambda key: key, change=lambda key, tensor: tensor):
        folder = shutil.copytree(models[name], tmp_path / "copy", dirs_exist_ok=True)
        weights = {rename(key): change(key, tensor) for key, tensor in load_file(folder / WEIGHTS).items()}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        return folder

    return call


# --- names ---


def test_names_that_are_none_of_the_model_s_are_told(copy):
    folder = copy("tiny-gpt2", lambda key: f"other{key}")
    with pytest.raises(ModelError, match=r"first transformer\.h\.0.* the file has names such as othertransformer"):
        load(folder)


# --- values ---


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_weights_that_are_no_finite_numbers(copy, value):
    def spoil(key, tensor):
        if key.endswith("word_embeddings.weight"):
            tensor[3] = float(value)
        return tensor

    folder = copy("tiny-bert", change=spoil)
    width = load_file(folder / WEIGHTS)["bert.embeddings.word_embeddings.weight"].shape[1]
    for how in (load, lambda folder: load_trained(folder, "classification"), lambda folder: hub.push(folder, "x")):
        with pytest.raises(
            Exception, match=f"hold {width} values that are no finite numbers in bert.embeddings.word_emb"
        ):
            how(folder)


def test_a_first_step_that_fails_is_not_blamed_on_the_rate(copy, tmp_path, capsys):
    """Finite weights, whose squares are not."""
    folder = copy("tiny-bert", change=lambda key, tensor: tensor * (1e38 if "word_embeddings" in key else 1))
    options = {"model": folder, "output_dir": tmp_path / "run", "max_steps": 3, "batch_size": 4, "max_length": 32}
    options |= {"max_train_samples": 60, "max_eval_samples": 30, "tracker": "none", "baselines": "false"}
    words = ["train", "--overwrite_output_dir", *(f"--{name}={value}" for name, value in options.items())]
    for warm in ((), ("--warmup_steps=2",)):
        assert cli.main([*words, *warm]) == 1
        said = capsys.readouterr().err
        assert "at step 1; no update has changed the weights" in said and "lower --learning_rate" not in said


# --- files ---


def _config(folder, **changed):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def _adapter(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "bert-base-uncased", "peft_type": "LORA"}')
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")


def _adapter_alone(folder):
    _adapter(folder)
    (folder / "config.json").unlink()


def _no_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def _shards(folder, index):
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)


def _state(folder, name):
    (folder / WEIGHTS).unlink()
    (folder / name).mkdir()


def _cut(folder, size):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])


def _cut_pickle(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    (folder / WEIGHTS).unlink()


INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
NO_WEIGHTS = "neither model.safetensors nor shards with their index"
KINDS = {
    "adapter beside weights": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "an adapter beside model.safetensors",
    ),
    "bitsandbytes": (
        lambda f: _config(f, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "quantized .*bitsandbytes of 4 bits.*dequantize",
    ),
    "gptq": (lambda f: _config(f, quantization_config={"quant_method": "gptq", "bits": 4}), "gptq of 4 bits"),
    "fp8": (lambda f: _config(f, quantization_config={"quant_method": "fp8"}), "quantization_config: fp8"),
    "pointer": (lambda f: (f / WEIGHTS).write_text(POINTER), "model.safetensors in .* pointer of Git LFS.*lfs pull"),
    "pointer of a tokenizer": (lambda f: (f / "tokenizer.json").write_text(POINTER), "tokenizer.json in .* Git LFS"),
    "empty": (lambda f: _cut(f, 0), "damaged or cut short .*header too small"),
    "cut": (lambda f: _cut(f, -100), "damaged or cut short .*incomplete metadata"),
    "cut in its header": (lambda f: _cut(f, 50), "damaged or cut short .*header"),
    "a page of a web server": (
        lambda f: (f / WEIGHTS).write_text("<!DOCTYPE html><title>404</title>"),
        "damaged or cut short .*header too large",
    ),
    "gguf": (lambda f: (f / WEIGHTS).rename(f / "model.Q4_K_M.gguf"), f"{NO_WEIGHTS}.*GGUF"),
    "pickle of its own": (lambda f: (f / WEIGHTS).rename(f / "best.pt"), f"{NO_WEIGHTS}.*pickle"),
    "shard missing": (lambda f: _shards(f, INDEX), "names model-00002-of-00002.safetensors.*1 of 2 shards are missing"),
    "index cut": (lambda f: _shards(f, INDEX[:20]), "is no index of shards"),
    "no index": (lambda f: (f / WEIGHTS).rename(f / "model-00001-of-00002.safetensors"), NO_WEIGHTS),
    "DeepSpeed": (lambda f: _state(f, "global_step500"), f"{NO_WEIGHTS}.*zero_to_fp32.py"),
    "FSDP": (lambda f: _state(f, "pytorch_model_fsdp_0"), f"{NO_WEIGHTS}.*accelerate merge-weights"),
    "config without a type": (lambda f: (f / "config.json").write_text("{}"), "it has no model_type"),
    "config that is no JSON": (lambda f: (f / "config.json").write_text("model_type: bert"), "it is no JSON"),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]"), "it has no model_type"),
}
READ_ALONE = {
    "weights of another size": (
        lambda f: _config(f, intermediate_size=100),
        "do not fit its config.json: .* of another shape",
    ),
    "a layer too few": (lambda f: _config(f, num_hidden_layers=5), "do not fit its config.json"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "unknown architecture": (lambda f: _config(f, model_type="perceptron"), "config.json cannot be used .*perceptron"),
    "code of its own": (
        lambda f: _config(f, model_type="own", auto_map={"AutoConfig": "own.Config"}),
        "config.json cannot be used",
    ),
    "no tokenizer": (_no_tokenizer, "the tokenizer cannot be loaded|has no tokenizer"),
    "tokenizer cut": (lambda f: (f / "tokenizer.json").write_text('{"version"'), "the tokenizer cannot be loaded"),
    "adapter": (_adapter, "an adapter .* of bert-base-uncased.*(course merge .* --output OUT|cannot be had)"),
    "adapter without config": (_adapter_alone, "an adapter .* of bert-base-uncased.*(course merge|cannot be had)"),
    "pickle cut": (_cut_pickle, "the weights of .* cannot be loaded"),
}
"""Those above are not sent to the Hub either; a sender does not look for these, or may send them."""


@pytest.mark.parametrize("kind", KINDS | READ_ALONE)
def test_what_a_folder_is(copy, kind):
    spoil, told = (KINDS | READ_ALONE)[kind]
    folder = copy("tiny-bert")
    spoil(folder)
    hows = [load, lambda folder: load_trained(folder, "classification")]
    if kind in KINDS:
        hows.append(lambda folder: hub.push(folder, "x"))
    for how in hows:
        with pytest.raises(Exception, match=told) as caught:
            how(folder)
        assert "\n" not in str(caught.value) and caught.type in (ModelError, hub.HubError)


def test_a_pickle_alone_is_read(models, copy):
    folder = copy("tiny-bert")
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    expected = load(models["tiny-bert"]).model.state_dict()
    torch.testing.assert_close(load(folder).model.state_dict(), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("run", "is a run's folder: give the model in it, .*run/model"),
        ("run/checkpoint-000004", "is a checkpoint of a run.* give the run's trained model, .*run/model"),
        ("run/model/model.safetensors", "is a file: give the folder"),
    ],
)
def test_folders_and_files_of_our_own(models, tmp_path, name, told):
    shutil.copytree(models["tiny-bert"], tmp_path / "run/model")
    (tmp_path / "run/checkpoint-000004").mkdir()
    for file in ("manifest.json", "state.json", WEIGHTS):
        (tmp_path / "run/checkpoint-000004" / file).write_text("{}")
    for how in (load, lambda folder: load_trained(folder, "classification")):
        with pytest.raises(ModelError, match=told):
            how(tmp_path / name)


def test_an_adapter_on_the_hub_is_named(monkeypatch, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    monkeypatch.setattr(model_sources, "hf_hub_download", lambda name, file, **_: str(tmp_path / file))
    with pytest.raises(ModelError, match="org/adapter is an adapter .* of org/base"):
        model_sources._refuse_adapter("org/adapter", {})
