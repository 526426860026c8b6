"""Benchmark plans, and a planner that measured runs have calibrated."""

import argparse
import json

import pytest

from course_lib.commands import bench_plan
from course_lib.errors import ConfigError
from course_lib.planning import benchmark, cost, hardware, models
from course_lib.planning.plan import Plan

MODEL = models.from_config(
    {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 4000,
    }
)
PLAN = Plan(128, data=2, micro_batch=2, precision="fp32")


def test_a_plan_of_runs_as_the_document_asks_for_it():
    plan = benchmark.generate("bert-base-uncased", ["cuda", "rocm"], distributed=True, max_gpus=4)
    assert json.loads(json.dumps(plan)) == plan
    assert {(run["accelerator"], run["gpus"]) for run in plan["runs"]} == {
        (chip, gpus) for chip in ("A100-80", "MI300X") for gpus in (1, 2, 4)
    }
    assert any(run["strategy"] == "DDP" and "torchrun" in run["command"] for run in plan["runs"])
    assert all(run["predicted"]["tokens_per_second"] > 0 for run in plan["runs"])
    alone = benchmark.generate("bert-base-uncased", max_gpus=4)
    assert {run["gpus"] for run in alone["runs"]} == {1}


def test_what_does_not_fit_is_left_out_with_the_reason():
    plan = benchmark.generate("llama-70b", ["T4"], max_gpus=1)
    assert not plan["runs"] and "T4" in str(plan["left_out"])


def test_layouts_to_run_here_take_the_ranks_that_there_are():
    document = benchmark.generate("gpt2", ["cuda"], distributed=True, max_gpus=8)
    here = benchmark.runnable(document, 2)
    assert {plan.gpus for plan in here} == {1, 2} and {"ddp", "fsdp"} <= {plan.engine for plan in here}
    assert all(plan.precision == "fp32" and plan.tensor == 1 for plan in here)


def test_calibrated_the_planner_predicts_what_was_measured(tmp_path):
    cluster, file = hardware.cluster("CPU", 2), tmp_path / "results.json"
    predicted = cost.estimate(MODEL, PLAN, cluster).tokens_per_second
    measured = 0.6 * predicted
    shares = benchmark.calibration([(MODEL, PLAN, cluster, measured)] * 3)
    benchmark.write_results(file, {"model": "mine"}, [], shares)
    learnt = benchmark.calibrated(cluster, file)
    assert cost.estimate(MODEL, PLAN, learnt).tokens_per_second == pytest.approx(measured, rel=1e-6)
    assert learnt.accelerator.matmul["bf16"] == cluster.accelerator.matmul["bf16"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read"),
        ("{", "no measured shares"),
        ("{}", "no measured shares"),
        ('{"matmul": []}', "of CPU"),
        ('{"matmul": {"H100": {"bf16": 0.4}}}', "it has H100"),
        ('{"matmul": {"CPU": {"fp8": 0.4}}}', "of CPU"),
    ],
)
def test_files_that_are_no_calibration(text, says, tmp_path):
    file = tmp_path / "results.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        benchmark.calibrated(hardware.cluster("CPU", 1), file)


def test_a_throughput_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match="no share"):
        benchmark.matmul_share(MODEL, PLAN, hardware.cluster("CPU", 2), 1e15)


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench_plan.add_options(parser)
    return bench_plan.run(parser.parse_args(words))


def test_the_command_lists_and_writes(tmp_path, capsys):
    assert command("--list_models") == 0
    assert len(capsys.readouterr().out.splitlines()) == len(models.names())
    file = tmp_path / "bert.json"
    assert command("--model", "bert-base-uncased", "--distributed", "--max_gpus", "4", "--output", str(file)) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["model"] == "google-bert/bert-base-uncased"
    with pytest.raises(ConfigError, match="--output"):
        command("--model", "gpt2", "--run")
    with pytest.raises(ConfigError, match="nothing to benchmark"):
        command()
