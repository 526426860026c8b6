"""The planner's parameter counts: those of the models that transformers builds, and of what was published."""

import huggingface_hub
import pytest
from transformers import AutoConfig

from course_lib.errors import ModelError
from course_lib.planning import models
from tests.planning.model_cases import built_parameters, published
from tools import counted


@pytest.mark.parametrize("nth", [4, pytest.param(1, marks=pytest.mark.long)], ids="one of {}".format)
def test_a_bundled_model_counts_what_transformers_builds(nth):
    assert len(models.bundled()) == len(models.names()) == 69
    for name, fields in list(models.bundled().items())[::nth]:
        settings = {key: value for key, value in fields.items() if key not in ("also", "model_type")}
        config = AutoConfig.for_model(fields["model_type"], **settings)
        for head in (True, False):
            expected = built_parameters(config, head)
            assert models.load(name, head).parameters == expected, (name, head)
            assert models.from_config(config.to_dict(), name, head) == models.load(name, head), (name, head)


@pytest.mark.long
def test_the_table_of_bundled_models_is_what_is_counted():
    assert counted.TABLE.read_text(encoding="utf-8") == counted.table()


VARIANTS = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2, "head_dim": 24},
    {"model_type": "llama", "tie_word_embeddings": True},
    {"model_type": "gpt2", "n_inner": 100, "tie_word_embeddings": False},
    {"model_type": "gpt_neox", "attention_bias": False},
    {"model_type": "falcon", "multi_query": False, "bias": True, "parallel_attn": False},
    {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    {"model_type": "opt", "enable_bias": False, "layer_norm_elementwise_affine": False, "word_embed_proj_dim": 32},
    {"model_type": "t5", "feed_forward_proj": "gated-gelu", "num_decoder_layers": 5},
    {"model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 40, "num_key_value_heads": 2},
    {"model_type": "mixtral", "num_local_experts": 3, "num_key_value_heads": 2},
    {"model_type": "olmoe", "num_experts": 6, "num_key_value_heads": 2},
]
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 500}


@pytest.mark.parametrize(
    "settings",
    [*VARIANTS, *({"model_type": family} for family in sorted({*models.families(), "olmoe"}))],
    ids=lambda given: "-".join(map(str, given.values())),
)
def test_settings_of_each_architecture(settings):
    family = settings["model_type"]
    sizes = dict(SMALL)
    if family not in ("bloom", "distilbert", "falcon", "opt", "t5"):  # whose MLP's width has another name
        sizes["intermediate_size"] = 96
    if family == "phi3":
        sizes |= {"pad_token_id": 0, "eos_token_id": 1}
    if family == "opt":
        sizes |= {"ffn_dim": 96, "word_embed_proj_dim": 64}
    config = AutoConfig.for_model(**{**sizes, **settings})
    for head in (True, False):
        expected = built_parameters(config, head)
        assert models.from_config(config.to_dict(), head=head).parameters == expected
        written = {**config.to_diff_dict(), "model_type": family}  # what a config.json holds
        assert models.from_config(written, head=head).parameters == expected


COUNTS = {row["id"].removeprefix("params-"): row["value"] for row in published("param_count")}
NAMES = {f"bigscience-{name}": name for name in ("bloom", "bloom-560m", "bloom-3b")} | {"OLMo-2-1124-13B": "olmo-2-13b"}


@pytest.mark.parametrize("row", COUNTS)
def test_every_published_parameter_count(row):
    """Names of rows and bundled models agree except for case and publisher."""
    name, value = NAMES.get(row, row), COUNTS[row]
    assert len(COUNTS) == 20
    if name == "distilbert-base-uncased":
        assert models.load(name, head=False).parameters == value["params_encoder_only"]
        assert models.load(name).parameters == value["safetensors_metadata_total"]
    else:
        assert models.load(name, head="bert" not in name).parameters == value["params"]


def test_model_flops_as_megatron_counts_them():
    """Without recomputation: 72 B s l h^2 (1 + s/6h + V/12lh), arXiv 2205.05198 appendix A."""
    h, layers, vocab, s = 12288, 96, 51200, 2048
    model = models.from_config(
        {"model_type": "gpt2", "n_embd": h, "n_layer": layers, "n_head": 96, "vocab_size": vocab, "n_positions": s}
    )
    assert model.flops(s) == pytest.approx(72 * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h)), 1e-12)


def test_a_folder_a_file_and_any_spelling(tmp_path):
    AutoConfig.for_model("gpt2", n_layer=3).save_pretrained(tmp_path / "mine")
    assert models.load(tmp_path / "mine").name == "mine"
    assert models.load(str(tmp_path / "mine" / "config.json")).layers == 3
    assert models.load("OPT-6.7B") == models.load("facebook/opt-6.7b")
    assert models.load("gpt2").name == "openai-community/gpt2"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("facebok/opt-6.7b", "facebook/opt-6.7b"),
        ("gpt-2", "gpt2"),
        ({"model_type": "lama"}, "llama"),
        ({"n_embd": 3}, "no `model_type`"),
        ({"model_type": "gpt2", "n_layer": -1}, "no nn.ModuleList of like blocks"),
        ({"model_type": "gpt2", "n_embd": 100, "n_head": 3}, "must be divisible by num_heads"),
        ({"model_type": "llama", "hidden_size": "many"}, "hidden_size"),
        ({"model_type": "vit"}, "no attribute 'vocab_size'"),
    ],
    ids=str,
)
def test_mistakes_are_named(asked, says, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=says):
        models.load(asked)


def test_a_hub_out_of_reach_is_noticed_at_once_and_not_by_the_clients_retries(monkeypatch):
    asked = []
    monkeypatch.setattr("course_lib.system.hub_reachable.problem", lambda: "no network")
    real = huggingface_hub.hf_hub_download
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *args, **options: asked.append(options) or real(*args, **options)
    )
    with pytest.raises(ModelError, match=r"cannot be reached \(no network\): did you mean `facebook/opt-6.7b`"):
        models.load("facebook/opt-6.9b")
    assert asked == [{"local_files_only": True}]


def test_a_file_that_is_no_config(tmp_path):
    for text, says in (("{", "not JSON"), ("[]", "no JSON object")):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match=says):
            models.load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no readable config\.json"):
        models.load(tmp_path)
