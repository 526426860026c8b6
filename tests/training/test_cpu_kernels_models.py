"""Models train by fast kernels as by torch's: every architecture of transformers that `course train` takes."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from course_lib.config import build as config_of
from course_lib.modeling import presets
from course_lib.training import cpu_kernels
from course_lib.training.run import build_trainer, evaluate
from testing import tiny_architectures
from testing.tiny_architectures import batch
from tests.long_cases import some
from tests.training import kernel_sweep, quick

pytestmark = pytest.mark.usefixtures("torchs_own")
WHOSE = {
    ("fast", "classification"): ["albert", "bart", "bert", "roberta"],
    ("fast", "masked_lm"): ["camembert", "distilbert", "electra", "modernbert"],
    ("fast", "causal_lm"): ["gpt2", "gpt_neox", "llama", "opt", "qwen2", "xlm-roberta"],
    ("torch's: ", "classification"): ["mt5", "t5", "umt5"],
    ("torch's: ", "causal_lm"): ["mistral"],
    ("the model's own", "classification"): ["deberta"],
    ("the model's own", "masked_lm"): ["roformer"],
    ("the model's own", "causal_lm"): ["bloom", "falcon", "gemma2", "gpt_oss", "xlnet"],
}
"""Whose attention runs: what hands over a position bias, sinks, a cap or a window has torch's; some have their own."""


@pytest.mark.parametrize(
    ("whose", "task", "architecture"), [(*case, name) for case, names in WHOSE.items() for name in names]
)
def test_a_model_computes_what_it_computed(whose, task, architecture):
    row = kernel_sweep.compared(CONFIG_MAPPING[architecture], task)
    assert row.equal and row.attention.startswith(whose), row


def test_an_attention_that_drops_the_position_bias_is_noticed(monkeypatch):
    torchs = cpu_kernels.sdpa_attention_forward

    def forgetful(module, *given, **others):
        if hasattr(module, "fast_attention"):
            del others["position_bias"]
        return torchs(module, *given, **others)

    monkeypatch.setattr(cpu_kernels, "sdpa_attention_forward", forgetful)
    row = kernel_sweep.compared(CONFIG_MAPPING["t5"], "classification")
    assert not row.equal and not row.evaluation and not row.training


def test_fast_models_drop():
    model = tiny_architectures.build(CONFIG_MAPPING["bert"], "classification")
    cpu_kernels.use_fast_kernels(model)
    kernel_sweep.set_dropout(model, 0.5)
    assert not torch.allclose(*(model.train()(**batch()).logits for _ in range(2)))


def biases_of(model):
    return [each for name, each in model.named_parameters() if "relative_attention_bias" in name]


@pytest.mark.parametrize("architecture", some(["t5", "mt5", "umt5"], "t5"))
def test_the_trained_model_is_what_transformers_loads(tmp_path, monkeypatch, architecture):
    """Its scores too: a position bias that training left out would be in the weights and count elsewhere."""
    tokenizer = presets.build("tiny-bert", ["the cat sat on the mat"], 64)[1]
    model = tiny_architectures.build(
        CONFIG_MAPPING[architecture], "classification", eos_token_id=tokenizer.sep_token_id, vocab_size=len(tokenizer)
    )
    for each in biases_of(model):
        nn.init.normal_(each, std=5.0)
    model.save_pretrained(tmp_path / "begun")
    tokenizer.save_pretrained(tmp_path / "begun")
    options = {"training_type": "basic", "cpu_kernels": "fast", "max_steps": 6, "batch_size": 8, "learning_rate": 3e-3}
    options |= {"model": str(tmp_path / "begun"), "max_eval_samples": 32, "output_dir": str(tmp_path / "run")}
    config = config_of(quick.QUICK | options)
    config.output_dir.mkdir()
    trainer, _ = build_trainer(config)
    trainer.train()
    assert trainer.cpu_kernels == "fast" and [m for m in trainer.model.modules() if type(m) is cpu_kernels.Dropout16]
    scores = trainer.evaluate("validation")
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    monkeypatch.setattr(cpu_kernels, "keep_freed_memory", lambda: pytest.fail("an evaluation sets malloc"))

    def scored(folder):
        """Loss and accuracy of the trained model as it is loaded anew, by torch's kernels."""
        trainer.model.save_pretrained(folder)
        trainer.tokenizer.save_pretrained(folder)
        found = evaluate(config.replace(model=str(folder), training_type="accelerated"), "validation")
        return found["loss"], found["accuracy"]

    assert scored(tmp_path / "saved") == (scores["loss"], scores["accuracy"]), "to the bit"
    for each in biases_of(trainer.model):
        nn.init.zeros_(each)
    assert abs(scored(tmp_path / "without")[0] - scores["loss"]) > 1e-3, "without the bias it is another model"


@pytest.mark.parametrize(
    ("options", "fast"), [({}, False), ({"cpu_kernels": "torch"}, False), ({"cpu_kernels": "fast"}, True)]
)
def test_the_plain_loop_replaces_nothing_unless_asked(tmp_path, monkeypatch, options, fast):
    called = []
    monkeypatch.setattr(cpu_kernels, "keep_freed_memory", lambda: called.append(True))
    own = {"model": "tiny-bert", "training_type": "basic", "max_train_samples": 8, "output_dir": str(tmp_path)}
    config = config_of(quick.QUICK | own | options)
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
