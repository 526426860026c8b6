"""Models of transformers on engines, built small for `course audit`."""

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import audit_families, audit_releases
from course_lib.audit import Layout, audit
from course_lib.errors import ConfigError, ModelError
from course_lib.parallel.ddp import DataParallel
from course_lib.training.audited_models import ModelOnEngine, chosen_layouts, config_of
from tests.forked_process import run_course

QWEN = "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("engine", "layouts"),
    [
        ("scratch", [Layout(shard=2), Layout(dp=2, tp=2)]),
        ("accelerate", [Layout(shard=2)]),
        pytest.param("transformers", [Layout(tp=2)], marks=pytest.mark.long),
        pytest.param("torch", [Layout(dp=3), Layout(dp=2, shard=2)], marks=pytest.mark.long),
        pytest.param("deepspeed", [Layout(dp=2), Layout(shard=2)], marks=pytest.mark.long),
    ],
)
def test_no_alarm_over_an_engine(engine, layouts):
    audited = audit(ModelOnEngine(QWEN, engine), layouts, timeout=240)
    assert [verdict.layout for verdict in audited.verdicts] == layouts
    for verdict in audited.verdicts:
        assert len(verdict.gradients) == 24 and verdict.clean, verdict.wrong or verdict.weights


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(tp=2), Layout(shard=2, ep=2)],
        pytest.param(chosen_layouts("transformers", "auto", 4), marks=pytest.mark.long),
    ],
    ids=["two", "all"],
)
def test_no_alarm_over_a_mixture_by_transformers(layouts):
    audited = audit(ModelOnEngine("olmoe", "transformers"), layouts, timeout=240)
    assert [verdict.layout for verdict in audited.verdicts] == layouts and audited.clean
    assert all(len(verdict.gradients) == 25 for verdict in audited.verdicts)


@pytest.mark.long
def test_the_release_whose_router_was_not_summed_is_named_in_its_first_sentence():
    """From the package index, unmodified."""
    told = audit_releases.audited(audit_releases.RELEASES[0], "--ranks", "2")
    of = {tuple(verdict["layout"]): verdict for verdict in told["verdicts"]}
    assert set(of) == {("tp",), ("ep",), ("shard",)} and of["tp",]["clean"] and of["shard",]["clean"]
    assert of["ep",]["told"][0] == (
        "`model.layers.0.mlp.gate.weight`, `model.layers.1.mlp.gate.weight`: each rank of ep has its own part; summed "
        "over ep they are the reference: that reduction is missing"
    )
    assert told["refused"] == {"dp2": "transformers 5.16.0 has no dp_replicate_size"} and not told["failed"]


def test_what_an_engine_lacks_leaves_its_other_layouts():
    audited = audit(ModelOnEngine("olmoe", "scratch"), [Layout(dp=2), Layout(tp=2)])
    assert audited.clean and audited.refused == {Layout(tp=2): "there is no tensor-parallel plan for olmoe"}


def test_a_divisor_that_an_engine_lacks_is_named(monkeypatch):
    """In our data parallelism, of a model with tied weights."""
    into_view = DataParallel._into_view
    monkeypatch.setattr(
        DataParallel, "_into_view", staticmethod(lambda parameter, view, scale=1.0: into_view(parameter, view))
    )
    (verdict,) = audit(ModelOnEngine(QWEN, "scratch"), [Layout(dp=2)]).verdicts
    assert [(f.kind, round(f.factor, 3), f.axes) for f in verdict.wrong] == [("factor", 2.0, ("dp",))] * 24
    assert verdict.losses_agree


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma2", "olmoe"])
def test_no_alarm_over_transformers_families(family):
    """Of the table in benchmarks/audit-families.md two."""
    assert not [row for row in audit_families.rows(family) if row[-1]]


@pytest.mark.long
def test_half_precision_has_a_tolerance_of_its_own():
    audited = audit(ModelOnEngine(QWEN, "torch", dtype=torch.bfloat16), [Layout(dp=2), Layout(shard=2)])
    assert audited.clean and 0.06 < audited.verdicts[0].within < 0.07


def test_a_config_keeps_its_choices_and_becomes_small(tmp_path):
    qwen = ModelOnEngine(QWEN, "torch").loaded()
    assert qwen.config.tie_word_embeddings and qwen.config.num_hidden_layers == 2 and qwen.config.hidden_size == 32
    assert sum(parameter.numel() for parameter in qwen.parameters()) < 50_000
    LlamaConfig(attention_bias=True, attention_dropout=0.1, num_hidden_layers=7).save_pretrained(tmp_path)
    llama = ModelOnEngine(str(tmp_path), "torch").loaded()
    assert llama.config.attention_bias and llama.config.attention_dropout == 0 and llama.config.num_hidden_layers == 2


def test_layouts_of_engines_and_what_they_refuse():
    chosen = "dp2, shard2, ep2, tp2, dp2 × shard2, dp2 × ep2, dp2 × tp2, shard2 × ep2, shard2 × tp2, ep2 × tp2"
    assert {str(layout) for layout in chosen_layouts("transformers", "auto", 4)} == set(chosen.split(", "))
    assert Layout(dp=2, tp=3) in chosen_layouts("scratch", "all", 6)
    audited = audit(ModelOnEngine(QWEN, "transformers"), [Layout(ep=2), Layout(tp=3), Layout(cp=2)])
    assert list(audited.refused.values()) == [
        "transformers has no plan for experts of this model",
        "4 heads cannot be shared by 3 tensor ranks",
        "transformers has no cp here",
    ]
    with pytest.raises(ConfigError, match="unknown engine 'x': use transformers, scratch, torch"):
        ModelOnEngine(QWEN, "x")
    with pytest.raises(ModelError, match="no model nobody is known: give a folder"):
        config_of("nobody")
    with pytest.raises(ModelError, match="vit is not for causal language modelling"):
        ModelOnEngine("vit", "torch")


def test_the_command():
    done = run_course("audit", "--model", QWEN, "--engine", "accelerate")
    assert done.returncode == 0 and done.stdout.count("24 of 24") == 2, done.stderr
    for arguments, said in (
        (["--model", QWEN, "--axes", "dp"], "--axes beside --model: an engine has its own"),
        (["--model", "nobody"], "no model nobody is known"),
        ([], "nothing to audit: give FILE.py"),
        (["x.py:make", "--engine", "torch"], "--engine beside x.py:make: give a file, or a model"),
    ):
        done = run_course("audit", *arguments)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.strip().splitlines()) == 1
