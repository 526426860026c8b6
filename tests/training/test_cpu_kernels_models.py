"""Models train by fast kernels as by torch's: every architecture of transformers that `course train` takes."""

import copy
import gc

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForSequenceClassification
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from course_lib.config import build as config_of
from course_lib.modeling import presets
from course_lib.modeling.loading import HEADS
from course_lib.training import cpu_kernels
from course_lib.training.run import build_trainer
from tests.modeling import tiny_architectures
from tests.modeling.tiny_architectures import batch


@pytest.fixture(autouse=True)
def torchs_own(monkeypatch):
    """Each test begins with transformers' attention, and leaves it and malloc so."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    monkeypatch.setattr(cpu_kernels, "keep_freed_memory", lambda: None)


@pytest.fixture
def calls(monkeypatch):
    """Of the fast attention's dropout."""
    found, real = [], cpu_kernels._dropped
    monkeypatch.setattr(cpu_kernels, "_dropped", lambda *given: found.append(given[1]) or real(*given))
    return found


def set_dropout(model, p):
    """Everywhere where a model may have it: its dropout modules, and the numbers that its functions read."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, p)


def computed(model, training):
    """Logits of the tokens that are there and, in training, the gradient of their mean square."""
    torch.manual_seed(1)
    model.train(training).zero_grad()
    given = batch()
    with torch.set_grad_enabled(training):
        logits = model(**given).logits
    if logits.shape[:2] == given["input_ids"].shape:
        logits = logits[given["attention_mask"].bool()]
    if not training:
        return logits, torch.zeros(1)
    logits.float().square().mean().backward()
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return logits.detach(), torch.cat([each.flatten().float() for each in gradients])


def compare(model):
    """Assert that fast kernels compute what torch's do."""
    ours = copy.deepcopy(model)
    cpu_kernels.use_fast_kernels(ours)
    wanted, got = computed(model, False)[0], computed(ours, False)[0]
    assert torch.isfinite(wanted).all() and torch.equal(got, wanted), "in evaluation, to the bit"
    for each in (model, ours):
        set_dropout(each, 0.0)
    wanted, got = computed(model, True), computed(ours, True)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1]), "without dropout, to the bit"
    set_dropout(ours, 1e-6)  # drops nothing, and takes the way with dropout
    got = computed(ours, True)
    assert torch.allclose(got[0], wanted[0], atol=1e-5)
    assert (got[1] - wanted[1]).norm() <= 1e-5 * wanted[1].norm() + 1e-8


# Whether the fast attention is taken: a position bias, sinks, a cap or a window are torch's, and some have their own.
SOME = {("bert", "classification"): True, ("distilbert", "masked_lm"): True, ("gpt2", "causal_lm"): True,
        ("llama", "causal_lm"): True, ("qwen2", "causal_lm"): True, ("bart", "classification"): True,
        ("t5", "classification"): False, ("mt5", "classification"): False, ("umt5", "classification"): False,
        ("gemma2", "causal_lm"): False, ("mistral", "causal_lm"): False, ("gpt_oss", "causal_lm"): False,
        ("roformer", "masked_lm"): False, ("xlnet", "causal_lm"): False, ("deberta", "classification"): False,
        ("falcon", "causal_lm"): False}


@pytest.mark.parametrize(("architecture", "task"), SOME)
def test_a_model_computes_what_it_computed(calls, architecture, task):
    compare(tiny_architectures.build(CONFIG_MAPPING[architecture], task))
    assert bool(calls) == SOME[architecture, task]
    assert len(SOME) == 16


def test_fast_models_drop():
    model = tiny_architectures.build(CONFIG_MAPPING["bert"], "classification")
    cpu_kernels.use_fast_kernels(model)
    set_dropout(model, 0.5)
    assert not torch.allclose(*(model.train()(**batch()).logits for _ in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["t5", "mt5", "umt5"])
def test_the_trained_model_is_what_transformers_loads(tmp_path, architecture):
    """Its scores too: a position bias that training left out would be in the weights and count elsewhere."""
    tokenizer = presets.build("tiny-bert", ["the cat sat on the mat"], 64)[1]
    model = tiny_architectures.build(CONFIG_MAPPING[architecture], "classification",
                                     eos_token_id=tokenizer.sep_token_id, vocab_size=len(tokenizer))
    biases = [each for name, each in model.named_parameters() if "relative_attention_bias" in name]
    for each in biases:
        nn.init.normal_(each, std=5.0)
    model.save_pretrained(tmp_path / "begun")
    tokenizer.save_pretrained(tmp_path / "begun")
    config = config_of({
        "model": str(tmp_path / "begun"), "training_type": "basic", "cpu_kernels": "fast", "device": "cpu",
        "mixed_precision": "no", "max_train_samples": 32, "max_eval_samples": 32, "max_length": 24, "max_steps": 6,
        "batch_size": 8, "learning_rate": 3e-3, "eval_steps": 0, "save_steps": 0, "keep_best": False,
        "progress_bar": False, "output_dir": str(tmp_path / "run")})
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
    for name, each in plain.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.zeros_(each)
    assert biases and abs(scored()[0] - scores["loss"]) > 1e-3, "without the bias it is another model"


@pytest.mark.slow
@pytest.mark.parametrize(("options", "fast"), [({}, False), ({"cpu_kernels": "torch"}, False),
                                               ({"cpu_kernels": "fast"}, True)])
def test_the_plain_loop_replaces_nothing_unless_asked(tmp_path, monkeypatch, options, fast):
    called = []
    monkeypatch.setattr(cpu_kernels, "keep_freed_memory", lambda: called.append(True))
    config = config_of({"model": "tiny-bert", "training_type": "basic", "device": "cpu", "max_train_samples": 8,
                        "max_eval_samples": 8, "max_length": 16, "output_dir": str(tmp_path)} | options)
    trainer, _ = build_trainer(config)
    modules = list(trainer.model.modules())
    assert trainer.cpu_kernels == ("fast" if fast else "torch") and bool(called) == fast
    assert {type(each) for each in modules if isinstance(each, nn.Dropout)} == {
        cpu_kernels.Dropout16 if fast else nn.Dropout}
    assert all(hasattr(each, "fast_attention") == fast for each in modules)
    assert (AttentionInterface._global_mapping["sdpa"] is sdpa_attention_forward) != fast


# Config classes that cannot be made small by their fields' names, or whose models need a package that is not there.
LEFT_OUT = {
    "BltConfig": "its patches' hashes are 500000 rows", "CohereCompassTextConfig": "its default names no RoPE",
    "DbrxConfig": "its default is refused by its model", "Dots3NoteConfig": "its fields name 40 layers one by one",
    "Gemma3nConfig": "needs timm", "Gemma3nTextConfig": "shares keys among 35 layers",
    "Gemma4AssistantConfig": "its default is refused by itself",
    "Gemma4UnifiedAssistantConfig": "shares keys among its layers", "LayoutLMv2Config": "needs detectron2",
    "Mistral4Config": "its width of a head is given by three fields",
    "MusicgenConfig": "made of three models' configs", "MusicgenMelodyConfig": "made of three models' configs",
    "ZambaConfig": "its fields name 76 layers one by one", "Zamba2Config": "its fields name 54 layers one by one",
}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("task", "equal", "fast"), [
    ("classification", 0, 0), ("causal_lm", 0, 0), ("masked_lm", 0, 0)])
def test_every_architecture_that_course_train_takes(calls, task, equal, fast):
    classes = {each.__name__: each for each, _ in HEADS[task][1].items()}
    found, left_out, differ = [], set(), {}
    for name, each in classes.items():
        try:
            model = tiny_architectures.build(each, task)
            computed(model, True)
        except Exception:
            left_out.add(name)
            continue
        calls.clear()
        try:
            compare(model)
            found.append(bool(calls))
        except Exception as error:
            differ[name] = f"{type(error).__name__}: {error}"[:200]
        gc.collect()
    assert not differ
    assert left_out == set(classes) & set(LEFT_OUT) and len(LEFT_OUT) == 14
    assert (len(found), sum(found)) == (equal, fast)
