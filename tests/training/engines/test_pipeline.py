"""The pipeline trainer on real ranks gives what the plain loop gives, and its checkpoints serve every other run."""

import json
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from course_lib import modeling
from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.lessons import parity
from course_lib.metering.meter import Meter
from course_lib.training.callbacks import Callback
from course_lib.training.checkpoints import checkpoint
from course_lib.training.engines import pipeline
from course_lib.training.run import build_trainer, train
from tests.fresh_accelerator import forget_accelerator
from tests.long_cases import some
from tests.torch_versions import STAGES_ON_ONE_RANK, has

ROWS = parity.GLOBAL_ROWS // 2
STEPS = 4
COMMON = {
    "eval_steps": 3,
    "max_eval_samples": 7,
    "eval_batch_size": 2,
    "max_steps": STEPS,
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
    "bf16": {"schedule": "1f1b", "mixed_precision": "bf16"},
}
MORE = {
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
    "2x2 fsdp bf16": {"strategy": "fsdp", "mixed_precision": "bf16"},
}


class Keep(Callback):
    """All that is logged."""

    def __init__(self):
        self.lines = []

    def on_log(self, trainer, values):
        self.lines.append(values)


def traced(config):
    """Losses, gradient norms, evaluations and final weights of a run, and what this rank holds."""
    forget_accelerator()
    config.output_dir.mkdir(parents=True, exist_ok=True)
    kept = Keep()
    lines = kept.lines
    trainer = build_trainer(config, [kept])[0]
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer.train()
    weights = {name: tensor.detach().clone() for name, tensor in trainer.stored.whole_weights().items()}
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "norms": [line["gradient_norm"] for line in lines if "loss" in line],
        "evaluations": [line["eval.loss"] for line in lines if "eval.loss" in line],
        "weights": weights,
        "parameters": [(name, p.numel()) for name, p in trainer.model.named_parameters()],
        "all": sum(weight.numel() for weight in weights.values()),
    }


def run(folder, options):
    return {
        name: traced(parity.task(folder / name.replace(" ", "-"), 1, **COMMON | each)) for name, each in options.items()
    }


def without(folder):
    """What happens without the sum over a tied weight's copies, and without the sum over the pipelines."""
    with mock.patch.object(pipeline, "sum_shared_gradients", lambda *_: None):
        untied = run(folder / "untied", {"x": TWO_BY_TWO})["x"]
    with mock.patch.object(pipeline, "average_gradients", lambda *_: None):
        apart = run(folder / "apart", {"x": TWO_BY_TWO})["x"]
    sharded = TWO_BY_TWO | {"strategy": "fsdp"}
    with mock.patch.object(pipeline, "sum_shared_gradients", lambda *_: None):
        untied_shards = run(folder / "untied-shards", {"x": sharded})["x"]
    return {"untied": untied, "apart": apart, "untied shards": untied_shards}


def calls_among_copies(folder, options):
    """Collectives of each step among the ranks that hold the same stages, by kind."""
    forget_accelerator()
    config = parity.task(folder, 1, **TWO_BY_TWO | {"max_steps": 3, "eval_steps": 0} | options)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(config)[0]
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


def calls(folder, strategy):
    options = {"strategy": strategy, "gradient_accumulation_steps": 1, "batch_size": 4}
    return {
        chunks: calls_among_copies(folder / f"calls-{strategy}-{chunks}", options | {"pipeline_chunks": chunks})
        for chunks in (2, 4)
    }


def refusals(folder):
    asked = {
        "sizes": {"data_parallel_size": 3},
        "stages": {"split_spec": "transformer.h.0:end,transformer.h.1:end"},
        "place": {"split_spec": "transformer.h.9:end"},
        "spec": {"split_spec": "transformer.h.0"},
        "chunks": {"schedule": "dualpipev", "pipeline_chunks": 2},
        "fitted": {"schedule": "zbv_auto", "pipeline_chunks": 2},
        "two roots": {"schedule": "zbv", "strategy": "fsdp"},
    }
    found = {}
    for name, options in asked.items():
        AcceleratorState._reset_state()
        with pytest.raises(ConfigError) as error:
            build_trainer(parity.task(folder / name, 1, **ONE_PIPELINE | options))
        found[name] = str(error.value)
    return found


@pytest.fixture(scope="module")
def plain(folder):
    return run(
        folder / "plain",
        {
            "basic": {"training_type": "basic"},
            "naive": {"training_type": "basic", "loss_weighting": "micro_batch"},
            "bf16": {"training_type": "basic", "mixed_precision": "bf16"},
        },
    )


def on_two(folder, cases):
    return run(folder, {name: ONE_PIPELINE | each for name, each in cases.items()})


def on_two_and_refused(folder):
    return on_two(folder, TWO) | {"refusals": refusals(folder)}


def on_four(folder):
    return run(folder, {name: TWO_BY_TWO | each for name, each in FOUR.items()}) | {
        "without": without(folder),
        "calls": {strategy: calls(folder, strategy) for strategy in ("ddp", "fsdp")},
    }


@pytest.fixture(scope="module")
def two(folder):
    return launch(on_two_and_refused, folder / "two", num_processes=2, timeout=800, device="cpu", stream=False)


@pytest.fixture(scope="module")
def more(folder):
    return launch(on_two, folder / "more", MORE, num_processes=2, timeout=800, device="cpu", stream=False)


@pytest.fixture(scope="module")
def four(folder):
    return launch(on_four, folder / "four", num_processes=4, timeout=800, device="cpu", stream=False)


def agrees(found, wanted, tolerance=parity.LOSS_TOLERANCE):
    assert found["losses"] == pytest.approx(wanted["losses"], abs=tolerance) and len(found["losses"]) == STEPS
    assert found["norms"] == pytest.approx(wanted["norms"], rel=5e-2 if tolerance > 1e-5 else 5e-5)
    assert found["evaluations"] == pytest.approx(wanted["evaluations"], abs=tolerance) and found["evaluations"]
    return furthest(found, wanted)


def furthest(found, wanted):
    assert set(found["weights"]) == set(wanted["weights"])
    return max((found["weights"][name] - weight).abs().max().item() for name, weight in wanted["weights"].items())


@pytest.mark.parametrize("name", [name for name in TWO if name not in ("naive weights", "bf16")])
def test_one_pipeline_trains_like_the_plain_loop(two, plain, name):
    assert agrees(two[0][name], plain["basic"]) <= parity.WEIGHT_TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_one_pipeline_of_another_schedule_does_too(more, plain, name):
    assert agrees(more[0][name], plain["basic"]) <= parity.WEIGHT_TOLERANCE


def test_naive_weights_and_low_precision_are_those_of_the_plain_loop(two, plain):
    assert agrees(two[0]["naive weights"], plain["naive"]) <= parity.WEIGHT_TOLERANCE
    assert agrees(two[0]["bf16"], plain["bf16"], tolerance=2e-2) < 2e-3
    assert two[0]["bf16"]["losses"] != pytest.approx(plain["basic"]["losses"], abs=1e-5)
    assert two[0]["naive weights"]["losses"] != pytest.approx(plain["basic"]["losses"], abs=1e-5)


@pytest.mark.parametrize("name", [name for name in FOUR if "bf16" not in name])
def test_two_pipelines_of_two_ranks_train_like_the_plain_loop(four, plain, name):
    assert agrees(four[0][name], plain["basic"]) <= parity.WEIGHT_TOLERANCE


def test_two_pipelines_that_fully_shard_splits_compute_in_bf16_too(four, plain):
    assert agrees(four[0]["2x2 fsdp bf16"], plain["bf16"], tolerance=2e-2) < 2e-3
    assert four[0]["2x2 fsdp bf16"]["losses"] != pytest.approx(plain["basic"]["losses"], abs=1e-5)


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_stage_is_gathered_and_reduced_once_a_batch_not_with_each_micro_batch(four, chunks):
    steps, blocks = four[0]["calls"]["fsdp"][chunks]
    units = blocks + 1  # and what is around the blocks
    assert blocks > 0 and len(steps) == 3
    for moved in steps[1:]:  # in the first one torch's runtime learns the shapes of messages, by one forward more
        assert (moved["all_gather"], moved["reduce_scatter"]) == (units, units)


def test_gradients_are_summed_over_the_copies_once_a_batch_not_with_each_micro_batch(four):
    few, many = (four[0]["calls"]["ddp"][chunks][0] for chunks in (2, 4))
    assert few == many and len(few) == 3 and all(moved["all_reduce"] for moved in few)


@pytest.mark.long
def test_two_pipelines_sum_their_gradients_in_buckets_too(plain, folder):
    cases = {"2x2": TWO_BY_TWO | {"schedule": "gpipe", "bucket_mb": 0.1}}
    found = launch(run, folder / "buckets", cases, num_processes=4, timeout=800, device="cpu", stream=False)[0]
    assert agrees(found["2x2"], plain["basic"]) <= parity.WEIGHT_TOLERANCE


@pytest.mark.parametrize("name", ["untied", "apart", "untied shards"])
def test_without_an_exchange_it_differs(four, plain, name):
    assert furthest(four[0]["without"][name], plain["basic"]) > 100 * parity.WEIGHT_TOLERANCE


def test_a_rank_holds_its_own_stages_alone(two):
    zbv = two[0]["zbv"]
    whole = zbv["all"] - zbv["weights"]["transformer.wte.weight"].numel()  # the tied head's second name; see below
    for name in ("split by name", "zbv"):
        held = [sum(size for _, size in rank[name]["parameters"]) for rank in two]
        assert all(0 < each < whole for each in held)
    first, second = ({name for name, _ in rank["split by name"]["parameters"]} for rank in two)
    assert not first & second  # a block is on one rank; the tied head has another name on the second
    assert any("transformer.h.0." in name for name in first) and any("transformer.h.3." in name for name in second)


def test_what_cannot_be_is_refused_with_the_rule(two):
    said = two[0]["refusals"]
    assert "pipelines of" in said["sizes"] and "and there are 2: choose data_parallel_size" in said["sizes"]
    assert "split_spec makes 3 stages, and 1f1b has 2 on 2 ranks: name 1 places" in said["stages"]
    assert "has no module transformer.h.9" in said["place"]
    assert "`transformer.h.0`, and a place is BLOCK:end" in said["spec"]
    assert "dualpipev with 2 micro-batches" in said["chunks"]
    assert "a fitted ZB-V with 2 micro-batches on 2 ranks: it takes at least as many as stages, 4" in said["fitted"]
    assert "schedule zbv puts the stages that share model.transformer.wte.weight on one rank" in said["two roots"]
    assert len(said) == 7


RESUMED = [  # saved by, resumed by
    ("two/zbv", 4, {**TWO_BY_TWO, "schedule": "1f1b"}),
    ("four/2x2-zero1", 2, {**ONE_PIPELINE, "schedule": "zb_h1"}),
    ("two/split-by-name", 4, {**TWO_BY_TWO, "schedule": "zbv", "strategy": "zero1"}),
    ("four/2x2-zero1", 2, {"strategy": "fsdp", "engine": "scratch", "batch_size": ROWS // 2}),
    ("plain/basic", 2, {**ONE_PIPELINE, "split_spec": "transformer.h.2:beginning"}),
    ("four/2x2-fsdp", 2, {**ONE_PIPELINE, "schedule": "zbv"}),
    ("four/2x2-zero1", 4, {**TWO_BY_TWO, "strategy": "fsdp"}),
]


def resume(folder, saved_by, number, options):
    came_from = folder / saved_by / checkpoint.name(3)
    return traced(
        parity.task(folder / f"resumed-{number}", 1, **COMMON, resume_from_checkpoint=str(came_from), **options)
    )


@pytest.mark.parametrize(
    "number", some(range(len(RESUMED)), 3, 5, 6), ids=lambda i: f"{RESUMED[i][0]}-to-{RESUMED[i][1]}"
)
def test_resumed_with_another_split_or_strategy(two, four, plain, folder, number):
    saved_by, ranks, options = RESUMED[number]
    found = launch(
        resume, folder, saved_by, number, options, num_processes=ranks, timeout=400, device="cpu", stream=False
    )[0]
    assert found["losses"] == pytest.approx(plain["basic"]["losses"][3:], abs=parity.LOSS_TOLERANCE)
    assert furthest(found, plain["basic"]) <= parity.WEIGHT_TOLERANCE


def test_resumed_by_the_plain_loop(two, four, plain, folder):
    for saved_by in ("two/zbv", "four/2x2-zero1", "four/2x2-fsdp"):
        found = resume(folder, saved_by, saved_by.replace("/", "-"), {"training_type": "basic"})
        assert found["losses"] == pytest.approx(plain["basic"]["losses"][3:], abs=parity.LOSS_TOLERANCE)


def classify(folder, training_type, **options):
    options = {
        "model": "tiny-bert",
        "max_train_samples": 96,
        "max_eval_samples": 37,
        "max_length": 32,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "progress_bar": False,
        "baselines": False,
        "device": "cpu",
        "save_steps": 0,
        "output_dir": str(folder / training_type),
        "training_type": training_type,
    } | options
    config = build(options)
    return train(config)


def test_the_run_ends_with_one_model_that_anyone_loads(tmp_path):
    from transformers import pipeline as make_pipeline

    found = launch(
        classify,
        tmp_path,
        "pipeline",
        batch_size=16,
        schedule="interleaved",
        pipeline_chunks=4,
        num_processes=2,
        timeout=600,
        device="cpu",
        stream=False,
    )[0]
    said = found["pipeline"]
    assert (said["schedule"], said["stages"], said["pipeline_chunks"]) == ("interleaved", 4, 4)
    assert len(said["split"]) == 5 and 0 < said["predicted_bubble"] < 0.5
    assert found["world_size"] == 2 == len(found["memory"]["peak_bytes"]) and found["train"]["global_batch_size"] == 16
    assert found["eval"]["rows"] == 37 and found["engine"] == "scratch"
    summary = json.loads((tmp_path / "pipeline" / "summary.json").read_text())
    assert summary["pipeline"] == said
    answers = make_pipeline("text-classification", model=str(tmp_path / "pipeline" / "model"))(["good", "bad"])
    assert len(answers) == 2 and answers[0]["label"] in ("negative", "neutral", "positive")
    model = modeling.load_trained(tmp_path / "pipeline" / "model", "classification").model
    assert not any(parameter.is_meta for parameter in model.parameters())
