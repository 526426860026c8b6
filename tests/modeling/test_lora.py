"""LoRA's layers: what they compute, what is trained, and the same numbers in PEFT, there and back."""

import json

import peft
import pytest
import torch
import transformers

from course_lib.errors import ModelError
from course_lib.modeling import lora, lora_files
from tests.long_cases import some
from tests.modeling.test_loading import TEXTS, load, save

CASES = [
    ("tiny-bert", "classification"),
    ("tiny-gpt2", "classification"),
    ("tiny-gpt2", "causal_lm"),
    ("tiny-llama", "causal_lm"),
    ("tiny-bert", "masked_lm"),
    ("tiny-llama", "classification"),
]


def batch_of(loaded):
    return loaded.tokenizer(TEXTS[:2], return_tensors="pt", padding=True)


def trained_a_little(model, batch):
    """Adapters, and a head, that are not as they were drawn; without dropout, and far from diverging."""
    model.eval()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(3):
        model(**batch).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def logits(model, batch):
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.mark.parametrize("case", some(CASES, *CASES[:3]), ids="-".join)
def test_adapters_begin_at_the_base_model_train_alone_and_merge(case):
    name, task = case
    loaded = load(name, task)
    model, batch = loaded.model, batch_of(loaded)
    before, frozen = logits(model, batch), {name: p.clone() for name, p in model.named_parameters()}
    wrapped = lora.add_lora(model, 4, seed=1)
    assert torch.equal(logits(model, batch), before), "B is zero"
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    heads = lora.classifier_heads(model)
    assert bool(heads) == (task == "classification")
    assert {name.partition(".")[0] for name in trained if "lora_" not in name} == set(heads)
    assert len([name for name in trained if "lora_" in name]) == 2 * len(wrapped)
    kinds = {"tiny-bert": 6, "tiny-gpt2": 4, "tiny-llama": 7}
    assert len(wrapped) == kinds[name] * model.config.num_hidden_layers, "all linear layers of the blocks"

    trained_a_little(model, batch)
    after = logits(model, batch)
    assert (after - before).abs().max() > 1e-3
    now = {name.replace(".base.", "."): p for name, p in model.named_parameters() if name not in trained}
    assert all(torch.equal(p, frozen[name]) for name, p in now.items())
    lora.merge(model)
    assert set(dict(model.named_parameters())) == set(frozen) and not lora.adapted(model)
    assert torch.allclose(logits(model, batch), after, rtol=1e-4, atol=1e-5)


def test_the_draw_is_by_seed_and_scaled_by_alpha_over_r():
    drawn = []
    for seed in (1, 1, 2):
        torch.rand(seed)  # the global stream has no part in it
        model = load("tiny-bert", "classification").model
        lora.add_lora(model, 4, alpha=6, seed=seed)
        drawn.append(torch.cat([layer.lora_A.weight.flatten() for layer in lora.adapted(model).values()]))
        layer = next(iter(lora.adapted(model).values()))
        assert layer.scaling == 1.5 and layer.lora_A.weight.abs().max() <= layer.lora_A.in_features**-0.5
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("case", some(CASES, *CASES[:3]), ids="-".join)
def test_peft_loads_what_we_save(case, tmp_path):
    name, task = case
    loaded = load(name, task)
    base, batch = save(loaded, tmp_path / "base"), batch_of(loaded)
    lora.add_lora(loaded.model, 4, dropout=0.1)
    expected = logits(trained_a_little(loaded.model, batch), batch)
    (tmp_path / "adapter").mkdir()
    lora_files.save_adapter(loaded.model, tmp_path / "adapter", str(base))
    again = load(base, task).model
    assert (logits(again, batch) - expected).abs().max() > 1e-3
    theirs = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    assert torch.allclose(logits(theirs, batch), expected, rtol=1e-4, atol=1e-6)
    ours = load(base, task).model
    lora_files.load_adapter(ours, tmp_path / "adapter")
    assert torch.equal(logits(ours, batch), expected)
    assert set(lora.trained_names(ours)) == set(lora.trained_names(loaded.model))


@pytest.mark.parametrize(
    ("name", "task", "more"),
    [
        ("tiny-bert", "classification", {}),
        ("tiny-gpt2", "causal_lm", {"use_rslora": True}),
        pytest.param("tiny-llama", "causal_lm", {}, marks=pytest.mark.long),
    ],
)
def test_what_peft_saves_we_load(name, task, more, tmp_path):
    loaded = load(name, task)
    base, batch = save(loaded, tmp_path / "base"), batch_of(loaded)
    kind = "SEQ_CLS" if task == "classification" else "CAUSAL_LM"
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", task_type=kind, fan_in_fan_out=name == "tiny-gpt2", **more
    )
    theirs = trained_a_little(peft.get_peft_model(loaded.model, config), batch)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load(base, task).model
    lora_files.load_adapter(ours, tmp_path / "adapter")
    assert torch.allclose(logits(ours, batch), logits(theirs, batch), rtol=1e-4, atol=1e-6)


def test_ends_of_names_choose_layers():
    model = load("tiny-gpt2", "causal_lm").model
    names = lora.add_lora(model, 2, targets=["c_attn", "mlp.c_proj"])
    assert all(name.endswith(("attn.c_attn", "mlp.c_proj")) for name in names)
    assert len(names) == 2 * model.config.num_hidden_layers
    with pytest.raises(ModelError, match="no module is called `q_proj`.*c_attn, c_fc, c_proj"):
        lora.add_lora(load("tiny-gpt2", "causal_lm").model, 2, targets=["c_attn", "q_proj"])
    with pytest.raises(ModelError, match="ln_1` is a LayerNorm, and no linear layer"):
        lora.add_lora(load("tiny-gpt2", "causal_lm").model, 2, targets=["ln_1"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"peft_type": "IA3"}, "kind IA3, and LORA is read"),
        ({"use_dora": True}, "DoRA, which is not read"),
        ({"bias": "all"}, "trained biases"),
        ({"rank_pattern": {"query": 2}}, "ranks by layer"),
        ({"peft_type": None}, "kind None"),
        (None, "holds no adapter"),
    ],
)
def test_other_adapters_are_refused(change, told, tmp_path):
    loaded = load("tiny-bert", "classification")
    base = save(loaded, tmp_path / "base")
    lora.add_lora(loaded.model, 2)
    lora_files.save_adapter(loaded.model, tmp_path, str(base))
    file = tmp_path / "adapter_config.json"
    file.write_text("" if change is None else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=told):
        lora_files.load_adapter(load(base, "classification").model, tmp_path)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    loaded = load("tiny-bert", "classification")
    lora.add_lora(loaded.model, 2)
    lora_files.save_adapter(loaded.model, tmp_path, "base")
    with pytest.raises(ModelError, match="adapter of another model"):
        lora_files.load_adapter(load("tiny-gpt2", "classification").model, tmp_path)
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=6, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(ModelError, match=r"is \(2, 192\) in the adapter and \(2, 32\) in the model"):
        lora_files.load_adapter(transformers.BertForSequenceClassification(config), tmp_path)
