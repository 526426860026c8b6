"""Models train by fast kernels as by torch's: every architecture of transformers that `course train` takes."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForSequenceClassification
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from course_lib.config import build as config_of
from course_lib.modeling import presets
from course_lib.training import cpu_kernels
from course_lib.training.run import build_trainer, evaluate
from testing import tiny_architectures
from testing.tiny_architectures import batch
from tests.training import kernel_sweep


@pytest.fixture(autouse=True)
def torchs_own(monkeypatch):
    """Each test begins with transformers' attention, and leaves it and malloc so."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    monkeypatch.setattr(cpu_kernels, "keep_freed_memory", lambda: None)


# Whose attention runs: what hands over a position bias, sinks, a cap or a window has torch's; some have their own.
FAST = [
    ("albert", "classification"),
    ("bart", "classification"),
    ("bert", "classification"),
    ("camembert", "masked_lm"),
    ("distilbert", "masked_lm"),
    ("electra", "masked_lm"),
    ("gpt2", "causal_lm"),
    ("gpt_neox", "causal_lm"),
    ("llama", "causal_lm"),
    ("modernbert", "masked_lm"),
    ("opt", "causal_lm"),
    ("qwen2", "causal_lm"),
    ("roberta", "classification"),
    ("xlm-roberta", "causal_lm"),
]
TORCHS = [("mistral", "causal_lm"), ("mt5", "classification"), ("t5", "classification"), ("umt5", "classification")]
OWN = [
    ("bloom", "causal_lm"),
    ("deberta", "classification"),
    ("falcon", "causal_lm"),
    ("gemma2", "causal_lm"),
    ("gpt_oss", "causal_lm"),
    ("roformer", "masked_lm"),
    ("xlnet", "causal_lm"),
]


@pytest.mark.parametrize(("architecture", "task"), FAST + TORCHS + OWN)
def test_a_model_computes_what_it_computed(architecture, task):
    row = kernel_sweep.compared(CONFIG_MAPPING[architecture], task)
    assert row.equal, row
    case = (architecture, task)
    whose = "fast" if case in FAST else "torch's: " if case in TORCHS else "the model's own"
    assert row.attention.startswith(whose), row
    assert len(FAST + TORCHS + OWN) == 25


@pytest.mark.parametrize("architecture", ["t5", "mt5", "umt5"])
def test_an_attention_that_drops_the_position_bias_is_noticed(monkeypatch, architecture):
    torchs = cpu_kernels.sdpa_attention_forward

    def forgetful(module, *given, **others):
        if hasattr(module, "fast_attention"):
            del others["position_bias"]
        return torchs(module, *given, **others)

    monkeypatch.setattr(cpu_kernels, "sdpa_attention_forward", forgetful)
    row = kernel_sweep.compared(CONFIG_MAPPING[architecture], "classification")
    assert not row.equal and not row.evaluation and not row.training


def test_fast_models_drop():
    model = tiny_architectures.build(CONFIG_MAPPING["bert"], "classification")
    cpu_kernels.use_fast_kernels(model)
    kernel_sweep.set_dropout(model, 0.5)
    assert not torch.allclose(*(model.train()(**batch()).logits for _ in range(2)))


@pytest.mark.parametrize("architecture", ["t5", "mt5", "umt5"])
def test_the_trained_model_is_what_transformers_loads(tmp_path, monkeypatch, architecture):
    """Its scores too: a position bias that training left out would be in the weights and count elsewhere."""
    tokenizer = presets.build("tiny-bert", ["the cat sat on the mat"], 64)[1]
    model = tiny_architectures.build(
        CONFIG_MAPPING[architecture], "classification", eos_token_id=tokenizer.sep_token_id, vocab_size=len(tokenizer)
    )
    biases = [each for name, each in model.named_parameters() if "relative_attention_bias" in name]
    for each in biases:
        nn.init.normal_(each, std=5.0)
    model.save_pretrained(tmp_path / "begun")
    tokenizer.save_pretrained(tmp_path / "begun")
    config = config_of(
        {
            "model": str(tmp_path / "begun"),
            "training_type": "basic",
            "cpu_kernels": "fast",
            "device": "cpu",
            "mixed_precision": "no",
            "max_train_samples": 32,
            "max_eval_samples": 32,
            "max_length": 24,
            "max_steps": 6,
            "batch_size": 8,
            "learning_rate": 3e-3,
            "eval_steps": 0,
            "save_steps": 0,
            "keep_best": False,
            "progress_bar": False,
            "output_dir": str(tmp_path / "run"),
        }
    )
    config.output_dir.mkdir()
    trainer, _ = build_trainer(config)
    trainer.train()
    assert trainer.cpu_kernels == "fast" and [m for m in trainer.model.modules() if type(m) is cpu_kernels.Dropout16]
    scores = trainer.evaluate("validation")
    trainer.model.save_pretrained(tmp_path / "saved")
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()

    def scored():
        """Loss and accuracy by nothing but transformers."""
        losses, right = [], []
        for given in trainer.eval_loaders["validation"]:
            with torch.no_grad():
                logits = plain(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
            losses.append(nn.functional.cross_entropy(logits, given["labels"], reduction="none"))
            right.append(logits.argmax(-1) == given["labels"])
        return torch.cat(losses).mean().item(), torch.cat(right).float().mean().item()

    assert scored() == pytest.approx((scores["loss"], scores["accuracy"]), abs=1e-6)
    monkeypatch.setattr(cpu_kernels, "keep_freed_memory", lambda: pytest.fail("an evaluation sets malloc"))
    trainer.tokenizer.save_pretrained(tmp_path / "saved")
    asked = {"model": str(tmp_path / "saved"), "training_type": "accelerated", "cpu_kernels": "fast"}
    again = evaluate(config.replace(**asked), "validation")
    assert (again["loss"], again["accuracy"]) == (scores["loss"], scores["accuracy"]), "by torch's kernels, to the bit"
    for name, each in plain.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.zeros_(each)
    assert biases and abs(scored()[0] - scores["loss"]) > 1e-3, "without the bias it is another model"


@pytest.mark.parametrize(
    ("options", "fast"), [({}, False), ({"cpu_kernels": "torch"}, False), ({"cpu_kernels": "fast"}, True)]
)
def test_the_plain_loop_replaces_nothing_unless_asked(tmp_path, monkeypatch, options, fast):
    called = []
    monkeypatch.setattr(cpu_kernels, "keep_freed_memory", lambda: called.append(True))
    config = config_of(
        {
            "model": "tiny-bert",
            "training_type": "basic",
            "device": "cpu",
            "max_train_samples": 8,
            "max_eval_samples": 8,
            "max_length": 16,
            "output_dir": str(tmp_path),
        }
        | options
    )
    trainer, _ = build_trainer(config)
    modules = list(trainer.model.modules())
    assert trainer.cpu_kernels == ("fast" if fast else "torch") and bool(called) == fast
    assert {type(each) for each in modules if isinstance(each, nn.Dropout)} == {
        cpu_kernels.Dropout16 if fast else nn.Dropout
    }
    assert all(hasattr(each, "fast_attention") == fast for each in modules)
    assert (AttentionInterface._global_mapping["sdpa"] is sdpa_attention_forward) != fast


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "built", "fast"), [("classification", 125, 71), ("causal_lm", 180, 119), ("masked_lm", 51, 25)]
)
def test_every_architecture_that_course_train_takes(task, built, fast):
    rows = list(kernel_sweep.sweep(task))
    there = [row for row in rows if not row.left_out]
    assert not [row for row in there if not row.equal]
    assert {row.name for row in rows if row.left_out} == set(kernel_sweep.classes(task)) & set(kernel_sweep.LEFT_OUT)
    assert (len(there), sum(row.attention.startswith("fast") for row in there)) == (built, fast)
    table = (Path(__file__).parents[2] / "benchmarks" / "cpu-kernels.md").read_text()
    section = table.partition(f"## {task}\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\w+Config) \|", section, re.M) == sorted(row.name for row in there), "of today"
