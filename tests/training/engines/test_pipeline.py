"""The pipeline trainer on real ranks gives what the plain loop gives, and its checkpoints serve every other run."""

import json
from collections import Counter
from unittest import mock

import pytest
import torch.distributed as dist
from transformers import pipeline as make_pipeline

from course_lib import modeling
from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.lessons import parity
from course_lib.metering.meter import Meter
from course_lib.training.engines import pipeline
from course_lib.training.run import build_trainer, train
from tests.long_cases import some
from tests.torch_versions import STAGES_ON_ONE_RANK, has
from tests.training.engines.layouts import agree, alone, apart, evaluations, goes_on, on, saved

ROWS = parity.GLOBAL_ROWS // 2
COMMON = {
    "eval_steps": 3,
    "max_eval_samples": 7,
    "eval_batch_size": 2,
    "max_steps": 4,
    "save_steps": 3,
    "save_total_limit": None,
}
ONE_PIPELINE = {"training_type": "pipeline", "batch_size": ROWS, "pipeline_chunks": 4}
TWO_BY_TWO = {"training_type": "pipeline", "batch_size": ROWS // 2, "pipeline_chunks": 2, "data_parallel_size": 2}
TWO = {
    "zbv": {"schedule": "zbv"},
    "torch's runtime": {"schedule": "zbv" if has(STAGES_ON_ONE_RANK) else "interleaved", "engine": "torch"},
    "split by name": {"schedule": "1f1b", "split_spec": "transformer.h.0:end"},
    "naive weights": {"schedule": "1f1b", "loss_weighting": "micro_batch"},
    "in bf16": {"schedule": "1f1b", "mixed_precision": "bf16"},
}
LONG = {
    "1f1b": {"schedule": "1f1b"},
    "gpipe": {"schedule": "gpipe", "activation_checkpointing": True},
    "interleaved": {"schedule": "interleaved"},
    "zb_h1": {"schedule": "zb_h1"},
    "fitted": {"schedule": "zb_auto"},
    "fitted V": {"schedule": "v_half"},
}
"""In `make long`."""
FOUR = {
    "2x2": {"schedule": "1f1b"},
    "2x2 zero1": {"schedule": "zbv", "strategy": "zero1", "bucket_mb": 0.1},
    "2x2 fsdp": {"schedule": "zb_h1", "strategy": "fsdp"},
    "2x2 fsdp in bf16": {"strategy": "fsdp", "mixed_precision": "bf16"},
}


@pytest.fixture(scope="module")
def plain(folder):
    options = {"basic": {}, "naive": {"loss_weighting": "micro_batch"}, "bf16": {"mixed_precision": "bf16"}}
    return {name: alone(folder / name, **COMMON, **given) for name, given in options.items()}


@pytest.fixture(scope="module")
def two(folder, plain):
    return on(2, folder, {name: ONE_PIPELINE | options for name, options in TWO.items()}, **COMMON)


@pytest.fixture(scope="module")
def four(folder, plain):
    return on(4, folder, {name: TWO_BY_TWO | options for name, options in FOUR.items()}, **COMMON)


def trained_alike(folder, found, name, plain, wanted="basic"):
    agree(found[name], plain[wanted])
    assert found[name].norms == pytest.approx(plain[wanted].norms, rel=5e-5)
    assert evaluations(folder, name) == pytest.approx(evaluations(folder, wanted), abs=parity.LOSS_TOLERANCE)


def trained_alike_in_bf16(folder, found, name, plain):
    cell = apart(found[name], plain["bf16"])
    assert cell.loss <= 2e-2 and cell.weight < 2e-3, cell
    assert found[name].norms == pytest.approx(plain["bf16"].norms, rel=5e-2)
    assert evaluations(folder, name) == pytest.approx(evaluations(folder, "bf16"), abs=2e-2)
    assert apart(found[name], plain["basic"]).loss > 1e-5


@pytest.mark.parametrize("name", ["zbv", "torch's runtime", "split by name"])
def test_one_pipeline_trains_like_the_plain_loop(folder, two, plain, name):
    trained_alike(folder, two, name, plain)


@pytest.mark.long
def test_one_pipeline_of_another_schedule_does_too(folder, plain):
    found = on(2, folder, {name: ONE_PIPELINE | options for name, options in LONG.items()}, **COMMON)
    for name in LONG:
        trained_alike(folder, found, name, plain)


def test_naive_weights_and_low_precision_are_those_of_the_plain_loop(folder, two, plain):
    trained_alike(folder, two, "naive weights", plain, "naive")
    assert apart(two["naive weights"], plain["basic"]).loss > 1e-5
    trained_alike_in_bf16(folder, two, "in bf16", plain)


@pytest.mark.parametrize("name", ["2x2", "2x2 zero1", "2x2 fsdp"])
def test_two_pipelines_of_two_ranks_train_like_the_plain_loop(folder, four, plain, name):
    trained_alike(folder, four, name, plain)


def test_two_pipelines_that_fully_shard_splits_compute_in_bf16_too(folder, four, plain):
    trained_alike_in_bf16(folder, four, "2x2 fsdp in bf16", plain)


@pytest.mark.long
def test_two_pipelines_sum_their_gradients_in_buckets_too(folder, plain):
    cases = {"in buckets": TWO_BY_TWO | {"schedule": "gpipe", "bucket_mb": 0.1}}
    trained_alike(folder, on(4, folder, cases, **COMMON), "in buckets", plain)


@pytest.mark.parametrize(
    ("left_out", "options"),
    [("sum_shared_gradients", {}), ("average_gradients", {}), ("sum_shared_gradients", {"strategy": "fsdp"})],
)
def test_without_an_exchange_it_differs(tmp_path, plain, left_out, options):
    with mock.patch.object(pipeline, left_out, lambda *_: None):
        found = on(4, tmp_path, {"x": TWO_BY_TWO | options}, **COMMON)["x"]
    assert apart(found, plain["basic"]).weight > 100 * parity.WEIGHT_TOLERANCE


def calls_among_copies(folder, strategy, chunks):
    """Collectives of each step among the ranks that hold the same stages, by kind; and this rank's blocks."""
    options = {"strategy": strategy, "pipeline_chunks": chunks, "gradient_accumulation_steps": 1, "batch_size": 4}
    trainer = build_trainer(parity.task(folder, 1, **TWO_BY_TWO | {"max_steps": 3} | options))[0]
    step, steps = trainer.train_step, []
    copies = dist.get_process_group_ranks(trainer.ranks.groups.dp)

    def metered(micro_batches):
        with Meter(trainer.model, trainer.optimizer) as meter:
            done = step(micro_batches)
        steps.append(Counter(call.name for call in meter.collectives if list(call.ranks) == copies))
        return done

    trainer.train_step = metered
    trainer.train()
    return steps, len(trainer.engine.blocks())


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_stage_is_gathered_and_reduced_once_a_batch_not_with_each_micro_batch(tmp_path, ranks, chunks):
    steps, blocks = ranks(4)(calls_among_copies, tmp_path, "fsdp", chunks)[0]
    units = blocks + 1  # and what is around the blocks
    # In the first step torch's runtime learns the shapes of messages, by one forward more.
    assert [(moved["all_gather"], moved["reduce_scatter"]) for moved in steps[1:]] == [(units, units)] * 2 and blocks


def test_gradients_are_summed_over_the_copies_once_a_batch_not_with_each_micro_batch(tmp_path, ranks):
    few, many = (ranks(4)(calls_among_copies, tmp_path, "ddp", chunks)[0][0] for chunks in (2, 4))
    assert few == many and len(few) == 3 and all(moved["all_reduce"] for moved in few)


def names_held(folder, **options):
    """Names and sizes of the parameters that this rank has."""
    trainer = build_trainer(parity.task(folder, 1, **ONE_PIPELINE, **options))[0]
    return {name: parameter.numel() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("options", [TWO["split by name"], TWO["zbv"]], ids=["split by name", "zbv"])
def test_a_rank_holds_its_own_stages_alone(tmp_path, ranks, plain, options):
    weights = plain["basic"].weights
    whole = sum(weight.numel() for weight in weights.values()) - weights["transformer.wte.weight"].numel()  # tied
    first, second = ranks(2)(names_held, tmp_path, **options)
    assert 0 < sum(first.values()) < whole and 0 < sum(second.values()) < whole
    if "split_spec" in options:
        assert not first.keys() & second.keys()  # a block is on one rank; the tied head has another name on the second
        assert any("transformer.h.0." in name for name in first) and any("transformer.h.3." in name for name in second)


def refused(folder, options, told):
    with pytest.raises(ConfigError, match=told):
        build_trainer(parity.task(folder, 1, **ONE_PIPELINE | options))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data_parallel_size": 3}, "pipelines of .* and there are 2: choose data_parallel_size"),
        (
            {"split_spec": "transformer.h.0:end,transformer.h.1:end"},
            "split_spec makes 3 stages, and 1f1b has 2 on 2 ranks: name 1 places",
        ),
        (
            {"schedule": "zbv", "strategy": "fsdp"},
            "schedule zbv puts the stages that share model.transformer.wte.weight on one rank",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(tmp_path, ranks, options, told):
    ranks(2)(refused, tmp_path, options, told)


RESUMED = {  # saved by, resumed by
    "zbv to 4": ("zbv", 4, TWO_BY_TWO | {"schedule": "1f1b"}),
    "zero1 to 2": ("2x2 zero1", 2, ONE_PIPELINE | {"schedule": "zb_h1"}),
    "split to zero1": ("split by name", 4, TWO_BY_TWO | {"schedule": "zbv", "strategy": "zero1"}),
    "zero1 to plain fsdp": ("2x2 zero1", 2, {"strategy": "fsdp", "engine": "scratch"}),
    "plain to split": ("basic", 2, ONE_PIPELINE | {"split_spec": "transformer.h.2:beginning"}),
    "fsdp to zbv": ("2x2 fsdp", 2, ONE_PIPELINE | {"schedule": "zbv"}),
    "zero1 to fsdp": ("2x2 zero1", 4, TWO_BY_TWO | {"strategy": "fsdp"}),
}


@pytest.mark.parametrize("name", some(RESUMED, "zero1 to plain fsdp", "fsdp to zbv", "zero1 to fsdp"))
def test_resumed_with_another_split_or_strategy(folder, tmp_path, two, four, plain, name):
    saved_by, ranks, options = RESUMED[name]
    onwards = options | {"resume_from_checkpoint": saved(folder, saved_by, 3)}
    goes_on(on(ranks, tmp_path, {"x": onwards}, **COMMON)["x"], plain["basic"], 3)


@pytest.mark.parametrize("saved_by", ["zbv", "2x2 zero1", "2x2 fsdp"])
def test_resumed_by_the_plain_loop(folder, tmp_path, two, four, plain, saved_by):
    goes_on(alone(tmp_path, **COMMON, resume_from_checkpoint=saved(folder, saved_by, 3)), plain["basic"], 3)


def classify(folder):
    options = {
        "training_type": "pipeline",
        "schedule": "interleaved",
        "pipeline_chunks": 4,
        "batch_size": 16,
        "model": "tiny-bert",
        "max_train_samples": 96,
        "max_eval_samples": 37,
        "max_length": 32,
        "max_steps": 6,
        "progress_bar": False,
        "baselines": False,
        "device": "cpu",
        "save_steps": 0,
        "output_dir": str(folder),
    }
    return train(build(options))


def test_the_run_ends_with_one_model_that_anyone_loads(tmp_path, ranks):
    found = ranks(2)(classify, tmp_path)[0]
    said = found["pipeline"]
    assert (said["schedule"], said["stages"], said["pipeline_chunks"]) == ("interleaved", 4, 4)
    assert len(said["split"]) == 5 and 0 < said["predicted_bubble"] < 0.5
    assert found["world_size"] == 2 == len(found["memory"]["peak_bytes"]) and found["train"]["global_batch_size"] == 16
    assert found["eval"]["rows"] == 37 and found["engine"] == "scratch"
    assert json.loads((tmp_path / "summary.json").read_text())["pipeline"] == said
    answers = make_pipeline("text-classification", model=str(tmp_path / "model"))(["good", "bad"])
    assert {answer["label"] for answer in answers} <= {"negative", "neutral", "positive"} and len(answers) == 2
    model = modeling.load_trained(tmp_path / "model", "classification").model
    assert not any(parameter.is_meta for parameter in model.parameters())
